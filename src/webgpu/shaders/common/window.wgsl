// SPDX-License-Identifier: Apache-2.0
// The block holds the logits of a window of the vocabulary, [rows, row_stride]; its rows are the
// tokens that `counted` lists. A slot is 1024 columns of a row; its columns and the order of its
// sums do not depend on the plan.

struct Params {
  rows: u32,     // of the block
  columns: u32,  // of the window
  row_stride: u32,
  base: u32,          // where the block starts in its binding
  first_column: u32,  // where the window starts in the views
  slots: u32,         // of a whole row
  flags: u32,
  nan: u32,    // a NaN's bits: WGSL has no NaN literal
  slope: f32,  // logit_scale / temperature
  // 2 logit_scale / softcap, which is never subnormal, and its rounding error.
  cap_in: f32,
  cap_in_low: f32,
  cap_out: f32,  // softcap / temperature; cap_out_low: its rounding error
  cap_out_low: f32,
  smoothing: f32,
  smoothing_per_class: f32,  // label_smoothing / vocab_total
  z_loss: f32,
  floor: f32,        // added to probabilities given as input
  classes: f32,      // vocab_total
  weight_base: u32,  // where the window starts in vocab_weight
  // For divergences: the teacher's factors, like those above, and their own options.
  teacher_slope: f32,
  teacher_cap_in: f32,
  teacher_cap_in_low: f32,
  teacher_cap_out: f32,
  teacher_cap_out_low: f32,
  beta: f32,
  rest: f32,  // 1 - beta
  label_weight: f32,
  zero: u32,  // always 0, but no compiler can know it (divergence.wgsl, rounded)
  // For chosen columns: ids per token, words per id; a product's operands are counted in vec4s.
  chosen: u32,
  id_words: u32,
  depth: u32,          // of hidden and weight
  weight_first: u32,   // where the window's weights start in their binding
  weight_stride: u32,  // from one column's weights to the next's
}

@group(0) @binding(0) var<uniform> p: Params;

override direct: bool = false;  // the block is the caller's matrix, with all tokens
override more_statistics: bool = false;  // statistics of `extras` are requested

const slot_columns = 1024u;
const flag_nan = 1u;
const flag_infinite = 2u;  // some logit is +inf
const flag_number = 4u;    // some logit is not -inf

// The sums of a slot's columns.
struct Slot {
  m: f32,         // the maximum of z
  sum: f32,       // of e = exp(z - m)
  shifted: f32,   // of e (z - m)
  weighted: f32,  // of c_j z_j
  argmax: u32,
  flags: u32,
  squared: f32,    // of e^2; this and the next only with more_statistics
  logit_sum: f32,  // of z_j
}
