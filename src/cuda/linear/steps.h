// SPDX-License-Identifier: Apache-2.0
// The steps of a plan. Engine::for_steps enumerates them in order, without allocating; visitors run
// them (linear_run.h), predict their time (plan_time.h), or print them (logitless plan --steps).
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

enum class StepKind {
  // Once per call, before the first chunk.
  tokens,        // find which tokens count
  copy_weight,   // copy the weight to rows that a product can read
  column_terms,  // the bias and the class weights in f32
  class_row,     // sum_j c_j weight_j of the columns whose E is multiplied
  weight_tail,   // copy the weight's last V % 8 rows, followed by zeros
  trade_rows,    // move rows of kept E that have a gradient to the front
  // For each chunk of tokens; some of these steps for each panel of columns.
  gather,   // compact the chunk's rows of input and compute the target logits
  targets,  // write the target logits, if no other output is requested
  logits,   // partial sums of each row over the panel's columns, and E if kept
  states,   // from the sums or a given state: outputs, gradients' factors, input times v
  // E of rows beyond the exponent's range, and the padding rows after the panel's.
  finish_panel,
  form_dz,           // dz in place of E; also its part of grad_bias if Origin is dz_in_place
  scale_input,       // input times v, and the rows that give the smoothing's term of E
  remake,            // E or dz of the panel, from logits computed again
  form_panel,        // dz of the panel, from kept E
  copy_panel,        // E from grad_weight's memory to the workspace
  grad_input,        // panel . weight
  grad_weight,       // panel^T . input
  both_gradients,    // both products in one launch
  grad_bias,         // sums of the panel's columns
  write_grad_input,  // grad_input from its sums
  // Once per call, after the last chunk.
  trade_back,         // move the rows of kept E back
  no_tokens,          // the loss of no tokens, and gradients of 0
  write_grad_weight,  // grad_weight from its sums
  write_grad_bias,
};
const char* name_of(StepKind kind);

struct Range {
  int64_t first = 0, count = 0;
};

// Columns [first, first + columns) of E or dz.
struct PanelPlace {
  int64_t first = 0, columns = 0;
  Origin origin = Origin::again_dz;
  bool lent = false;  // in grad_weight's memory
  bool kept = false;  // in the caller's `kept`
  // Copied from grad_weight's memory to the workspace, before a product writes that memory.
  bool copied = false;
  int64_t end() const { return first + columns; }
};

struct Step {
  StepKind kind;
  PanelPlace panel = {};
  int64_t lent_behind = 0;  // columns after the panel's in grad_weight's memory
  Range rows = {};          // within the chunk
  bool to_sums = false;     // a product writes sums in f32, else the gradient itself
  bool adds = false;        // a product's result is added to existing sums
  bool scales = false;
  Range tokens = {};  // the chunk's, by compacted index
  int64_t columns() const { return panel.columns + lent_behind; }
  // Whether a product is of E, whose rows have factors, rather than of dz.
  bool of_e() const { return is_e(panel.origin); }
  PanelPlace behind() const {
    return {.first = panel.end(), .columns = lent_behind, .origin = panel.origin, .lent = true};
  }
};

class StepVisitor {
 public:
  virtual ~StepVisitor() = default;
  virtual void visit(const Step& step) = 0;
  // `count` equal steps follow; returns how many of them to enumerate.
  virtual int64_t begin_repeat(int64_t count) { return count; }
  virtual void end_repeat(int64_t) {}
  // How many different parts of E in grad_weight's memory to enumerate; the remaining parts are
  // enumerated as if they were copied.
  virtual int64_t most_parts() const { return INT64_MAX; }
};

// Calls body(i) for each of `count` equal steps that the visitor wants.
template <class F>
void repeat(StepVisitor* visitor, int64_t count, F&& body) {
  if (count <= 0) return;
  const int64_t wanted = visitor->begin_repeat(count);
  for (int64_t i = 0; i < wanted; ++i) body(i);
  visitor->end_repeat(count);
}
// Calls body(range) for the pieces of [0, total): the whole pieces and the remainder.
template <class F>
void repeat_pieces(StepVisitor* visitor, int64_t total, int64_t piece, F&& body) {
  const int64_t whole = total / piece, left = total % piece;
  repeat(visitor, whole, [&](int64_t i) { body(Range{i * piece, piece}); });
  repeat(visitor, left > 0, [&](int64_t) { body(Range{whole * piece, left}); });
}

// Enumerates the steps that all engines share; an engine's class adds those between.
class CallSteps {
 public:
  CallSteps(const LinearShape& shape, const LinearPlan& plan, StepVisitor* visitor)
      : s_(shape),
        p_(plan),
        visitor_(visitor),
        kept_(kept_columns(plan) > 0 ? shape.kernels.kept : Origin::again_dz),
        others_(kept_ == Origin::e ? shape.kernels.others : Origin::again_dz) {}
  virtual ~CallSteps() = default;
  void enumerate();

 protected:
  // The partial sums of the chunk's rows, and E of the columns that are kept.
  virtual void logits() = 0;
  // The chunk's gradients, from E or from logits computed again.
  virtual void gradients() = 0;

  // All columns that are in the caller's memory.
  PanelPlace callers() const {
    return {.columns = s_.kept_columns, .origin = s_.kernels.kept, .kept = true};
  }
  PanelPlace stored() const {
    return {.columns = p_.stored_columns, .origin = kept_, .kept = s_.kept_columns > 0};
  }
  PanelPlace lent() const {
    return {.first = p_.stored_columns, .columns = p_.lent_columns, .origin = kept_, .lent = true};
  }
  // The number of columns, from the first, whose dz is computed from the caller's E.
  int64_t formed_columns() const {
    return s_.kernels.kept == Origin::dz_in_panels ? s_.kept_columns : 0;
  }
  // Computes the panel of columns that are not stored.
  void make(PanelPlace* panel);
  void visit(Step&& step);
  void scale_input();
  void grad_weight(const PanelPlace& panel);
  void grad_bias(const PanelPlace& panel);
  // grad_input of some rows at a time, from E of all columns, through sums of those rows.
  void grad_input_by_rows();
  // Writes rows from sums of panels of this origin.
  void write_grad_input(const Range& rows, Origin origin);

  const LinearShape& s_;
  const LinearPlan& p_;
  StepVisitor* visitor_;
  const Origin kept_, others_;  // of kept columns, and of those computed again
  Range tokens_;

 private:
  void begin();
  void chunk(const Range& tokens);
  void end();
};

}  // namespace logitless::cuda
