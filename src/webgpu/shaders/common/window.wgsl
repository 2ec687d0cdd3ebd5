// SPDX-License-Identifier: Apache-2.0
// The block holds the logits of a window of the vocabulary, [rows, row_stride]; its rows are the
// tokens that count (`counted`). A slot is 1024 columns of a row; its columns and the order of its
// sums are the same in every plan.

struct Params {
  rows: u32,                 // of the block
  columns: u32,              // of the window
  row_stride: u32,           // of the block
  base: u32,                 // of the block in its binding
  first_column: u32,         // of the window
  slots: u32,                // of a whole row
  flags: u32,
  nan: u32,                  // a NaN's bits: as a constant it would not compile
  slope: f32,                // logit_scale / temperature
  cap_in: f32,               // 2 logit_scale / softcap, which is never subnormal, and what that lost
  cap_in_low: f32,
  cap_out: f32,              // softcap / temperature, and what that lost
  cap_out_low: f32,
  smoothing: f32,
  smoothing_per_class: f32,  // label_smoothing / vocab_total
  z_loss: f32,
  floor: f32,                // of probabilities given as input
  classes: f32,              // vocab_total
  weight_base: u32,          // of the window in vocab_weight
}

@group(0) @binding(0) var<uniform> p: Params;

const has_vocab_weight = 1u;
const has_token_grad = 2u;  // grad_loss [N]
const has_state = 4u;       // row_reference, row_log_sum were given
const has_entropy = 8u;     // entropy was given
const has_grad_lse = 16u;
const has_grad_target = 32u;
const has_grad_entropy = 64u;
const is_softmax = 128u;
const wants_gradient = 512u;

override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens

// A token's words: state, target, c_t, a, m, log s, z_t, weighted sum, entropy, argmax, loss, the
// factors of p, one-hot, c_j and entropy, place in the block.
const words = 16u;
const state_nan = 256u;           // added to the state: the row's statistics are NaN
const state_gradient_nan = 512u;  // and its gradient is
const none = 0xffffffffu;
// A slot's words: maximum, sum, sum of e (z - m), weighted sum, argmax, z_t, flags.
const slot_columns = 1024u;
const slot_words = 8u;
const flag_nan = 1u;
const flag_infinite = 2u;  // +inf
const flag_number = 4u;    // something that is not -inf

// What is known of a token, in the order of its words.
struct State {
  kind: u32,
  target_column: u32,
  class_weight: f32,
  token_weight: f32,
  m: f32,
  log_sum: f32,
  target_logit: f32,
  weighted: f32,
  entropy: f32,
  argmax: u32,
  loss: f32,
  probability: f32,
  onehot: f32,
  smoothing: f32,
  entropy_factor: f32,
}
