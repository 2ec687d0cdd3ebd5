// SPDX-License-Identifier: Apache-2.0
// A token's values and its call's flags. src/webgpu/run.h has the flags in the same order, which
// tests/webgpu/shared_names_test.py checks.

// A call's flags.
const has_vocab_weight = 1u;
const has_token_weight = 2u;
const outside_is_ignored = 4u;
const is_softmax = 8u;  // no targets and no losses: every row counts
const has_fault = 16u;
const has_token_grad = 32u;  // grad_loss is [N]
const has_state = 64u;       // row_reference and row_log_sum were given
const has_entropy = 128u;    // entropy was given
const has_grad_lse = 256u;
const has_grad_target = 512u;
const has_grad_entropy = 1024u;
const wants_gradient = 2048u;
const has_loss = 4096u;
const has_extras = 8192u;
const is_backward = 16384u;  // tokens without an upstream gradient are ignored
const has_teacher_softcap = 32768u;
const has_teacher_temperature = 65536u;  // per token
const has_grad_chosen = 131072u;         // chosen columns have gradients

// A token's kind: one of the first three, plus any of the states.
const ignored = 0u;
const counts = 1u;
const outside = 2u;
const state_nan = 256u;           // the row's statistics are NaN
const state_gradient_nan = 512u;  // the row's gradient is NaN
const state_not_kept = 1024u;     // kept state is another row's
const state_large = 2048u;        // the gradient's factors are divided by `large`
const state_chosen = 4096u;       // until its row starts: a chosen column has a gradient
fn is_counted(kind: u32) -> bool {
  return (kind & 255u) == counts;
}

const large = 0x1p60f;
const none = 0xffffffffu;  // no column, no row

// The state of a token: `rows`, [tokens].
struct State {
  kind: u32,
  target_column: u32,  // of the views, or none
  class_weight: f32,   // c_t
  token_weight: f32,   // a
  m: f32,
  log_sum: f32,       // log s
  target_logit: f32,  // z_t
  weighted: f32,      // sum of c_j z_j; in a divergence, its acceptance
  entropy: f32,
  argmax: u32,
  loss: f32,
  // Factors of the gradient: of p (or of a divergence's derivative), of the target's column, of
  // c_j, of the entropy. In a divergence the last two are the kept gradient's divisor and the mean
  // slope.
  probability: f32,
  onehot: f32,
  smoothing: f32,
  entropy_factor: f32,
  place: u32,  // the token's row of the block, or none
}

// Values that few calls need: `extras`, [tokens].
struct Extra {
  sum_p_squared: f32,
  mean_logit: f32,
  rank: u32,         // `none` for a token that does not count
  max_logprob: f32,  // only Combine sets it
  mass_above: f32,
  // As in Params (window.wgsl), for the token's own temperature. An invalid temperature makes the
  // slope NaN.
  slope: f32,
  cap_out: f32,
  cap_out_low: f32,
}

// The call's inputs for a token: `inputs`, [tokens].
struct Given {
  token_weight: f32,
  grad_loss: f32,
  row_reference: f32,
  row_log_sum: f32,
  entropy: f32,
  grad_lse: f32,
  grad_target_logit: f32,
  grad_entropy: f32,
}

// Values that all tokens share.
struct Scalars {
  normalizer: f32,
  exponent: i32,    // losses are divided by normalizer 2^exponent
  upstream: u32,    // the bits of grad_loss if it is a scalar, else of 1
  factor: f32,      // common to all gradients: upstream / (normalizer 2^exponent)
  weight_sum: f32,  // of the vocabulary's class weights
}
