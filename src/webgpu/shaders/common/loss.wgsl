// SPDX-License-Identifier: Apache-2.0
// Computes a row's loss and the factors of its gradient from its sums (docs/semantics.md). Factors
// are multiplied as Wide numbers (numbers.wgsl), because any of them may be tiny.

fn class_weight_sum() -> f32 {
  return select(p.classes, scalars.weight_sum, (p.flags & has_vocab_weight) != 0u);
}

fn loss_of(s: State) -> f32 {
  let lse = s.m + s.log_sum;
  let onehot = (1.0 - p.smoothing) * s.class_weight;
  var loss = 0.0;
  if (onehot != 0.0) {
    let nll = (s.m - s.target_logit) + s.log_sum;
    loss = narrow(by(by(wide(onehot), nll), s.token_weight));
  }
  if (p.smoothing > 0.0) {
    let spread = class_weight_sum() * lse - s.weighted;
    loss += narrow(by(by(wide(p.smoothing_per_class), spread), s.token_weight));
  }
  if (p.z_loss > 0.0) {
    loss += narrow(by(by(by(wide(s.token_weight), p.z_loss), lse), lse));
  }
  return loss;
}

// Sets the factors of the gradient's parts, each times the slope. If one has an exponent above 60,
// all are divided by `large`: two that overflow may still have a finite difference.
fn with_factors(token: u32, known: State) -> State {
  var s = known;
  let given = inputs[token];
  let upstream = select(scalars.factor, given.grad_loss, (p.flags & has_token_grad) != 0u);
  var w = (1.0 - p.smoothing) * s.class_weight;
  if (p.smoothing > 0.0) {
    w += p.smoothing_per_class * class_weight_sum();
  }
  if (p.z_loss > 0.0) {
    w += 2.0 * p.z_loss * (s.m + s.log_sum);
  }
  let slope = wide(slope_of(token));
  let ga = by(by(slope, upstream), s.token_weight);
  var parts = array<Wide, 6>(by(ga, w), by(by(ga, 1.0 - p.smoothing), s.class_weight),
                             by(ga, p.smoothing_per_class), by(slope, given.grad_lse),
                             by(slope, given.grad_target_logit), by(slope, given.grad_entropy));
  let is_given = array<bool, 6>(true, true, true, (p.flags & has_grad_lse) != 0u,
                                (p.flags & has_grad_target) != 0u,
                                (p.flags & has_grad_entropy) != 0u);
  var is_large = false;
  for (var k = 0u; k < 6u; k++) {
    if (!is_given[k]) {
      parts[k] = Wide(0.0, 0);
    }
    is_large = is_large || (parts[k].m != 0.0 && parts[k].e > 60);
  }
  if (is_large) {
    s.kind |= state_large;
    for (var k = 0u; k < 6u; k++) {
      parts[k].e -= 60;
    }
  }
  s.probability = narrow(parts[0]) + narrow(parts[3]);
  s.onehot = narrow(parts[1]) - narrow(parts[4]);
  s.smoothing = narrow(parts[2]);
  s.entropy_factor = narrow(parts[5]);
  if (is_nan(s.probability) || is_nan(s.onehot) || is_nan(s.smoothing) || is_nan(s.entropy_factor)) {
    s.kind |= state_gradient_nan;
  }
  return s;
}

// Computes the loss and the factors from the row's sums.
fn completed(token: u32, known: State) -> State {
  var s = known;
  if ((p.flags & has_entropy) != 0u) {
    s.entropy = inputs[token].entropy;
  }
  if (is_nan(s.m) || is_nan(s.log_sum)) {
    s.kind |= state_nan;
  }
  if ((p.flags & is_softmax) != 0u) {
    s.probability = 1.0;
    return s;
  }
  s.loss = loss_of(s);
  if ((s.kind & state_nan) != 0u) {
    s.loss = bitcast<f32>(p.nan);
  }
  if ((p.flags & wants_gradient) != 0u) {
    return with_factors(token, s);
  }
  return s;
}
