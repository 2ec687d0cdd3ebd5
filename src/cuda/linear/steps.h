// SPDX-License-Identifier: Apache-2.0
// A plan is the steps it takes. Engine::for_steps enumerates them in their order, without
// allocating; its visitors run them (linear_run.h), price them (plan_time.h), count what they need,
// or print them (logitless plan --steps).
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

enum class StepKind {
  // These steps run once a call, before the first chunk.
  tokens,        // finds which tokens count
  copy_weight,   // copies the weight to rows that a product can read
  column_terms,  // makes the bias and the class weights in f32
  class_row,     // makes sum_j c_j weight_j of the columns whose E is multiplied
  weight_tail,   // copies the weight's last V % 8 rows, with zeros behind them
  trade_rows,    // brings rows of kept E that have a gradient to the front
  // These steps run once a chunk of tokens.
  gather,   // compacts the chunk's rows of input and makes the logits of their targets
  targets,  // writes the logits of the targets, where nothing else is asked for
  logits,   // makes partial sums of each row over the panel's columns, and E where it is kept
  states,   // makes of the sums the outputs, the gradients' factors and input times v (scales)
  // Makes E of rows beyond the exponent's range, and what lies behind the panel's rows.
  finish_panel,
  form_dz,           // makes dz in the place of E, and its part of grad_bias unless by rows
  scale_input,       // makes input times v, and the rows that make the smoothing's term of E
  remake,            // makes E or dz of the panel, from logits made again
  form_panel,        // makes dz of the panel, from kept E
  copy_panel,        // copies E from grad_weight's memory to the workspace
  grad_input,        // makes panel . weight
  grad_weight,       // makes panel^T . input
  both_gradients,    // makes these two at once
  grad_bias,         // sums the panel's columns
  write_grad_input,  // makes grad_input from its sums
  // These steps run once a call, behind the last chunk.
  trade_back,         // brings the rows of kept E back to where they were
  no_tokens,          // writes the loss of no tokens, and gradients of 0
  write_grad_weight,  // makes grad_weight from its sums
  write_grad_bias,
};
const char* name_of(StepKind kind);

struct Range {
  int64_t first = 0, count = 0;
};

// These are columns [first, first + columns) of E or dz.
struct PanelPlace {
  int64_t first = 0, columns = 0;
  Origin origin = Origin::again_dz;
  bool lent = false;  // it lies in grad_weight's memory
  bool kept = false;  // it lies in the caller's memory, beside other columns
  // It is copied from there to the workspace for the product that makes its rows.
  bool copied = false;
  int64_t end() const { return first + columns; }
};

struct Step {
  StepKind kind;
  PanelPlace panel = {};
  int64_t lent_behind = 0;  // so many columns after the panel's lie in grad_weight's memory
  Range rows = {};          // they are counted in the chunk
  bool to_sums = false;     // a product's result goes to sums in f32; else to the gradient itself
  bool adds = false;        // a product's result is added to what is there
  bool scales = false;
  Range tokens = {};  // they are the chunk's, counted in the compacted ones
  int64_t columns() const { return panel.columns + lent_behind; }
  // Returns whether a product is of E, whose rows have factors; else it is of dz.
  bool of_e() const { return is_e(panel.origin); }
  PanelPlace behind() const {
    return {.first = panel.end(), .columns = lent_behind, .origin = panel.origin, .lent = true};
  }
};

class StepVisitor {
 public:
  virtual ~StepVisitor() = default;
  virtual void visit(const Step& step) = 0;
  // `count` alike steps follow; it returns how many times to enumerate them.
  virtual int64_t begin_repeat(int64_t count) { return count; }
  virtual void end_repeat(int64_t) {}
  // Returns how many parts of E in grad_weight's memory that differ to enumerate; each of the
  // others is enumerated as if it were copied.
  virtual int64_t most_parts() const { return INT64_MAX; }
};

// Calls body(i) for each of `count` alike steps that the visitor wants.
template <class F>
void repeat(StepVisitor* visitor, int64_t count, F&& body) {
  if (count <= 0) return;
  const int64_t wanted = visitor->begin_repeat(count);
  for (int64_t i = 0; i < wanted; ++i) body(i);
  visitor->end_repeat(count);
}
// Calls body(range) for the pieces of [0, total): the whole ones and what is left.
template <class F>
void repeat_pieces(StepVisitor* visitor, int64_t total, int64_t piece, F&& body) {
  const int64_t whole = total / piece, left = total % piece;
  repeat(visitor, whole, [&](int64_t i) { body(Range{i * piece, piece}); });
  repeat(visitor, left > 0, [&](int64_t) { body(Range{whole * piece, left}); });
}

// Enumerates what the steps of every engine begin with, have in common and end with; an engine's
// class adds those between.
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
  // Makes the partial sums of the chunk's rows, and E of the columns that are kept.
  virtual void logits() = 0;
  // Makes the chunk's gradients, from E or from logits that are made again.
  virtual void gradients() = 0;

  // Returns all columns of the caller's memory.
  PanelPlace callers() const {
    return {.columns = s_.kept_columns, .origin = s_.kernels.kept, .kept = true};
  }
  PanelPlace stored() const {
    return {.columns = p_.stored_columns, .origin = kept_, .kept = s_.kept_columns > 0};
  }
  PanelPlace lent() const {
    return {.first = p_.stored_columns, .columns = p_.lent_columns, .origin = kept_, .lent = true};
  }
  // Returns how many columns, the first ones, have their dz formed of the caller's E.
  int64_t formed_columns() const {
    return s_.kernels.kept == Origin::dz_in_panels ? s_.kept_columns : 0;
  }
  // Makes the panel of columns that are not stored.
  void make(PanelPlace* panel);
  void visit(Step&& step);
  void scale_input();
  void grad_weight(const PanelPlace& panel);
  void grad_bias(const PanelPlace& panel);
  // Makes grad_input of some rows at a time, from E of every column, through sums of so many rows.
  void grad_input_by_rows();
  // Writes rows from sums of panels of this origin.
  void write_grad_input(const Range& rows, Origin origin);

  const LinearShape& s_;
  const LinearPlan& p_;
  StepVisitor* visitor_;
  const Origin kept_, others_;  // of what is kept, and of what is made again
  Range tokens_;

 private:
  void begin();
  void chunk(const Range& tokens);
  void end();
};

}  // namespace logitless::cuda
