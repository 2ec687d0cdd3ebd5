// SPDX-License-Identifier: Apache-2.0
// Compares a sharded vocabulary with the whole one, on one device.
#include "shards.h"

#include <limits>
#include <tuple>

namespace logitless::conformance {
namespace {

// Compares the shards of one problem. Op is the op of the case.
template <class Op>
class ShardJudge {
 public:
  using Forward = std::conditional_t<LinearOp<Op>, LinearCrossEntropyForward, CrossEntropyForward>;

  ShardJudge(const TestDevice& device, const Case& c, const Split& split, const RunPlan& plan)
      : device_(device), case_(c), split_(split), plan_(plan), p_(build<Op>(c)) {
    int64_t first = 0;
    for (const int64_t count : split.sizes) {
      firsts_.push_back(first);
      first += count;
    }
    vocab_ = first;
    change();
  }

  Comparison judge() {
    if constexpr (ForwardOp<Op>) {
      combine(forwards(p_.op), p_.op);
    } else {
      const Forward whole = forward_of_backward();
      if constexpr (LinearOp<Op>) exchange_targets(whole);
      const std::vector<Fields> states = forwards(whole);
      if (!all_.ok()) return all_;
      give_states(combine(states, whole));
      if (all_.ok()) backwards();
    }
    return all_;
  }

 private:
  bool is_shard(size_t s) const { return split_.sizes[s] > 0 && split_.sizes[s] < vocab_; }
  std::string name_of_shard(size_t s) const { return "shard " + std::to_string(s); }

  // Changes the shard's content as the split says.
  void change() {
    if (split_.content == Split::plain) return;
    const int64_t first = firsts_[split_.shard], count = split_.sizes[split_.shard];
    if (split_.content == Split::nan) return put_nan(first + count - 1);
    const double scale = case_.options.logit_scale;
    const TensorView& view = masked_view();
    std::vector<double> values = read(view);
    for (size_t k = 0; k < values.size(); ++k) {
      const auto j = static_cast<int64_t>(k) % vocab_;
      if (j >= first && j < first + count) values[k] = std::copysign(INFINITY, -scale);
    }
    write(view, values);
    std::vector<double> target = read(p_.op.target);
    for (double& t : target) {
      if (t >= first && t < first + count) t = std::fmod(t + count, vocab_);
    }
    write(p_.op.target, target);
  }
  const TensorView& masked_view() const {
    if constexpr (LinearOp<Op>) {
      return p_.op.bias;
    } else {
      return p_.op.logits;
    }
  }
  void put_nan(int64_t column) {
    const TensorView& view = [&]() -> const TensorView& {
      if constexpr (LinearOp<Op>) {
        return p_.op.weight;
      } else {
        return p_.op.logits;
      }
    }();
    std::vector<double> values = read(view);
    // In given logits this is one token's element; in a weight it affects the column of all tokens.
    values[LinearOp<Op> ? column * view.shape[1] : column] = NAN;
    write(view, values);
  }

  Forward forward_of_backward() {
    const Op& op = p_.op;
    Forward forward{.target = op.target, .options = op.options, .weights = op.weights};
    if constexpr (LinearOp<Op>) {
      forward.input = op.input, forward.weight = op.weight, forward.bias = op.bias;
    } else {
      forward.logits = op.logits;
    }
    // Without a loss there is no reduction.
    forward.options.reduction = Reduction::none;
    forward.options.normalizer = 0;
    forward.weights.normalizer = {};
    for (TensorView* view : {&forward.statistics.row_reference, &forward.statistics.row_log_sum,
                             &forward.statistics.target_logit, &forward.statistics.entropy}) {
      *view = p_.pool.reserve(DType::f32, {op.target.shape[0]});
    }
    return forward;
  }

  // The largest of the shards' target logits is every shard's anchor.
  void exchange_targets(Forward alone) {
    alone.statistics = {.target_logit = alone.statistics.target_logit};
    std::vector<double> anchor(static_cast<size_t>(alone.target.shape[0]), -INFINITY);
    bool exchanged = false;
    for (size_t s = 0; s < split_.sizes.size(); ++s) {
      if (!is_shard(s)) continue;
      const Fields fields =
          run(shard_of(alone, firsts_[s], split_.sizes[s]), name_of_shard(s) + ", targets' logits");
      if (!all_.ok()) return;
      exchanged = true;
      const std::vector<double>& logits = fields.at("target_logit").value;
      for (size_t i = 0; i < anchor.size(); ++i) anchor[i] = std::fmax(anchor[i], logits[i]);
    }
    anchor_ = p_.pool.add(DType::f32, {std::ssize(anchor)}, anchor);
    if (exchanged) anchors_ = anchor;
  }

  template <class Any>
  Fields run(const Any& op, const std::string& name) {
    const Outcome outcome = execute(device_, op, p_.pool, plan_);
    reference::Result want = expected(device_, op, p_.model);
    if (split_.sizes.size() > 1) accept_no_probability(outcome.fields, &want);
    all_.merge(compare(want, outcome), name);
    kept_ = outcome.kept;
    return outcome.fields;
  }
  // Runs Forward on each shard; a shard without columns gets a state without probability.
  std::vector<Fields> forwards(const Forward& whole) {
    std::vector<Fields> shards(split_.sizes.size());
    const Fields* some = nullptr;
    for (size_t s = 0; s < shards.size() && all_.ok(); ++s) {
      if (split_.sizes[s] == 0) continue;
      Forward op = shard_of(whole, firsts_[s], split_.sizes[s]);
      if constexpr (LinearOp<Op> && BackwardOnlyOp<Op>) make_room(s, &op);
      shards[s] = run(op, name_of_shard(s));
      if constexpr (LinearOp<Op> && BackwardOnlyOp<Op>) keep(op);
      some = &shards[s];
    }
    for (size_t s = 0; s < shards.size() && some != nullptr; ++s) {
      if (split_.sizes[s] == 0) shards[s] = without_columns(*some);
    }
    return shards;
  }

  // Cases with an odd seed have room for all columns, the others for half.
  void make_room(size_t s, LinearCrossEntropyForward* op) {
    if (is_shard(s)) op->anchor = anchor_;
    LinearCrossEntropyForward placed = *op;
    place(placed, device_.tensors());
    Kept kept;
    const Execution execution = device_.execution();
    Status status = kept_size(placed, execution, std::numeric_limits<uint64_t>::max(), &kept);
    if (status.ok() && case_.seed % 2 == 0) {
      status = kept_size(placed, execution, kept.bytes / 2, &kept);
    }
    if (!status.ok()) all_.fail(std::string("kept_size: ") + status.message());
    keys_.resize(split_.sizes.size());
    kept_views_.resize(split_.sizes.size());
    keys_[s] = kept.key;
    if (kept.columns == 0) return;
    op->kept = p_.pool.reserve(op->input.dtype, {kept.shape[0], kept.shape[1]});
    op->kept_rows = p_.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
    kept_views_[s] = {op->kept, op->kept_rows};
  }
  void keep(const LinearCrossEntropyForward& op) {
    if (!op.kept || !all_.ok()) return;
    write_bits(op.kept, kept_.at("kept"));
    write_bits(op.kept_rows, kept_.at("kept_rows"));
  }

  // Compares the shards' Combine on the device with Forward of the whole vocabulary.
  Fields combine(const std::vector<Fields>& shards, const Forward& whole) {
    if (!all_.ok()) return {};
    const Problem<Combine> combined = combine_of(whole, vocab_, shards);
    const Outcome outcome = execute(device_, combined.op, combined.pool, plan_);
    all_.merge(compare(expected(device_, whole, p_.model), outcome), "combined");
    all_.merge(compare(expected(device_, combined.op, combined.model), outcome),
               "combined, of the states as they are");
    if (all_.ok()) judge_exchange(shards, outcome.fields);
    return outcome.fields;
  }
  // Checks argmax and the exchanged target logits: among equal logits the first shard's is the
  // argmax, and target_logit has the same bits if no other output is requested. Neither holds in
  // rows with NaN.
  void judge_exchange(const std::vector<Fields>& shards, const Fields& whole) {
    const auto found = whole.find("argmax");
    const std::vector<double>& target_logit = whole.at("target_logit").value;
    for (size_t i = 0; i < target_logit.size(); ++i) {
      if (!anchors_.empty() && target_logit[i] != anchors_[i] && !std::isnan(target_logit[i])) {
        all_.fail("target_logit[" + std::to_string(i) + "] is not the anchor that was exchanged");
      }
      const double m = whole.at("row_reference").value[i];
      for (size_t s = 0; s < shards.size() && found != whole.end() && std::isfinite(m); ++s) {
        if (shards[s].at("row_reference").value[i] != m) continue;
        if (shards[s].at("argmax").value[i] != found->second.value[i]) {
          all_.fail("argmax[" + std::to_string(i) + "] is not that of " + name_of_shard(s) +
                    ", the first with the row's maximum");
        }
        break;
      }
    }
  }
  void give_states(const Fields& states) {
    if (!all_.ok()) return;
    write_bits(p_.op.row_reference, states.at("row_reference"));
    write_bits(p_.op.row_log_sum, states.at("row_log_sum"));
    if (p_.op.entropy) write_bits(p_.op.entropy, states.at("entropy"));
  }

  void backwards() {
    const reference::Result want = expected(device_, judged_whole(), p_.model);
    Parts parts;
    for (size_t s = 0; s < split_.sizes.size(); ++s) {
      if (split_.sizes[s] == 0) continue;
      Op op = shard_of(p_.op, firsts_[s], split_.sizes[s]);
      if constexpr (LinearOp<Op>) {
        std::tie(op.kept, op.kept_rows) = kept_views_[s];
        if (op.kept) op.kept_key = keys_[s];
      }
      const Fields fields = run(op, name_of_shard(s));
      if (!all_.ok()) return;
      all_.merge(compare_columns(want, fields, vocab_, firsts_[s], split_.sizes[s]),
                 name_of_shard(s) + " of the whole");
      if (fields.contains("grad_input")) add(fields.at("grad_input"), &parts);
    }
    if (parts.count > 0) judge_sum(want.outputs.at("grad_input"), parts);
  }
  // The whole vocabulary's Backward gets the bound of kept state if a shard has it.
  Op judged_whole() const {
    Op whole = p_.op;
    if constexpr (LinearOp<Op>) {
      for (const auto& [kept, rows] : kept_views_) {
        if (kept) whole.kept = kept;
      }
    }
    return whole;
  }
  struct Parts {
    int64_t count = 0;
    Field sum;
    std::vector<double> magnitude;
  };
  // Adds in f32, in the order of the ranks.
  static void add(const Field& part, Parts* parts) {
    if (parts->count++ == 0) {
      parts->sum = part;
      parts->magnitude.resize(part.value.size());
    }
    for (size_t k = 0; k < part.value.size(); ++k) {
      double& sum = parts->sum.value[k];
      if (parts->count > 1) sum = static_cast<float>(sum + part.value[k]);
      parts->magnitude[k] += std::fabs(part.value[k]);
    }
  }
  // docs/devices.md adds to the bound one addition for each part but the first.
  void judge_sum(reference::Output want, const Parts& parts) {
    for (size_t k = 0; k < want.bound.size(); ++k) {
      const double more = 0x1p-24 * static_cast<double>(parts.count - 1) * parts.magnitude[k];
      if (std::isfinite(more)) want.bound[k] += more;
    }
    reference::Result whole;
    whole.outputs["grad_input"] = want;
    all_.merge(compare(whole, Fields{{"grad_input", parts.sum}}), "the sum of the parts");
  }

  const TestDevice& device_;
  const Case& case_;
  const Split& split_;
  const RunPlan plan_;
  Problem<Op> p_;
  int64_t vocab_ = 0;
  std::vector<int64_t> firsts_;
  TensorView anchor_{};
  std::vector<double> anchors_;  // of `anchor_`, if shards exchanged some
  std::vector<uint64_t> keys_;
  std::vector<std::pair<TensorView, TensorView>> kept_views_;
  Fields kept_;  // kept state of the last run
  Comparison all_;
};

}  // namespace

std::vector<Split> splits_of(int64_t vocab, int64_t shards) {
  const auto divided = [&](auto&& first_of) {
    Sizes sizes;
    for (int64_t s = 0; s < shards; ++s) sizes.push_back(first_of(s + 1) - first_of(s));
    return sizes;
  };
  const Sizes even = divided([&](int64_t s) { return vocab * s / shards; });
  // A middle shard, with others before and after it.
  const auto middle = static_cast<size_t>((shards - 1) / 2);
  std::vector<Split> splits{{"even", even}};
  if (shards > 1) {
    const int64_t parts = shards * (shards + 1);
    splits.push_back({"uneven", divided([&](int64_t s) { return vocab * s * (s + 1) / parts; })});
    Sizes some = divided([&](int64_t s) { return s < shards ? vocab * s / (shards - 1) : vocab; });
    std::rotate(some.begin() + static_cast<int64_t>(middle), some.end() - 1, some.end());
    splits.push_back({"one without columns", some});
  }
  if (even[middle] == 0) return splits;
  // If the only shard were masked, rows would have no probability.
  if (shards > 1) splits.push_back({"one all -inf", even, Split::masked, middle});
  splits.push_back({"NaN in one", even, Split::nan, middle});
  return splits;
}

bool can_be_split(const Case& c) {
  return (c.op == OpKind::forward || c.op == OpKind::backward || c.op == OpKind::linear_forward ||
          c.op == OpKind::linear_backward) &&
         c.options.vocab_total == 0 && c.options.input_kind == InputKind::logits && c.chosen == 0 &&
         c.listed == 0;
}

Comparison compare_columns(const reference::Result& whole, const Fields& shard, int64_t vocab,
                           int64_t first, int64_t count) {
  reference::Result part;
  Fields fields = shard;
  fields.erase("grad_input");
  for (const auto& [name, field] : fields) {
    const reference::Output& all = whole.outputs.at(name);
    reference::Output& cut = part.outputs[name];
    const bool columns = name == "grad_logits";  // else each row is one column of the vocabulary
    const int64_t width = columns ? 1 : std::ssize(all.value) / vocab;
    for (int64_t k = 0; k < std::ssize(all.value); ++k) {
      const int64_t column = columns ? k % vocab : k / width;
      if (column < first || column >= first + count) continue;
      cut.value.push_back(all.value[k]);
      cut.bound.push_back(all.bound[k]);
    }
  }
  return compare(part, fields);
}

Comparison judge_shards(const TestDevice& device, const Case& c, const Split& split,
                        const RunPlan& plan) {
  Case of_shards = c;
  of_shards.rank = of_shards.mass_above = false;
  of_shards.row_statistics = of_shards.saved_state = true;
  if (is_linear(c.op)) of_shards.grad_input = DType::f32;          // parts of a sum
  if (c.options.label_smoothing > 0) of_shards.statistics = true;  // weighted_logit_sum
  if (split.content == Split::masked && is_linear(c.op) && !c.bias) {
    of_shards.bias = true;
    of_shards.bias_dtype = c.dtype;
  }
  Comparison result;
  with_op(c.op, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op> || (ForwardOp<Op> && !GradientOp<Op>)) {
      result = ShardJudge<Op>(device, of_shards, split, plan).judge();
    }
  });
  return result;
}

}  // namespace logitless::conformance
