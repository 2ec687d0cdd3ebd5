// SPDX-License-Identifier: Apache-2.0
// A row's sums give its loss and the factors of its gradient (the formulas of docs/semantics.md).

fn class_weight_sum() -> f32 {
  return select(p.classes, scalars.weight_sum, (p.flags & has_vocab_weight) != 0u);
}

fn loss_of(s: State) -> f32 {
  let lse = s.m + s.log_sum;
  let onehot = (1.0 - p.smoothing) * s.class_weight;
  var loss = 0.0;
  if (onehot != 0.0) {
    loss = onehot * ((s.m - s.target_logit) + s.log_sum);
  }
  if (p.smoothing > 0.0) {
    loss += p.smoothing_per_class * (class_weight_sum() * lse - s.weighted);
  }
  loss *= s.token_weight;
  if (p.z_loss > 0.0) {
    // A token of weight 0 has no loss, though the square may overflow.
    loss += select(0.0, s.token_weight * p.z_loss * lse * lse, s.token_weight != 0.0);
  }
  return loss;
}

// Sets the factors of the gradient's parts.
fn with_factors(token: u32, known: State) -> State {
  var s = known;
  let given = inputs[token];
  let upstream = select(scalars.factor, given.grad_loss, (p.flags & has_token_grad) != 0u);
  let ga = upstream * s.token_weight;
  var w = (1.0 - p.smoothing) * s.class_weight;
  if (p.smoothing > 0.0) {
    w += p.smoothing_per_class * class_weight_sum();
  }
  if (p.z_loss > 0.0) {
    w += 2.0 * p.z_loss * (s.m + s.log_sum);
  }
  s.probability = ga * w;
  s.onehot = ga * (1.0 - p.smoothing) * s.class_weight;
  s.smoothing = ga * p.smoothing_per_class;
  if ((p.flags & has_grad_lse) != 0u) {
    s.probability += given.grad_lse;
  }
  if ((p.flags & has_grad_target) != 0u) {
    s.onehot -= given.grad_target_logit;
  }
  if ((p.flags & has_grad_entropy) != 0u) {
    s.entropy_factor = given.grad_entropy;
  }
  if (is_nan(s.probability) || is_nan(s.onehot) || is_nan(s.smoothing) || is_nan(s.entropy_factor)) {
    s.kind |= state_gradient_nan;
  }
  return s;
}

// Makes the loss and the factors from the row's sums.
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
