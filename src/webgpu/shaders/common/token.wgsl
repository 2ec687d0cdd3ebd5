// SPDX-License-Identifier: Apache-2.0
// This is what the shaders know of a token and of its call. src/webgpu/run.h has the same names in
// the same order, which tests/webgpu/shared_names_test.py checks.

// A call's flags say what it has.
const has_vocab_weight = 1u;
const has_token_weight = 2u;
const outside_is_ignored = 4u;
const is_softmax = 8u;  // there are no targets and no losses, so every row counts
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
const is_backward = 16384u;  // a token without an upstream gradient is then ignored
const has_teacher_softcap = 32768u;
const has_teacher_temperature = 65536u;  // each token has its own
const has_grad_chosen = 131072u;         // there are gradients of chosen columns

// A token is of one of three kinds, to which the states are added.
const ignored = 0u;
const counts = 1u;
const outside = 2u;
const state_nan = 256u;           // the row's statistics are NaN
const state_gradient_nan = 512u;  // the row's gradient is NaN
const state_not_kept = 1024u;     // kept state is another row's
const state_large = 2048u;        // the gradient's factors are divided by `large`
const state_chosen = 4096u;       // before its row begins: a chosen column has a gradient
fn is_counted(kind: u32) -> bool {
  return (kind & 255u) == counts;
}

const large = 0x1p60f;
const none = 0xffffffffu;  // it stands for no column and no place

// `rows` has what is known of every token: [tokens].
struct State {
  kind: u32,
  target_column: u32,  // it is counted in the views, or none
  class_weight: f32,   // it is c_t
  token_weight: f32,   // it is a
  m: f32,
  log_sum: f32,       // it is log s
  target_logit: f32,  // it is z_t
  weighted: f32,      // it is the sum of c_j z_j, or a divergence's acceptance
  entropy: f32,
  argmax: u32,
  loss: f32,
  probability: f32,     // this factor of the gradient multiplies p, or a divergence's derivative
  onehot: f32,          // this one is of the target's column
  smoothing: f32,       // this one multiplies c_j; or a divergence's kept gradient is divided by it
  entropy_factor: f32,  // this one is of the entropy's gradient, or a divergence's mean slope
  place: u32,           // it is a row of the block, or none
}

// `extras` has what few calls ask for: [tokens].
struct Extra {
  sum_p_squared: f32,
  mean_logit: f32,
  rank: u32,  // it may be none
  max_logprob: f32,  // Combine has it
  mass_above: f32,
  // It is of the token's own temperature, as in Params (window.wgsl); NaN if that is none.
  slope: f32,
  cap_out: f32,
  cap_out_low: f32,
}

// `inputs` has what the call gives for every token: [tokens].
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

// These are common to all tokens.
struct Scalars {
  normalizer: f32,
  exponent: i32,    // the normalizer is times 2^exponent
  upstream: u32,    // it has the bits of grad_loss where that is one number, else those of 1
  factor: f32,      // it multiplies every gradient
  weight_sum: f32,  // it sums the vocabulary's weights
}
