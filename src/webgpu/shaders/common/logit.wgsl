// SPDX-License-Identifier: Apache-2.0
// Computes draw, the loss's gradient with respect to a column's raw logit (docs/semantics.md).

// Returns c_j.
fn class_weight_of(local: u32) -> f32 {
  if ((p.flags & has_vocab_weight) != 0u) {
    return vocab_weight[p.weight_base + local];
  }
  return 1.0;
}

// Returns draw of a column from its raw logit.
fn draw(s: State, scale: Scale, raw: f32, column: u32, local: u32) -> u32 {
  if ((s.kind & (state_nan | state_gradient_nan)) != 0u) {
    return p.nan;
  }
  let mapped = map_raw(raw, scale);
  if (is_nan(mapped.z)) {
    return p.nan;
  }
  var probability = 0.0;
  var log_p = 0.0;
  if (!(is_infinite(mapped.z) && is_negative(mapped.z))) {
    log_p = (mapped.z - s.m) - s.log_sum;
    // A state given by the caller may belong to another row, so p may exceed 1.
    if (log_p > 0.0) {
      probability = exp(log_p);
    } else {
      probability = exp_nonpositive(log_p);
    }
  }
  var dz = s.probability * probability;
  if (p.smoothing > 0.0) {
    dz -= s.smoothing * class_weight_of(local);
  }
  if (column == s.target_column) {
    dz -= s.onehot;
  }
  if ((p.flags & has_grad_entropy) != 0u && probability > 0.0) {
    dz -= s.entropy_factor * (probability * (log_p + s.entropy));
  }
  if (capped) {
    dz *= (1.0 - mapped.t) * (1.0 + mapped.t);
  }
  if ((s.kind & state_large) != 0u) {
    dz *= large;
  }
  return bitcast<u32>(dz);
}
