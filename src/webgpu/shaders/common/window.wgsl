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

override direct: bool = false;  // the block is the caller's own matrix, its rows are all tokens
override more_statistics: bool = false;  // those of `extras` are asked for

const slot_columns = 1024u;
const flag_nan = 1u;
const flag_infinite = 2u;  // +inf
const flag_number = 4u;    // something that is not -inf

// A slot is summed up by these.
struct Slot {
  m: f32,             // maximum
  sum: f32,           // of e = exp(z - m)
  shifted: f32,       // of e (z - m)
  weighted: f32,      // of c_j z_j
  argmax: u32,
  flags: u32,
  squared: f32,       // sum of e^2, where there are more statistics
  logit_sum: f32,     // of z_j, likewise
}
