// SPDX-License-Identifier: Apache-2.0
// A column's contribution to a divergence and its gradient: docs/semantics.md, "Divergences of two
// heads"; src/cuda/divergence/column.cuh has the formulas. With e = exp(-|d|) and s = e - 1 no
// exponential overflows:
//   p - q            p <= q: q s                           p > q: -p s
//   log m/q          p <= q: log(1 + (1 - beta) s)         p > q: log(1 - (1 - beta) s/e)
//   log m/p          p <= q: log(1 - beta s/e)             p > q: log(1 + beta s)

const forward_kl = 0u;
const reverse_kl = 1u;
const jsd = 2u;
const skew_kl = 3u;
const tv = 4u;
override divergence: u32 = 0u;

fn has_mean() -> bool {
  return divergence != forward_kl;
}

// The sums of one slot, 1024 columns of both heads.
struct PairSums {
  value: f32,       // the slot's share of the divergence
  mean_slope: f32,  // sum of p_j f_j; f_j is slope_at
  acceptance: f32,
  infinite: u32,  // not 0: a term of the divergence is infinite
}

const infinitely_far = 0x1p120f;  // replaces |d| if one head's logit is -inf

// A column of both heads. If both probabilities are 0, it contributes 0, whatever d is.
struct Column {
  p: f32,
  q: f32,
  d: f32,             // log p - log q
  is_infinite: bool,  // the divergence's term is infinite
}
// Treats an infinite logit as -inf: the sums of rows with NaN or +inf are not read.
fn column_of(s: State, t: State, student: f32, teacher: f32) -> Column {
  let apart = (s.m - t.m) + (s.log_sum - t.log_sum);
  let no_p = is_infinite(student);
  let no_q = is_infinite(teacher);
  var c = Column(0.0, 0.0, (student - teacher) - apart, false);
  if (no_p) {
    c.d = -infinitely_far;
  } else {
    c.p = exp_nonpositive((student - s.m) - s.log_sum);
  }
  if (no_q) {
    c.d = infinitely_far;
  } else {
    c.q = exp_nonpositive((teacher - t.m) - t.log_sum);
  }
  c.is_infinite = (divergence == forward_kl && no_p && c.q > 0.0) ||
                  (divergence == reverse_kl && no_q && c.p > 0.0);
  return c;
}

// Returns p - q without cancellation.
fn difference(c: Column, x: Exponential) -> f32 {
  if (c.d > 0.0) {
    return -c.p * x.s;
  }
  return c.q * x.s;
}

// Returns log(rest + part r), rest = 1 - part. The ratio r of the heads is e if it is below 1
// (`less`), else 1 / e.
fn log_of_mixture(part: f32, rest: f32, less: bool, x: Exponential) -> f32 {
  let w = part * x.s;
  if (less) {
    return log_beside_one(part * x.e + rest, w);
  }
  return log_beside_one(1.0 - w / x.e, -w / x.e);
}
fn log_m_over_p(c: Column, x: Exponential) -> f32 {
  return log_of_mixture(p.beta, p.rest, c.d > 0.0, x);
}
fn log_m_over_q(c: Column, x: Exponential) -> f32 {
  return log_of_mixture(p.rest, p.beta, c.d <= 0.0, x);
}

// Returns the divergence's term, which is not negative, if it is finite.
fn value_of(c: Column) -> f32 {
  let x = exponential_of(-abs(c.d));
  let apart = difference(c, x);
  var value = 0.0;
  if (divergence == forward_kl) {
    value = apart - c.q * c.d;
  } else if (divergence == reverse_kl) {
    value = c.p * c.d - apart;
  } else if (divergence == jsd) {
    value = -(p.beta * (c.q * log_m_over_q(c, x)) + p.rest * (c.p * log_m_over_p(c, x)));
  } else if (divergence == skew_kl) {
    value = p.rest * apart - c.q * log_m_over_q(c, x);
  } else {
    value = 0.5 * abs(apart);
  }
  return max(value, 0.0);
}

// Returns f_j, whose mean over p derivative_of subtracts. If p is 0 the result is not used.
fn slope_at(c: Column) -> f32 {
  if (divergence == reverse_kl) {
    return c.d;
  }
  if (divergence == tv) {
    return select(select(0.0, -0.5, c.d < 0.0), 0.5, c.d > 0.0);
  }
  let x = exponential_of(-abs(c.d));
  if (divergence == jsd) {
    return -log_m_over_p(c, x);
  }
  // Skewed KL has f = 1 - q/m; here q and m are divided by the greater of p and q.
  if (c.d > 0.0) {
    return -p.rest * x.s / (p.beta * x.e + p.rest);
  }
  return p.rest * x.s / (p.rest * x.e + p.beta);
}

// Returns the divergence's derivative with respect to z_j; `mean` is sum_k p_k f_k.
fn derivative_of(c: Column, mean: f32) -> f32 {
  if (divergence == forward_kl) {
    return difference(c, exponential_of(-abs(c.d)));
  }
  if (c.p == 0.0) {
    return 0.0;
  }
  let dz = c.p * (slope_at(c) - mean);
  if (divergence == jsd || divergence == skew_kl) {
    return p.rest * dz;
  }
  return dz;
}
