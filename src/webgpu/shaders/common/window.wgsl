// SPDX-License-Identifier: Apache-2.0
// The block holds the logits of a window of the vocabulary, [rows, row_stride]; its rows are the
// tokens that count (`counted`). A slot is 1024 columns of a row; its columns and the order of its
// sums are the same in every plan.

struct Params {
  rows: u32,          // the block has so many
  columns: u32,       // the window has so many
  row_stride: u32,    // it lies between rows of the block
  base: u32,          // the block begins there in its binding
  first_column: u32,  // the window begins there
  slots: u32,         // a whole row has so many
  flags: u32,
  nan: u32,    // these are a NaN's bits, which would not compile as a constant
  slope: f32,  // it is logit_scale / temperature
  // It is 2 logit_scale / softcap, which is never subnormal; cap_in_low is what that lost.
  cap_in: f32,
  cap_in_low: f32,
  cap_out: f32,  // it is softcap / temperature; cap_out_low is what that lost
  cap_out_low: f32,
  smoothing: f32,
  smoothing_per_class: f32,  // it is label_smoothing / vocab_total
  z_loss: f32,
  floor: f32,        // it is added to probabilities given as input
  classes: f32,      // it is vocab_total
  weight_base: u32,  // the window begins there in vocab_weight
  // Divergences have these: the teacher's factors, like those above, and their own options.
  teacher_slope: f32,
  teacher_cap_in: f32,
  teacher_cap_in_low: f32,
  teacher_cap_out: f32,
  teacher_cap_out_low: f32,
  beta: f32,
  rest: f32,  // it is 1 - beta
  label_weight: f32,
  zero: u32,  // it is 0, which no compiler knows
  // Chosen columns have these: a token has so many, an id so many words; and a product's operands.
  chosen: u32,
  id_words: u32,
  depth: u32,          // it counts vec4 of a row of hidden
  weight_first: u32,   // it counts vec4 in the binding
  weight_stride: u32,  // it counts vec4
}

@group(0) @binding(0) var<uniform> p: Params;

override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens
override more_statistics: bool = false;  // statistics of `extras` are asked for

const slot_columns = 1024u;
const flag_nan = 1u;
const flag_infinite = 2u;  // there is a +inf
const flag_number = 4u;    // there is something that is not -inf

// A slot is summed up by these.
struct Slot {
  m: f32,         // it is the maximum
  sum: f32,       // it sums e = exp(z - m)
  shifted: f32,   // it sums e (z - m)
  weighted: f32,  // it sums c_j z_j
  argmax: u32,
  flags: u32,
  squared: f32,    // it sums e^2, where there are more statistics
  logit_sum: f32,  // it sums z_j, where there are more statistics
}
