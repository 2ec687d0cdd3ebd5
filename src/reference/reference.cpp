// SPDX-License-Identifier: Apache-2.0
// The ops, written from docs/semantics.md, a token at a time: its row of logits, its loss and
// statistics, and its contribution to grad_input, grad_weight and grad_bias. In double, with plain
// loops.
#include "src/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "src/message.h"
#include "src/reference/divergence.h"
#include "src/reference/numbers.h"
#include "src/reference/row.h"
#include "src/reference/statistics.h"
#include "src/reference/tokens.h"

namespace logitless::reference {
namespace {

// A sum of gradient rows: its value, and its bound before the last rounding.
struct Sum {
  std::vector<double> value, error;
  std::vector<double> largest;  // the largest part of chosen columns in a summand

  void resize(int64_t count) {
    value.assign(count, 0.0);
    error.assign(count, 0.0);
    largest.assign(count, 0.0);
  }
  // Adds a * b_k, k in [0, count), where a has an error of up to error_of_a.
  void add(int64_t offset, double a, double error_of_a, const double* b, int64_t count) {
    for (int64_t k = 0; k < count; ++k) value[offset + k] += a * b[k];
    if (error_of_a == 0) return;
    for (int64_t k = 0; k < count; ++k) error[offset + k] += error_of_a * std::fabs(b[k]);
  }
  // Notes that chosen columns have the part `a` in the summands a * b_k.
  void add_chosen(int64_t offset, double a, const double* b, int64_t count) {
    for (int64_t k = 0; a != 0 && k < count; ++k) {
      largest[offset + k] = std::max(largest[offset + k], a * std::fabs(b[k]));
    }
  }
};

class Evaluation {
 public:
  Evaluation(const Call& call, const BoundModel& model, bool with_bounds)
      : call_(call), model_(model), with_bounds_(with_bounds) {}

  Result run() {
    result_.status = read_tokens(call_, &tokens_);
    if (!result_.status.ok()) return std::move(result_);
    if (call_.diverges && !call_.teacher_weight && !call_.teacher_logits) {
      result_.status = error(StatusCode::not_supported,
                             "teacher_weight is missing; reference keeps nothing and needs it");
      return std::move(result_);
    }
    if (tokens_.bad_temperature && !call_.combines) result_.fault |= 4;
    prepare();
    for (int64_t i = 0; i < call_.tokens(); ++i) {
      const Token& token = tokens_.token[i];
      if (!token.counts || !token.active) continue;
      if (call_.options.input_kind == InputKind::probabilities) {
        evaluate_probabilities(token, i);
      } else if (call_.combines) {
        evaluate_shards(token, i);
      } else if (call_.diverges) {
        evaluate_divergence(token, i);
      } else {
        evaluate_row(token, i);
      }
    }
    reduce_loss();
    finish_sum("grad_weight", call_.grad_weight, &grad_weight_);
    finish_sum("grad_bias", call_.grad_bias, &grad_bias_);
    return std::move(result_);
  }

 private:
  // Returns nullptr if the op does not ask for this output.
  Output* output(const char* name) {
    const auto found = result_.outputs.find(name);
    return found == result_.outputs.end() ? nullptr : &found->second;
  }

  void create(const char* name, const TensorView& view, double initial) {
    if (!view) return;
    Output& created = result_.outputs[name];
    created.value.assign(element_count(view), initial);
    created.bound.assign(element_count(view), 0.0);
  }

  // NaN and infinities must match exactly, so they have no bound.
  void set(Output* destination, int64_t index, Estimate estimate) {
    if (destination == nullptr) return;
    destination->value[index] = estimate.value;
    if (with_bounds_ && std::isfinite(estimate.value)) destination->bound[index] = estimate.error;
  }
  void set_index(Output* destination, int64_t token, Index index) {
    destination->value[token] = static_cast<double>(index.value);
    destination->accepted[token] = std::move(index.accepted);
  }
  void set_rounded(Output* destination, DType dtype, int64_t index, double value, double error) {
    set(destination, index, {value, error + rounding_error(dtype, value)});
  }

  void prepare();
  void evaluate_row(const Token& token, int64_t i);
  void evaluate_probabilities(const Token& token, int64_t i);
  void evaluate_shards(const Token& token, int64_t i);
  void evaluate_divergence(const Token& token, int64_t i);
  // Whether a divergence's state is an input, for the sums of a shard.
  bool is_given(std::string_view name) const {
    const bool state = name == "row_reference" || name == "row_log_sum";
    return state && call_.state_given();
  }
  bool wants_gradient() const {
    return call_.grad_logits || call_.grad_input || call_.grad_weight || call_.grad_bias;
  }
  template <class Of>
  void write_statistics(const Of& of, Made<Of> Statistic::* made, int64_t i) {
    for (const Statistic& statistic : statistics()) {
      Output* const to = output(statistic.name);
      if (to == nullptr) continue;
      if (statistic.is_index()) {
        set_index(to, i, (statistic.*made).index(of));
      } else {
        set(to, i, (statistic.*made).number(of));
      }
    }
  }
  void write_list(const std::vector<Listed>& list, int64_t i);
  void add_gradient(const RowGradient& gradient, int64_t i);
  void add_linear_gradient(const RowGradient& gradient, int64_t i);
  void add_only_chosen(const RowGradient& gradient, int64_t i);
  void count_chosen();
  void write_grad_input(int64_t i, int64_t summands);
  void reduce_loss();
  void finish_sum(const char* name, const TensorView& view, Sum* sum);

  const Call& call_;
  BoundModel model_;
  bool with_bounds_;
  Result result_;
  Tokens tokens_;
  std::vector<double> weight_, bias_;  // [V, D] [V]
  std::optional<TeacherHead> teacher_;
  Shards shards_;                     // only in Combine
  std::vector<Estimate> token_loss_;  // [N]  0 where ignored
  std::vector<int64_t> times_;        // [V]  number of summands of a column's gradient
  // grad_input_ is [D], of the current token; the others are [V, D] and [V].
  Sum grad_input_, grad_weight_, grad_bias_;
};

void Evaluation::prepare() {
  create("loss", call_.loss, 0);
  for (const Statistic& statistic : statistics()) {
    if (!call_.forward || !call_[statistic.name] || is_given(statistic.name)) continue;
    create(statistic.name, call_[statistic.name], statistic.is_index() ? -1 : 0);
    if (statistic.is_index()) output(statistic.name)->accepted.assign(call_.tokens(), {-1});
  }
  if (call_.diverges && call_.forward) {
    create("teacher_entropy", call_.teacher_entropy, 0);
    create("acceptance", call_.acceptance, 0);
    for (const char* name : {"teacher_row_reference", "teacher_row_log_sum"}) {
      if (!call_.sums_of_shard()) create(name, call_[name], 0);
    }
    create("divergence_sum", call_.divergence_sum, 0);
    create("slope_sum", call_.slope_sum, 0);
  }
  create("logits_at", call_.logits_at, -std::numeric_limits<double>::infinity());
  create("top_logits", call_.top_logits, -std::numeric_limits<double>::infinity());
  create("top_ids", call_.top_ids, -1);
  if (call_.top_ids) output("top_ids")->accepted.assign(element_count(call_.top_ids), {-1});
  create("grad_logits", call_.grad_logits, 0);
  create("grad_input", call_.grad_input, 0);
  create("grad_weight", call_.grad_weight, 0);
  create("grad_bias", call_.grad_bias, 0);
  token_loss_.assign(call_.tokens(), {});
  if (call_.combines) shards_ = read_shards(call_);
  if (!call_.linear) return;
  if (call_.diverges) teacher_.emplace(call_);
  if (call_.only_chosen) count_chosen();
  weight_ = read(call_.weight);
  if (call_.bias) bias_ = read(call_.bias);
  if (call_.grad_weight) grad_weight_.resize(element_count(call_.grad_weight));
  if (call_.grad_bias) grad_bias_.resize(element_count(call_.grad_bias));
}

void Evaluation::evaluate_row(const Token& token, int64_t i) {
  const Row row = make_row({call_, weight_, bias_, model_, with_bounds_}, token, i);
  if (call_.loss) token_loss_[i] = row_loss(call_, tokens_, token, row);
  const RowOf of{call_, tokens_, token, row};
  write_statistics(of, &Statistic::of_row, i);
  for (size_t k = 0; call_.logits_at && k < token.chosen.size(); ++k) {
    set(output("logits_at"), token.first_chosen + static_cast<int64_t>(k),
        logit_at(of, token.chosen[k].column));
  }
  if (call_.only_chosen) {
    add_only_chosen(gradient_of_chosen(call_, token, row), i);
  } else if (wants_gradient()) {
    add_gradient(row_gradient(call_, tokens_, token, row), i);
  }
  if (call_.top_logits) write_list(largest_logits(of, call_.listed()), i);
}

void Evaluation::write_list(const std::vector<Listed>& list, int64_t i) {
  for (int64_t r = 0; r < std::ssize(list); ++r) {
    set(output("top_logits"), i * call_.listed() + r, list[r].logit);
    set_index(output("top_ids"), i * call_.listed() + r, list[r].id);
  }
}

void Evaluation::evaluate_probabilities(const Token& token, int64_t i) {
  const std::vector<double> p = read_row(call_.logits, i);
  if (call_.loss) token_loss_[i] = probability_loss(call_, tokens_, token, p);
  if (call_.grad_logits) add_gradient(probability_gradient(call_, tokens_, token, p), i);
}

void Evaluation::evaluate_shards(const Token& token, int64_t i) {
  const WholeRow row = combine(shards_, i);
  if (call_.loss) token_loss_[i] = combined_loss(call_, tokens_, token, row);
  write_statistics(row, &Statistic::of_shards, i);
  if (!call_.top_logits) return;
  write_list(largest_of_shards(shards_, i, call_.listed(), call_.vocab_total()), i);
}

void Evaluation::evaluate_divergence(const Token& token, int64_t i) {
  const Row student = make_row({call_, weight_, bias_, model_, with_bounds_}, token, i);
  const Row teacher = teacher_->row(token, i, model_, with_bounds_);
  const double* mean = call_.gradients && call_.state_given() ? &token.slope_mean : nullptr;
  const DivergenceRow row = divergence_row(call_.divergence, student, teacher, mean);
  result_.undecided |= row.undecided;
  const RowOf of{call_, tokens_, token, student}, of_teacher{call_, tokens_, token, teacher};
  if (call_.loss) token_loss_[i] = divergence_loss(of, row);
  write_statistics(of, &Statistic::of_row, i);
  set(output("teacher_entropy"), i, {teacher.entropy, teacher.entropy_error});
  set(output("acceptance"), i, row.acceptance);
  set(output("teacher_row_reference"), i, row_reference(of_teacher));
  set(output("teacher_row_log_sum"), i, row_log_sum(of_teacher));
  set(output("divergence_sum"), i, row.divergence);
  set(output("slope_sum"), i, row.slope_sum);
  if (wants_gradient()) {
    add_gradient(divergence_gradient(call_, tokens_, token, student, row), i);
  }
}

void Evaluation::add_gradient(const RowGradient& gradient, int64_t i) {
  if (call_.linear) return add_linear_gradient(gradient, i);
  const int64_t columns = call_.vocab();
  Output* output = this->output("grad_logits");
  for (int64_t j = 0; j < columns; ++j) {
    set_rounded(output, call_.grad_logits.dtype, i * columns + j, gradient.value[j],
                gradient.error[j]);
  }
}

// grad_input = draw weight, grad_weight += draw^T input, grad_bias += draw. In addition to gamma(K)
// M_j, a stored draw_j has these errors: its own, roundings to a 16-bit input dtype, and values too
// small for that dtype.
void Evaluation::add_linear_gradient(const RowGradient& gradient, int64_t i) {
  const int64_t columns = call_.vocab(), hidden = call_.input.shape[1];
  const DType dtype = call_.input.dtype;
  const double stored = dtype == DType::f32 ? 0 : 2 * unit_roundoff(dtype);
  const double over_columns = gamma(model_, columns) + stored;
  const double over_tokens = gamma(model_, tokens_.active) + stored;
  const std::vector<double> h = read_row(call_.input, i);  // [D]
  grad_input_.resize(hidden);
  for (int64_t j = 0; j < columns; ++j) {
    const double draw = gradient.value[j];
    double for_input = 0, for_weight = 0;
    if (with_bounds_) {
      const double own = gradient.error[j] + gradient.stored_scale * least(dtype);
      for_input = own + over_columns * gradient.magnitude[j];
      for_weight = own + over_tokens * gradient.magnitude[j];
    }
    if (call_.grad_input) {
      grad_input_.add(0, draw, for_input, weight_.data() + j * hidden, hidden);
    }
    if (call_.grad_weight) grad_weight_.add(j * hidden, draw, for_weight, h.data(), hidden);
    if (model_.structured && !gradient.chosen.empty()) {
      const double one = 1, chosen = gradient.chosen[j];
      if (call_.grad_input) grad_input_.add_chosen(0, chosen, weight_.data() + j * hidden, hidden);
      if (call_.grad_weight) grad_weight_.add_chosen(j * hidden, chosen, h.data(), hidden);
      if (call_.grad_bias) grad_bias_.add_chosen(j, chosen, &one, 1);
    }
    if (!call_.grad_bias) continue;
    grad_bias_.value[j] += draw;
    grad_bias_.error[j] += for_weight;
  }
  write_grad_input(i, columns);
}

void Evaluation::write_grad_input(int64_t i, int64_t summands) {
  if (!call_.grad_input) return;
  const int64_t hidden = call_.hidden();
  Output* output = this->output("grad_input");
  for (int64_t k = 0; k < hidden; ++k) {
    set_rounded(output, call_.grad_input.dtype, i * hidden + k, grad_input_.value[k],
                grad_input_.error[k] +
                    static_cast<double>(summands) * (tiny32 + u32 * grad_input_.largest[k]));
  }
}

// A sum of n terms has an error of gamma(n) of their magnitudes; count_chosen has determined n.
void Evaluation::add_only_chosen(const RowGradient& gradient, int64_t i) {
  const int64_t columns = call_.vocab(), hidden = call_.hidden();
  const std::vector<double> h = read_row(call_.input, i);  // [D]
  const double one = 1;
  int64_t own = 0;
  for (const int64_t times : gradient.times) own += times;
  grad_input_.resize(hidden);
  for (int64_t j = 0; j < columns; ++j) {
    if (gradient.times[j] == 0) continue;
    const double draw = gradient.value[j], m = gradient.magnitude[j], error = gradient.error[j];
    const double* w = weight_.data() + j * hidden;
    const double of_row = error + gamma(model_, own) * m;
    const double of_column = error + gamma(model_, times_[j]) * m;
    if (call_.grad_input) grad_input_.add(0, draw, of_row, w, hidden);
    if (call_.grad_weight) grad_weight_.add(j * hidden, draw, of_column, h.data(), hidden);
    if (call_.grad_bias) grad_bias_.add(j, draw, of_column, &one, 1);
    if (!model_.structured) continue;
    if (call_.grad_input) grad_input_.add_chosen(0, m, w, hidden);
    if (call_.grad_weight) grad_weight_.add_chosen(j * hidden, m, h.data(), hidden);
    if (call_.grad_bias) grad_bias_.add_chosen(j, m, &one, 1);
  }
  write_grad_input(i, own);
}

// Counts, for each column of the views, how often active tokens choose it.
void Evaluation::count_chosen() {
  times_.assign(call_.vocab(), 0);
  for (const Token& token : tokens_.token) {
    if (!token.counts || !token.active) continue;
    for (const Chosen& c : token.chosen) {
      if (c.column >= 0) ++times_[c.column];
    }
  }
}

void Evaluation::reduce_loss() {
  if (!call_.loss) return;
  if (call_.options.reduction == Reduction::none) {
    for (size_t i = 0; i < token_loss_.size(); ++i) set(output("loss"), i, token_loss_[i]);
    return;
  }
  Estimate total;
  double magnitude = 0;
  for (const Estimate& loss : token_loss_) {
    total.value += loss.value;
    total.error += loss.error;
    magnitude += std::fabs(loss.value);
  }
  if (tokens_.counted > 0) total.error += u32 * (std::log2(tokens_.counted) + 2) * magnitude;
  if (call_.options.reduction == Reduction::mean) {
    total.value /= tokens_.normalizer;
    total.error /= std::fabs(tokens_.normalizer);
    total.error += (2 * u32 + tokens_.normalizer_error) * std::fabs(total.value);
    if (total.value != 0) total.error += tiny32;
  }
  if (tokens_.empty_mean) {
    const bool zero = call_.options.empty_mean == EmptyMean::zero;
    total = {zero ? 0.0 : std::numeric_limits<double>::quiet_NaN(), 0};
  }
  set(output("loss"), 0, total);
}

void Evaluation::finish_sum(const char* name, const TensorView& view, Sum* sum) {
  if (!view) return;
  const std::vector<double> old = call_.accumulate ? read(view) : std::vector<double>{};
  const size_t width = view.rank == 2 ? static_cast<size_t>(view.shape[1]) : 1;
  for (size_t k = 0; k < sum->value.size(); ++k) {
    const int64_t summands = call_.only_chosen ? times_[k / width] : tokens_.active;
    if (call_.accumulate) {
      // The old value is one more term.
      sum->value[k] = summands == 0 ? old[k] : sum->value[k] + old[k];
      sum->error[k] += gamma(model_, summands) * std::fabs(old[k]);
    }
    const double each = tiny32 + u32 * sum->largest[k];
    set_rounded(output(name), view.dtype, k, sum->value[k],
                sum->error[k] + static_cast<double>(summands) * each);
    // Without a term the result is 0, or the old value, to the bit.
    if (summands == 0) output(name)->bound[k] = 0;
  }
}

Result evaluate_softmax(const Call& op, bool with_bounds) {
  Result result;
  Output& probabilities = result.outputs["probabilities"];
  const DType dtype = op.probabilities.dtype;
  for (int64_t i = 0; i < op.logits.shape[0]; ++i) {
    const Row row = softmax_row(read_row(op.logits, i), with_bounds);
    for (size_t j = 0; j < row.z.size(); ++j) {
      const double p = row.probability[j];
      probabilities.value.push_back(p);
      const bool bounded = with_bounds && std::isfinite(p);
      probabilities.bound.push_back(
          bounded ? row.probability_error[j] + 4 * u32 * p + rounding_error(dtype, p) : 0.0);
    }
  }
  return result;
}

}  // namespace

Result evaluate(const Call& call, const BoundModel& model, bool with_bounds) {
  if (!call.loss_op) return evaluate_softmax(call, with_bounds);
  return Evaluation(call, model, with_bounds).run();
}

}  // namespace logitless::reference
