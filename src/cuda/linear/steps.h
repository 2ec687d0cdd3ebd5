// SPDX-License-Identifier: Apache-2.0
// A plan is the steps it takes. Engine::for_steps enumerates them in their order, without
// allocating; what visits them runs them (linear_run.h), prices them (plan_time.h), counts what
// they need, or prints them (logitless plan --steps).
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

enum class StepKind {
  // These are the call's, before the first chunk.
  tokens,        // which tokens count
  copy_weight,   // to rows that a product can read
  column_terms,  // bias and class weights in f32
  class_row,     // sum_j c_j weight_j of the columns whose E is multiplied
  weight_tail,   // the weight's last V % 8 rows, with zeros behind them
  // These are of a chunk of tokens.
  gather,            // their rows of input, compacted, and the logits of their targets
  logits,            // of the panel's columns: partial sums of each row; E (of_e: which is kept)
  states,            // from the sums: outputs, the factors of the gradients, input times v (scales)
  finish_panel,      // E of rows beyond the exponent's range; what lies behind the panel's rows
  form_dz,           // dz in the place of E, and its part of grad_bias
  scale_input,       // input times v, and the rows that make the smoothing's term of E
  remake,            // E (of_e) or dz of the panel, from logits made again
  copy_panel,        // of E, from grad_weight's memory to the workspace
  grad_input,        // panel . weight
  grad_weight,       // panel^T . input
  both_gradients,    // these two at once
  grad_bias,         // the panel's columns summed
  write_grad_input,  // from its sums
  // These are the call's, behind the last chunk.
  no_tokens,          // the loss of none, and gradients of 0
  write_grad_weight,  // from its sums
  write_grad_bias,
};
const char* name_of(StepKind kind);

struct Range {
  int64_t first = 0, count = 0;
};

// Columns [first, first + columns) of E or dz.
struct PanelPlace {
  int64_t first = 0, columns = 0;
  bool lent = false;    // lies in grad_weight's memory
  bool copied = false;  // and is copied from there to the workspace for its rows' product
  int64_t end() const { return first + columns; }
};

struct Step {
  StepKind kind;
  PanelPlace panel = {};
  int64_t lent_behind = 0;  // columns after the panel's, which lie in grad_weight's memory
  Range rows = {};          // of the chunk
  bool of_e = false;        // of E, whose rows have factors; else of dz
  bool to_sums = false;     // a product's result goes to sums in f32; else to the gradient itself
  bool adds = false;        // to what is there
  bool scales = false;
  Range tokens = {};  // the chunk's, of those compacted
  int64_t columns() const { return panel.columns + lent_behind; }
  PanelPlace behind() const { return {.first = panel.end(), .columns = lent_behind, .lent = true}; }
};

// Visits steps whose type is not known where they are enumerated: Engine::for_steps. Others need
// these functions alone, not the base.
class StepVisitor {
 public:
  virtual ~StepVisitor() = default;
  virtual void visit(const Step& step) = 0;
  // Alike steps follow, `count` times: how many times to enumerate them.
  virtual int64_t begin_repeat(int64_t count) = 0;
  virtual void end_repeat(int64_t count) = 0;
  // Tells, of parts of E in grad_weight's memory that differ, how many to enumerate; the others are
  // told as if each were copied.
  virtual int64_t most_parts() const { return INT64_MAX; }
};

// body(i) of each of `count` alike steps that the visitor wants.
template <class Visitor, class F>
void repeat(Visitor* visitor, int64_t count, F&& body) {
  if (count <= 0) return;
  const int64_t wanted = visitor->begin_repeat(count);
  for (int64_t i = 0; i < wanted; ++i) body(i);
  visitor->end_repeat(count);
}
// body(range) of the pieces of [0, total): whole ones and what is left.
template <class Visitor, class F>
void repeat_pieces(Visitor* visitor, int64_t total, int64_t piece, F&& body) {
  const int64_t whole = total / piece, left = total % piece;
  repeat(visitor, whole, [&](int64_t i) { body(Range{i * piece, piece}); });
  repeat(visitor, left > 0, [&](int64_t) { body(Range{whole * piece, left}); });
}

// Enumerates what the steps of every engine begin with, have in common and end with. An engine's
// own class, `Steps`, adds logits(): the partial sums of the chunk's rows, and E of the columns
// that are kept; gradients(): the chunk's, from E or from logits that are made again; has_tail():
// whether products take the last V % 8 columns by themselves. A template, for plans are compared by
// their hundreds.
template <class Steps, class Visitor>
class CallSteps {
 public:
  CallSteps(const LinearShape& shape, const LinearPlan& plan, Visitor* visitor)
      : s_(shape), p_(plan), visitor_(visitor) {}
  void enumerate() {
    begin();
    repeat(visitor_, p_.chunks - 1,
           [&](int64_t i) { chunk({i * p_.token_chunk, p_.token_chunk}); });
    const int64_t first = (p_.chunks - 1) * p_.token_chunk;
    if (s_.tokens > 0) chunk({first, s_.tokens - first});
    tokens_ = {};
    end();
  }

 protected:
  PanelPlace stored() const { return {.columns = p_.stored_columns}; }
  PanelPlace lent() const {
    return {.first = p_.stored_columns, .columns = p_.lent_columns, .lent = true};
  }
  void visit(Step step) {
    step.tokens = tokens_;
    if (step.rows.count == 0) step.rows = {0, tokens_.count};
    visitor_->visit(step);
  }
  void scale_input() {
    if (smooths_e(s_, p_) && s_.grad_weight) visit({.kind = StepKind::scale_input});
  }
  void grad_weight(const PanelPlace& panel, bool of_e) {
    if (!s_.grad_weight) return;
    visit({.kind = StepKind::grad_weight,
           .panel = panel,
           .of_e = of_e,
           .to_sums = p_.grad_weight_sum,
           .adds = tokens_.first > 0});
  }
  void grad_bias(const PanelPlace& panel, bool of_e) {
    if (!s_.grad_bias) return;
    visit({.kind = StepKind::grad_bias, .panel = panel, .of_e = of_e, .adds = tokens_.first > 0});
  }
  // Some rows at a time from E of every column, through sums of so many rows.
  void grad_input_by_rows(bool of_e) {
    if (!s_.grad_input) return;
    repeat_pieces(visitor_, tokens_.count, p_.sum_rows, [&](const Range& rows) {
      visit({.kind = StepKind::grad_input,
             .panel = stored(),
             .rows = rows,
             .of_e = of_e,
             .to_sums = true});
      write_grad_input(rows, of_e);
    });
  }
  void write_grad_input(const Range& rows, bool of_e) {
    if (!s_.grad_input) return;
    visit({.kind = StepKind::write_grad_input, .rows = rows, .of_e = of_e});
  }

  const LinearShape& s_;
  const LinearPlan& p_;
  Visitor* visitor_;
  Range tokens_;

 private:
  Steps& own() { return static_cast<Steps&>(*this); }
  void begin() {
    visit({.kind = StepKind::tokens});
    if (s_.copies_weight) visit({.kind = StepKind::copy_weight});
    if (s_.bias || s_.class_weights) visit({.kind = StepKind::column_terms});
    if (smooths_e(s_, p_)) visit({.kind = StepKind::class_row});
    if (s_.grad_input && own().has_tail()) visit({.kind = StepKind::weight_tail});
  }
  void chunk(const Range& tokens) {
    tokens_ = tokens;
    visit({.kind = StepKind::gather});
    if (s_.forward) own().logits();
    const bool of_e = multiplies_e(s_, p_);
    visit({.kind = StepKind::states,
           .panel = stored(),
           .lent_behind = p_.lent_columns,
           .of_e = of_e,
           .scales = of_e && s_.grad_weight && !s_.smoothing});
    if (s_.gradients()) own().gradients();
  }
  void end() {
    if (s_.tokens == 0) return visit({.kind = StepKind::no_tokens});
    if (s_.grad_weight && (p_.grad_weight_sum || own().has_tail())) {
      visit({.kind = StepKind::write_grad_weight});
    }
    if (s_.grad_bias) visit({.kind = StepKind::write_grad_bias});
  }
};

}  // namespace logitless::cuda
