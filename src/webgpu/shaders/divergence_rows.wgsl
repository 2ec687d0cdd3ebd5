// SPDX-License-Identifier: Apache-2.0
// Each thread handles a row: from the sums of its slots, in order, it computes the divergence, the
// loss and the factors of the gradient (docs/semantics.md, "Divergences of two heads").
// Uses common: numbers, token, window, scale, heads.

override summed: bool = false;   // the slots have sums
override keeps: bool = false;    // Forward keeps the gradient of an upstream gradient of 1
override is_kept: bool = false;  // Backward reads only what was kept

// counted[0]: the number of rows; their tokens' indices from counted[4] on, in order.
@group(0) @binding(1) var<storage, read> counted: array<u32>;
@group(0) @binding(2) var<storage, read> partials: array<PairSums>;   // [rows, slots]
@group(0) @binding(3) var<storage, read_write> rows: array<State>;    // [tokens]
@group(0) @binding(4) var<storage, read> teacher_rows: array<State>;  // [tokens]
@group(0) @binding(5) var<storage, read> inputs: array<Given>;        // [tokens]
@group(0) @binding(6) var<storage, read> scalars: Scalars;
@group(0) @binding(7) var<storage, read> extras: array<Extra>;         // [tokens]

// Stores the sums in the state, whose loss is then the divergence alone.
fn with_sums(first: u32, known: State) -> State {
  var s = known;
  var sum = vec3<f32>(0.0);
  var infinite = 0u;
  for (var k = 0u; k < p.slots; k++) {
    let slot = partials[first + k];
    sum += vec3<f32>(slot.value, slot.mean_slope, slot.acceptance);
    infinite |= slot.infinite;
  }
  s.loss = sum.x;
  s.entropy_factor = sum.y;
  s.weighted = sum.z;
  if (infinite != 0u) {
    s.loss = bitcast<f32>(p.nan ^ 0x00400000u);
    if (divergence == reverse_kl) {
      s.kind |= state_gradient_nan;
    }
  }
  return s;
}

// Returns a (D + label_weight (lse - z_t)). D is the state's loss so far.
fn loss_of(s: State) -> f32 {
  var loss = narrow(by(wide(s.loss), s.token_weight));
  if (p.label_weight > 0.0) {
    let nll = (s.m - s.target_logit) + s.log_sum;
    loss += narrow(by(by(wide(p.label_weight), select(nll, 0.0, nll < 0.0)), s.token_weight));
  }
  return loss;
}

// Returns the exponent of the power of two that divides a row's kept gradient, so that its elements
// fit in f16. `far` is the row's divergence if it may exceed 2, else 0.
fn divisor_of(token: u32, far: f32) -> i32 {
  if (is_infinite(far) || is_nan(far)) {
    return 0;
  }
  let most = by(wide(2.0 * (far + 2.0) + p.label_weight), abs(slope_of(token)));
  if (most.m == 0.0 || is_nan(most.m)) {
    return 0;
  }
  let again = wide(most.m);
  return clamp(most.e + again.e + select(1, 0, again.m == 1.0) - 14, -126, 126);
}

// Sets the factor of all columns' derivatives. A large one is divided by `large`, as in loss.wgsl.
fn with_factor(token: u32, known: State, divergence_of_row: f32) -> State {
  var s = known;
  var factor = wide(1.0);
  if (keeps) {
    let exponent = divisor_of(token, select(0.0, divergence_of_row, divergence == reverse_kl));
    s.smoothing = power_of_two(exponent);
    factor = wide(slope_of(token));
    factor.e -= exponent;
  } else {
    let given = inputs[token];
    let upstream = select(scalars.factor, given.grad_loss, (p.flags & has_token_grad) != 0u);
    factor = by(wide(upstream), s.token_weight);
    if (is_kept) {
      factor = by(factor, s.smoothing);
    } else {
      factor = by(factor, slope_of(token));
    }
  }
  if (factor.m != 0.0 && factor.e > 60) {
    s.kind |= state_large;
    factor.e -= 60;
  }
  s.probability = narrow(factor);
  if (is_nan(s.probability)) {
    s.kind |= state_gradient_nan;
  }
  return s;
}

@compute @workgroup_size(64)
fn finish(@builtin(global_invocation_id) id: vec3<u32>) {
  let r = id.x;
  if (r >= counted[0]) {
    return;
  }
  let token = counted[4u + r];
  var s = rows[token];
  if (is_kept) {
    rows[token] = with_factor(token, s, 0.0);
    return;
  }
  if (summed) {
    s = with_sums(r * p.slots, s);
  }
  let distance = s.loss;
  s.loss = loss_of(s);
  if (((s.kind | teacher_rows[token].kind) & state_nan) != 0u) {
    s.kind |= state_gradient_nan;
    s.loss = bitcast<f32>(p.nan);
    s.weighted = s.loss;
  }
  if (is_nan(s.entropy_factor) || is_infinite(s.entropy_factor)) {
    s.kind |= state_gradient_nan;
  }
  if ((p.flags & wants_gradient) != 0u) {
    s = with_factor(token, s, distance);
  }
  rows[token] = s;
}
