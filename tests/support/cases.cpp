// SPDX-License-Identifier: Apache-2.0
// The entries of the case table.
#include "cases.h"

#include <algorithm>

namespace logitless::conformance {
namespace {

enum Group : uint32_t {
  kReduction = 1 << 0,
  kIgnoreIndex = 1 << 1,
  kOutside = 1 << 2,
  kSmoothing = 1 << 3,
  kZLoss = 1 << 4,
  kScale = 1 << 5,
  kSoftcap = 1 << 6,
  kTemperature = 1 << 7,
  kNormalizer = 1 << 8,
  kStatistics = 1 << 9,
  kProbabilities = 1 << 10,
  kTargetDtype = 1 << 11,
  kBias = 1 << 12,
  kGradDtype = 1 << 13,
  kGradWeight = 1 << 14,
  kPlacement = 1 << 15,
  kData = 1 << 16,
  kShard = 1 << 17,
  kSavedState = 1 << 18,
  kOverlap = 1 << 19,
  kMoreStatistics = 1 << 20,
  kKind = 1 << 21,
  kTeacher = 1 << 22,
  kLabel = 1 << 23,
  kTeacherMap = 1 << 24,
  kTeacherTemperature = 1 << 25,
  kChosen = 1 << 26,
  kListed = 1 << 27,
};

bool any_loss(OpKind op, DType) { return has_loss(op); }
bool linear(OpKind op, DType) { return is_linear(op); }
bool linear_16(OpKind op, DType dtype) { return is_linear(op) && dtype != DType::f32; }
bool given_logits(OpKind op, DType) { return has_loss(op) && !is_linear(op); }
bool cross_entropy(OpKind op, DType) { return has_loss(op) && !diverges(op); }
bool divergence(OpKind op, DType) { return diverges(op); }
bool divergence_16(OpKind op, DType dtype) { return diverges(op) && dtype != DType::f32; }
bool forward(OpKind op, DType) { return has_forward(op); }
bool token_forward(OpKind op, DType) { return has_forward(op) && !diverges(op); }
bool gradient(OpKind op, DType) { return has_gradient(op); }
bool linear_gradient(OpKind op, DType) { return is_linear(op) && has_gradient(op); }
bool logits_gradient(OpKind op, DType) { return !is_linear(op) && has_gradient(op); }
bool backward(OpKind op, DType) { return op == OpKind::backward || op == OpKind::linear_backward; }
bool any_backward(OpKind op, DType dtype) {
  return backward(op, dtype) || op == OpKind::divergence_backward;
}
bool sharded(OpKind op, DType dtype) {
  return backward(op, dtype) || op == OpKind::forward || op == OpKind::linear_forward;
}
bool choosing(OpKind op, DType) {
  return op == OpKind::linear_forward || op == OpKind::linear_backward;
}
bool listing(OpKind op, DType) { return op == OpKind::linear_forward; }
bool linear_backward(OpKind op, DType) { return op == OpKind::linear_backward; }
bool any(OpKind, DType) { return true; }

// clang-format off
const std::vector<Feature> kFeatures{
    {"none", kReduction, any_loss, [](Case& c) { c.options.reduction = Reduction::none; }},
    {"sum", kReduction, any_loss, [](Case& c) { c.options.reduction = Reduction::sum; }},
    {"ignored", 0, any_loss, [](Case& c) { c.ignored = 0.4; }},
    {"ignore_index_in_vocabulary", kIgnoreIndex, any_loss, [](Case& c) { c.options.ignore_index = 3; c.ignored = 0.3; }},
    {"ignore_index_beyond_32_bits", kIgnoreIndex | kTargetDtype, any_loss, [](Case& c) { c.options.ignore_index = int64_t{1} << 40; c.ignored = 0.3; }},
    {"outside_ignored", kOutside, any_loss, [](Case& c) { c.options.out_of_range = OutOfRange::ignore; c.outside = 0.3; }},
    {"smoothing", kSmoothing, cross_entropy, [](Case& c) { c.options.label_smoothing = 0.1f; }},
    {"smoothing_one", kSmoothing, cross_entropy, [](Case& c) { c.options.label_smoothing = 1; }},
    {"z_loss", kZLoss, cross_entropy, [](Case& c) { c.options.z_loss = 0.01f; }},
    {"scale", kScale, any_loss, [](Case& c) { c.options.logit_scale = 0.3f; }},
    {"scale_negative", kScale, any_loss, [](Case& c) { c.options.logit_scale = -1.7f; }},
    {"softcap", kSoftcap, any_loss, [](Case& c) { c.options.softcap = 2.5f; }},
    {"softcap_wide", kSoftcap, any_loss, [](Case& c) { c.options.softcap = 30; }},
    {"temperature", kTemperature, any_loss, [](Case& c) { c.options.temperature = 0.7f; }},
    {"temperature_high", kTemperature, any_loss, [](Case& c) { c.options.temperature = 3; }},
    {"normalizer", kNormalizer | kReduction, any_loss, [](Case& c) { c.options.normalizer = 5.3; }},
    {"normalizer_f32", kNormalizer | kReduction, any_loss, [](Case& c) { c.normalizer = NormalizerKind::f32; }},
    {"normalizer_i64", kNormalizer | kReduction, any_loss, [](Case& c) { c.normalizer = NormalizerKind::i64; }},
    {"empty_mean_nan", 0, any_loss, [](Case& c) { c.options.empty_mean = EmptyMean::nan; }},
    {"allow_tf32", 0, linear, [](Case& c) { c.options.allow_tf32 = true; }},
    {"probabilities", kProbabilities | kScale | kSoftcap | kTemperature | kZLoss | kStatistics | kMoreStatistics | kShard | kSavedState, given_logits,
     [](Case& c) { c.options.input_kind = InputKind::probabilities; }},
    {"target_i32", kTargetDtype, any_loss, [](Case& c) { c.target = DType::i32; }},
    {"token_weight", 0, any_loss, [](Case& c) { c.token_weight = true; }},
    {"vocab_weight", 0, cross_entropy, [](Case& c) { c.vocab_weight = true; }},
    {"statistics", kStatistics, forward, [](Case& c) { c.statistics = true; }},
    {"statistics_i32", kStatistics, token_forward, [](Case& c) { c.statistics = true; c.argmax = DType::i32; }},
    {"fault", 0, any_loss, [](Case& c) { c.fault = true; }},
    {"grad_loss", 0, gradient, [](Case& c) { c.grad_loss = true; }},
    {"saved_state", kSavedState, backward, [](Case& c) { c.saved_state = true; }},
    {"grad_lse", kStatistics, backward, [](Case& c) { c.grad_lse = true; }},
    {"grad_target_logit", kStatistics, backward, [](Case& c) { c.grad_target_logit = true; }},
    {"grad_entropy", kStatistics, backward, [](Case& c) { c.grad_entropy = true; }},
    {"grad_every_statistic", kStatistics, backward, [](Case& c) { c.grad_lse = c.grad_target_logit = c.grad_entropy = true; }},
    {"bias", kBias, linear, [](Case& c) { c.bias = true; c.bias_dtype = c.dtype; }},
    {"bias_f32", kBias, linear_16, [](Case& c) { c.bias = true; }},
    {"grad_f16", kGradDtype, gradient, [](Case& c) { c.grad_input = c.grad_weight = DType::f16; }},
    {"grad_bf16", kGradDtype, gradient, [](Case& c) { c.grad_input = c.grad_weight = DType::bf16; }},
    {"grad_input_bf16", kGradDtype, linear_gradient, [](Case& c) { c.grad_input = DType::bf16; }},
    {"grad_weight_bf16", kGradDtype, linear_gradient, [](Case& c) { c.grad_weight = DType::bf16; }},
    {"no_grad_weight", kGradWeight, linear_gradient, [](Case& c) { c.wants_grad_weight = false; }},
    {"no_grad_input", kGradWeight, linear_gradient, [](Case& c) { c.wants_grad_input = false; }},
    {"grad_bias_only", kGradWeight | kBias, linear_gradient, [](Case& c) {
       c.wants_grad_input = c.wants_grad_weight = false;
       c.wants_grad_bias = true;
     }},
    {"accumulate", kGradWeight | kGradDtype, linear_gradient, [](Case& c) { c.accumulate = true; }},
    {"in_place", kGradDtype | kOverlap, logits_gradient, [](Case& c) { c.in_place = true; c.grad_input = c.dtype; }},
    {"shard", kShard | kSavedState, sharded, [](Case& c) {
       c.options.vocab_start = 11;
       c.options.vocab_total = c.shape.vocab + 20;
       c.saved_state = true;
       c.statistics = true;
     }},
    {"padded", kPlacement, any, [](Case& c) { c.placement = Placement::padded; }},
    {"strided", kPlacement, any, [](Case& c) { c.placement = Placement::strided; }},
    {"transposed", kPlacement, any, [](Case& c) { c.placement = Placement::transposed; }},
    {"broadcast", kPlacement | kOverlap, any, [](Case& c) { c.placement = Placement::broadcast; }},
    {"unaligned", kPlacement, any, [](Case& c) { c.placement = Placement::unaligned; }},
    {"peaked", kData, any, [](Case& c) { c.data = Data::peaked; }},
    {"constant", kData, any, [](Case& c) { c.data = Data::constant; }},
    {"large", kData, any, [](Case& c) { c.data = Data::large; }},
    {"temperature_each", kTemperature, any_loss, [](Case& c) { c.temperatures = true; }},
    {"logprob", kMoreStatistics, forward, [](Case& c) { c.logprob = true; }},
    {"rank", kMoreStatistics, token_forward, [](Case& c) { c.rank = true; }},
    {"sum_p_squared", kMoreStatistics, token_forward, [](Case& c) { c.sum_p_squared = true; }},
    {"mean_logit", kMoreStatistics, token_forward, [](Case& c) { c.mean_logit = true; }},
    {"max_logprob", kMoreStatistics, token_forward, [](Case& c) { c.max_logprob = true; }},
    {"mass_above", kMoreStatistics, token_forward, [](Case& c) { c.mass_above = true; }},
    {"more_statistics", kMoreStatistics, token_forward, [](Case& c) { c.logprob = c.rank = c.sum_p_squared = c.mean_logit = c.max_logprob = c.mass_above = true; c.argmax = DType::i32; }},
    {"inactive", 0, any_backward, [](Case& c) { c.inactive = 0.4; }},
    {"reverse_kl", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::reverse_kl; }},
    {"jsd", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::jsd; }},
    {"jsd_less", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::jsd; c.divergence.beta = 0.1f; }},
    {"jsd_0", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::jsd; c.divergence.beta = 0; }},
    {"jsd_1", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::jsd; c.divergence.beta = 1; }},
    {"skew_kl", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::skew_kl; c.divergence.beta = 0.3f; }},
    {"skew_kl_1", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::skew_kl; c.divergence.beta = 1; }},
    {"tv", kKind, divergence, [](Case& c) { c.divergence.kind = DivergenceKind::tv; }},
    {"label_weight", kLabel, divergence, [](Case& c) { c.divergence.label_weight = 0.7f; }},
    {"no_target", kLabel | kMoreStatistics | kOutside | kIgnoreIndex | kTargetDtype, divergence, [](Case& c) { c.no_target = true; }},
    {"teacher_logits", kTeacher, divergence, [](Case& c) { c.teacher_logits = true; }},
    {"teacher_bias", kTeacher, divergence, [](Case& c) { c.teacher_bias = true; }},
    {"teacher_of_another_width", kTeacher, divergence, [](Case& c) { c.teacher_hidden = 29; }},
    {"teacher_near", kTeacher, divergence, [](Case& c) { c.near = true; }},
    {"teacher_equal", kTeacher, divergence, [](Case& c) { c.equal = true; }},
    {"teacher_bias_16", kTeacher, divergence_16, [](Case& c) { c.teacher_bias = true; c.bias_dtype = c.dtype; }},
    {"teacher_scale", kTeacherMap, divergence, [](Case& c) { c.divergence.teacher_logit_scale = -0.6f; }},
    {"teacher_softcap", kTeacherMap, divergence, [](Case& c) { c.divergence.teacher_softcap = 3; }},
    {"teacher_temperature", kTeacherTemperature, divergence, [](Case& c) { c.divergence.teacher_temperature = 1.7f; }},
    {"teacher_temperature_each", kTeacherTemperature, divergence, [](Case& c) { c.teacher_temperatures = true; }},
    {"chosen", kChosen, choosing, [](Case& c) { c.chosen = 7; }},
    {"chosen_one", kChosen, choosing, [](Case& c) { c.chosen = 1; }},
    {"chosen_two_i32", kChosen, choosing, [](Case& c) { c.chosen = 2; c.ids = DType::i32; }},
    {"chosen_many", kChosen, choosing, [](Case& c) { c.chosen = 65; }},
    {"top", kListed, listing, [](Case& c) { c.listed = 9; }},
    {"top_one_i32", kListed, listing, [](Case& c) { c.listed = 1; c.argmax = DType::i32; }},
    {"top_all", kListed, listing, [](Case& c) { c.listed = 256; }},
    {"chosen_lists", kChosen, choosing, [](Case& c) { c.chosen = 5; c.lists = true; }},
    {"chosen_lists_i32", kChosen, choosing, [](Case& c) { c.chosen = 12; c.lists = true; c.ids = DType::i32; }},
    {"only_chosen", kChosen, linear_backward, [](Case& c) { c.chosen = 7; c.only_chosen = true; }},
    {"only_chosen_lists", kChosen, linear_backward, [](Case& c) { c.chosen = 6; c.lists = c.only_chosen = true; }},
};
// clang-format on

}  // namespace

const char* name_of(OpKind op) {
  static constexpr const char* kNames[] = {"softmax",
                                           "forward",
                                           "backward",
                                           "forward_backward",
                                           "linear_forward",
                                           "linear_backward",
                                           "linear_forward_backward",
                                           "divergence_forward",
                                           "divergence_backward",
                                           "divergence_forward_backward"};
  return kNames[static_cast<int>(op)];
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"f32", "f16", "bf16", "i32", "i64"};
  return kNames[static_cast<int>(dtype)];
}

bool is_linear(OpKind op) { return op >= OpKind::linear_forward; }
bool has_loss(OpKind op) { return op != OpKind::softmax; }
bool diverges(OpKind op) { return op >= OpKind::divergence_forward; }
bool has_forward(OpKind op) {
  return has_loss(op) && op != OpKind::backward && op != OpKind::linear_backward &&
         op != OpKind::divergence_backward;
}
bool has_gradient(OpKind op) {
  return has_loss(op) && op != OpKind::forward && op != OpKind::linear_forward &&
         op != OpKind::divergence_forward;
}

std::string describe(const Case& c) {
  static constexpr const char* kData[] = {"normal", "peaked", "constant", "large"};
  static constexpr const char* kPlacement[] = {"dense",      "padded",    "strided",
                                               "transposed", "broadcast", "unaligned"};
  return std::string(name_of(c.op)) + " " + name_of(c.dtype) +
         " N=" + std::to_string(c.shape.tokens) + " D=" + std::to_string(c.shape.hidden) +
         " V=" + std::to_string(c.shape.vocab) + " " +
         (diverges(c.op) ? "kind " + std::to_string(static_cast<int>(c.divergence.kind)) + " "
                         : "") +
         kData[static_cast<int>(c.data)] + " " + kPlacement[static_cast<int>(c.placement)];
}

const std::vector<Feature>& features() { return kFeatures; }

bool combine(const Feature& a, const Feature& b) { return (a.groups & b.groups) == 0; }

std::vector<Pair> feature_pairs(OpKind op, DType dtype) {
  std::vector<Pair> pairs;
  for (size_t i = 0; i < kFeatures.size(); ++i) {
    if (!kFeatures[i].applies(op, dtype)) continue;
    pairs.push_back({i, i});
    for (size_t j = i + 1; j < kFeatures.size(); ++j) {
      if (kFeatures[j].applies(op, dtype) && combine(kFeatures[i], kFeatures[j]))
        pairs.push_back({i, j});
    }
  }
  return pairs;
}

Case case_of(OpKind op, DType dtype, const Pair& pair) {
  // More than 64 tokens are several chunks in the smallest workspace.
  static constexpr Shape kShapes[] = {{69, 19, 37}, {5, 70, 130}, {74, 13, 71}};
  Case c{
      .op = op, .shape = kShapes[(pair.first + pair.second) % std::size(kShapes)], .dtype = dtype};
  kFeatures[pair.first].apply(c);
  if (pair.second != pair.first) kFeatures[pair.second].apply(c);
  c.seed = 1 + pair.first * 1000 + pair.second;
  return c;
}

std::vector<Shape> shapes(OpKind op) {
  std::vector<Shape> all;
  for (int64_t vocab = 1; vocab <= 16; ++vocab) all.push_back({3, 5, vocab});
  for (int64_t vocab = 241; vocab <= 256; ++vocab) all.push_back({4, 33, vocab});
  for (int64_t tokens : {1, 2, 6, 7, 8, 9, 33, 300, 513}) all.push_back({tokens, 17, 83});
  for (Shape s :
       {Shape{2, 3, 50257}, {1, 1, 1031}, {6, 1, 97}, {40, 64, 1030}, {70, 2, 2048}, {257, 3, 515}})
    all.push_back(s);
  if (is_linear(op)) {
    for (int64_t hidden : {1, 2, 7, 13, 16, 31, 97, 127, 257, 768, 1030})
      all.push_back({11, hidden, 61});
    for (Shape s : {Shape{1, 257, 300},
                    {7, 768, 130},
                    {33, 1030, 31},
                    {513, 31, 61},
                    {300, 97, 35},
                    {8, 512, 240}})
      all.push_back(s);
  }
  return all;
}

}  // namespace logitless::conformance
