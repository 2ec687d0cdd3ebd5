// SPDX-License-Identifier: Apache-2.0
#include "plan_calls.h"

#include <algorithm>
#include <array>
#include <set>

#include "tests/support/cases.h"

namespace logitless::guards {
namespace {

// An op's traits, which decide the options that it has.
constexpr uint32_t losses = 1, forwards = 2, backward_only = 4, gradients = 8, linear = 16,
                   logits = 32;

template <class Op>
constexpr uint32_t traits_of_op() {
  return (LossOp<Op> ? losses : 0) | (ForwardOp<Op> ? forwards : 0) |
         (BackwardOnlyOp<Op> ? backward_only : 0) | (GradientOp<Op> ? gradients : 0) |
         (LinearOp<Op> ? linear : logits);
}

constexpr uint32_t kTraits[] = {traits_of_op<Softmax>(),
                                traits_of_op<CrossEntropyForward>(),
                                traits_of_op<CrossEntropyBackward>(),
                                traits_of_op<CrossEntropyForwardBackward>(),
                                traits_of_op<LinearCrossEntropyForward>(),
                                traits_of_op<LinearCrossEntropyBackward>(),
                                traits_of_op<LinearCrossEntropyForwardBackward>()};
constexpr const char* kOps[] = {"softmax",     "forward",      "backward", "both",
                                "lin-forward", "lin-backward", "lin-both"};

// In the order of Option: its name, and the traits that an op needs for it.
struct OptionInfo {
  const char* word;
  uint32_t traits;
};
constexpr OptionInfo kOptions[option_count] = {{"bias", linear},
                                               {"bias-f32", linear},
                                               {"cap30", losses},
                                               {"cap5", losses},
                                               {"smooth", losses},
                                               {"zloss", losses},
                                               {"scale", losses},
                                               {"classes", losses},
                                               {"weights", losses},
                                               {"each", losses},
                                               {"sum", losses},
                                               {"normalizer", losses},
                                               {"i32", losses},
                                               {"lse", forwards},
                                               {"entropy", forwards},
                                               {"argmax", forwards},
                                               {"weighted", forwards},
                                               {"state", forwards},
                                               {"no-loss", forwards | gradients},
                                               {"given", backward_only},
                                               {"g-lse", backward_only},
                                               {"g-entropy", backward_only},
                                               {"g-loss", gradients},
                                               {"shard", losses},
                                               {"probabilities", losses | logits},
                                               {"in-place", logits},
                                               {"no-gi", linear | gradients},
                                               {"no-gw", linear | gradients},
                                               {"gb", linear | gradients},
                                               {"add", linear | gradients}};
constexpr const char* kPlaces[] = {"", "null", "off", "pad", "odd", "across"};
constexpr const char* kDTypes[] = {"f32", "f16", "bf16"};

uint32_t bits(std::initializer_list<Option> options) {
  uint32_t all = 0;
  for (const Option option : options) all |= uint32_t{1} << option;
  return all;
}

// Takes away options that the op lacks or that docs/semantics.md does not allow together.
void settle(Call* c) {
  const uint32_t traits = kTraits[c->kind];
  for (uint32_t i = 0; i < option_count; ++i) {
    if ((kOptions[i].traits & ~traits) != 0) c->options &= ~(uint32_t{1} << i);
  }
  const auto excludes = [&](Option option, uint32_t others) {
    if (c->has(option)) c->options &= ~others;
  };
  const uint32_t statistics = bits({lse, entropy, argmax, weighted, state});
  excludes(probabilities, statistics | bits({softcap, low_softcap, z_loss, scale, shard,
                                             given_state, grad_lse, grad_entropy}));
  if ((traits & forwards) && (traits & gradients)) c->options &= ~bits({shard});
  if (c->has(shard) && (traits & forwards)) c->options |= bits({state, no_loss});
  if (c->has(shard) && (traits & backward_only)) c->options |= bits({given_state});
  excludes(bias, bits({bias_f32}));
  excludes(softcap, bits({low_softcap}));
  excludes(per_token, bits({summed, normalizer}));
  excludes(summed, bits({normalizer}));
  if (c->has(no_grad_input) && !c->has(grad_bias)) c->options &= ~bits({no_grad_weight});
  if (c->has(no_grad_weight) && !c->has(grad_bias)) c->options &= ~bits({accumulate});
  if (!(traits & linear)) c->weight = c->output_weight = Place::dense, c->hidden = 0;
  if (!(traits & gradients) && (traits & losses)) c->output = Place::dense, c->grad = c->dtype;
  if (c->has(in_place)) c->output = c->input, c->grad = c->dtype;
  const bool makes_weight = (traits & linear) && (traits & gradients) && !c->has(no_grad_weight);
  if (!makes_weight) c->output_weight = Place::dense, c->grad_weight = c->dtype;
  if (c->has(no_grad_input)) c->output = Place::dense, c->grad = c->dtype;
  if (makes_weight && c->has(accumulate)) c->grad_weight = DType::f32;
}

TensorView place(TensorView v, Place where) {
  const int64_t element = size_of(v.dtype);
  if (where == Place::null) v.data = nullptr;
  if (where == Place::off) v.byte_offset = static_cast<uint64_t>(element);
  if (where == Place::padded) v.stride[0] = (v.shape[1] + 7) / 8 * 8 + 8;
  if (where == Place::odd) v.stride[0] = v.shape[1] + 3;
  if (where == Place::across) v.stride = {1, v.shape[0]};
  return v;
}

// Makes the tensors of a call by their names in docs/semantics.md.
class Views {
 public:
  Views(const Call& call, Device device) : c_(call), device_(device) {}

  TensorView operator()(std::string_view name, const TensorView& logits) {
    if (name == "grad_logits" || name == "probabilities") {
      if (c_.has(in_place)) return logits;
    }
    TensorView v = view(name);
    if (!v) return v;
    v.device = device_;
    v.data = reinterpret_cast<void*>((0x50 + ++count_) << 40);
    if (name == "input" || name == "logits") return place(v, c_.input);
    if (name == "weight") return place(v, c_.weight);
    if (name == "grad_weight") return place(v, c_.output_weight);
    const bool result = name == "grad_input" || name == "grad_logits" || name == "probabilities";
    return result ? place(v, c_.output) : v;
  }

 private:
  TensorView view(std::string_view name) const {
    if (name == "input") return matrix_view(nullptr, c_.dtype, c_.tokens, c_.hidden);
    if (name == "weight") return matrix_view(nullptr, c_.dtype, c_.vocab, c_.hidden);
    if (name == "logits") return matrix_view(nullptr, c_.dtype, c_.tokens, c_.vocab);
    if (name == "grad_logits" || name == "probabilities") {
      return matrix_view(nullptr, c_.grad, c_.tokens, c_.vocab);
    }
    if (name == "target") {
      return vector_view(nullptr, c_.has(narrow_target) ? DType::i32 : DType::i64, c_.tokens);
    }
    return optional_view(name);
  }

  TensorView optional_view(std::string_view name) const {
    const auto tokens = [&](bool given) {
      return given ? vector_view(nullptr, DType::f32, c_.tokens) : TensorView{};
    };
    const auto columns = [&](bool given, DType dtype) {
      return given ? vector_view(nullptr, dtype, c_.vocab) : TensorView{};
    };
    const auto of_call = [&](bool given) {
      return !given || c_.has(per_token) ? tokens(given) : scalar_view(nullptr, DType::f32);
    };
    const DType adds = c_.has(accumulate) ? DType::f32 : c_.grad;
    if (name == "bias") {
      return columns(c_.has(bias) || c_.has(bias_f32), c_.has(bias) ? c_.dtype : DType::f32);
    }
    if (name == "grad_bias") return columns(c_.has(grad_bias), adds);
    if (name == "grad_input" && !c_.has(no_grad_input)) {
      return matrix_view(nullptr, c_.grad, c_.tokens, c_.hidden);
    }
    if (name == "grad_weight" && !c_.has(no_grad_weight)) {
      return matrix_view(nullptr, c_.grad_weight, c_.vocab, c_.hidden);
    }
    if (name == "vocab_weight" && c_.has(class_weights)) {
      return vector_view(nullptr, DType::f32, c_.has(shard) ? 2 * c_.vocab : c_.vocab);
    }
    if (name == "token_weight") return tokens(c_.has(token_weights));
    if (name == "normalizer" && c_.has(normalizer)) return scalar_view(nullptr, DType::f32);
    if (name == "loss") return of_call(!c_.has(no_loss));
    if (name == "grad_loss") return of_call(c_.has(grad_loss));
    if (name == "lse") return tokens(c_.has(lse));
    if (name == "entropy") return tokens(c_.has(entropy) || c_.has(grad_entropy));
    if (name == "argmax" && c_.has(argmax)) return vector_view(nullptr, DType::i64, c_.tokens);
    if (name == "weighted_logit_sum") return tokens(c_.has(weighted));
    if (name == "row_reference" || name == "row_log_sum") {
      return tokens(c_.has(state) || c_.has(given_state));
    }
    if (name == "grad_lse") return tokens(c_.has(grad_lse));
    if (name == "grad_entropy") return tokens(c_.has(grad_entropy));
    return {};
  }

  const Call& c_;
  const Device device_;
  uintptr_t count_ = 0;
};

LossOptions options_of(const Call& c) {
  LossOptions o;
  if (c.has(per_token)) o.reduction = Reduction::none;
  if (c.has(summed)) o.reduction = Reduction::sum;
  if (c.has(softcap)) o.softcap = 30;
  if (c.has(low_softcap)) o.softcap = 5;
  if (c.has(smoothing)) o.label_smoothing = .1f;
  if (c.has(z_loss)) o.z_loss = 1e-4f;
  if (c.has(scale)) o.logit_scale = .5f;
  if (c.has(probabilities)) o.input_kind = InputKind::probabilities;
  if (c.has(shard)) o.vocab_start = c.vocab / 2, o.vocab_total = 2 * c.vocab;
  return o;
}

template <class Op>
Op build(const Call& c, Device device) {
  Op op;
  logitless_op unused{};
  Views views(c, device);
  TensorView first{};
  for_each_tensor(op, unused, [&](const char* name, Access, TensorView& view, auto&&) {
    view = views(name, first);
    if (!first) first = view;
  });
  if constexpr (LossOp<Op>) op.options = options_of(c);
  if constexpr (LinearOp<Op> && GradientOp<Op>) op.accumulate_grad_weight = c.has(accumulate);
  return op;
}

struct Head {
  int64_t tokens, hidden, vocab;
};
constexpr Head kHeads[] = {
    {8192, 4096, 128256}, {4096, 2048, 128256}, {1, 4096, 128256},     {8192, 896, 151936},
    {8192, 2048, 151936}, {4096, 3584, 151936}, {8192, 2304, 256000},  {4096, 3584, 256000},
    {2048, 2560, 262144}, {4096, 7168, 129280}, {16384, 768, 50257},   {16384, 768, 50304},
    {20480, 768, 50257},  {1024, 768, 50257},   {65536, 4096, 128256}, {2048, 4096, 32000}};

// A call of a head, and what differs from the usual.
struct Recipe {
  int32_t kind;
  uint32_t options = 0;
  bool wide_weight_gradient = false;
  Place input = Place::dense, weight = Place::dense, output = Place::dense,
        output_weight = Place::dense;
};

std::vector<Recipe> recipes() {
  constexpr int32_t forward = LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD,
                    backward = LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD,
                    both = LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD;
  constexpr Place dense = Place::dense, null = Place::null, off = Place::off;
  return {{both},
          {forward},
          {backward, bits({given_state})},
          {both, 0, true},
          {both, bits({accumulate})},
          {both, bits({no_grad_weight})},
          {both, bits({no_grad_input})},
          {both, bits({bias, grad_bias})},
          {both, bits({softcap})},
          {both, bits({softcap, smoothing})},
          {both, bits({smoothing, z_loss, class_weights})},
          {both, bits({lse, entropy, argmax})},
          {both, 0, false, null, null, null, null},
          {both, 0, false, dense, off, dense, dense},
          {both, 0, false, dense, dense, off, dense},
          {both, 0, false, dense, dense, dense, off},
          {both, 0, false, dense, Place::odd, dense, dense},
          {both, 0, false, dense, Place::padded, Place::padded, Place::padded},
          {forward, 0, false, off, dense, dense, dense},
          {forward, 0, false, null, null, dense, dense},
          {forward, bits({entropy, lse, state})},
          {forward, bits({shard, weighted, smoothing})},
          {backward},
          {backward, bits({shard, given_state})},
          {backward, bits({given_state, grad_entropy, grad_lse, bias})}};
}

int64_t drawn_size(Random* random, int bits_at_most, int64_t most) {
  const int64_t power = int64_t{1} << random->below(bits_at_most + 1);
  int64_t size = power + random->below(power);
  if (random->once_in(3)) size = (size + 63) / 64 * 64;
  return std::min(size, most);
}

void draw_shape(Random* random, Call* c) {
  constexpr int64_t widths[] = {64,   96,   100,  257,  512,  576,  768,  896,  1000, 1024, 1536,
                                1601, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 5124, 7168, 8192};
  constexpr int64_t vocabularies[] = {32000,  32128,  50257,  50304,  51200,
                                      65536,  100277, 128256, 129280, 151936,
                                      152064, 200019, 256000, 262144, 262143};
  c->tokens = drawn_size(random, 16, 131072);
  c->hidden = random->once_in(4) ? 64 + random->below(8129) : random->of(widths);
  c->vocab = random->once_in(2) ? drawn_size(random, 17, 262144) : random->of(vocabularies);
  // Many tokens of small width get plans of their own kind.
  if (random->once_in(8)) {
    c->tokens = 8192 + 64 * random->below(1024);
    c->hidden = 64 * (1 + random->below(24));
    c->vocab = random->of(vocabularies);
  }
}

void draw_rest(Random* random, Call* c) {
  constexpr DType dtypes[] = {DType::bf16, DType::bf16, DType::f16, DType::f32};
  c->dtype = c->grad = c->grad_weight = random->of(dtypes);
  if (random->once_in(4)) c->grad = DType::f32;
  if (random->once_in(3)) c->grad_weight = DType::f32;
  for (Place* place : {&c->input, &c->weight, &c->output, &c->output_weight}) {
    if (random->once_in(6)) *place = static_cast<Place>(1 + random->below(5));
  }
  // Half of the calls have few options, like most real calls.
  const int64_t rarely = random->once_in(2) ? 5 : 40;
  for (uint32_t i = 0; i < option_count; ++i) {
    if (random->once_in(rarely)) c->options |= uint32_t{1} << i;
  }
}

}  // namespace

bool Call::lacks_address() const {
  return std::ranges::count(std::array{input, weight, output, output_weight}, Place::null) > 0;
}

std::string Call::text() const {
  std::string out = std::string(kOps[kind]) + " " + kDTypes[static_cast<int>(dtype)] + " " +
                    std::to_string(tokens) + "x";
  if (hidden > 0) out += std::to_string(hidden) + "x";
  out += std::to_string(vocab);
  const auto add = [&](const char* key, const char* value) {
    out += std::string(" ") + key + "=" + value;
  };
  if (grad != dtype) add("g", kDTypes[static_cast<int>(grad)]);
  if (grad_weight != dtype) add("gw", kDTypes[static_cast<int>(grad_weight)]);
  const std::pair<const char*, Place> places[] = {
      {"x@", input}, {"w@", weight}, {"g@", output}, {"gw@", output_weight}};
  for (const auto& [key, where] : places) {
    if (where != Place::dense) out += std::string(" ") + key + kPlaces[static_cast<int>(where)];
  }
  for (uint32_t i = 0; i < option_count; ++i) {
    if (has(static_cast<Option>(i))) out += std::string(" ") + kOptions[i].word;
  }
  return out;
}

AnyOp op_of(const Call& call, Device device) {
  using conformance::OpKind;
  static_assert(static_cast<int>(OpKind::linear_forward_backward) ==
                LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD);
  return conformance::with_op(static_cast<OpKind>(call.kind),
                              [&](auto op) -> AnyOp { return build<decltype(op)>(call, device); });
}

std::vector<Call> named_calls() {
  std::vector<Call> calls;
  for (const Head& head : kHeads) {
    int64_t number = 0;
    for (const Recipe& r : recipes()) {
      ++number;
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        // Only the first, most common recipes come in other dtypes too.
        if (dtype != DType::bf16 && number > 3) continue;
        Call c{r.kind,
               head.tokens,
               head.hidden,
               head.vocab,
               dtype,
               dtype,
               r.wide_weight_gradient ? DType::f32 : dtype};
        c.input = r.input, c.weight = r.weight;
        c.output = r.output, c.output_weight = r.output_weight;
        c.options = r.options;
        settle(&c);
        calls.push_back(c);
      }
    }
  }
  return calls;
}

std::vector<Call> drawn_calls(int64_t count) {
  constexpr int32_t kinds[] = {LOGITLESS_SOFTMAX,
                               LOGITLESS_CROSS_ENTROPY_FORWARD,
                               LOGITLESS_CROSS_ENTROPY_BACKWARD,
                               LOGITLESS_CROSS_ENTROPY_FORWARD_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
                               LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD};
  Random random(1);
  std::vector<Call> calls;
  std::set<std::string> known;
  while (static_cast<int64_t>(calls.size()) < count) {
    Call c;
    c.kind = random.of(kinds);
    draw_shape(&random, &c);
    draw_rest(&random, &c);
    settle(&c);
    if (known.insert(c.text()).second) calls.push_back(c);
  }
  return calls;
}

}  // namespace logitless::guards
