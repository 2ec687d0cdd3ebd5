// SPDX-License-Identifier: Apache-2.0
// Checks the results of shards.h's ranks: losses and gradients must be within the bound of
// docs/semantics.md ("Accuracy") of the whole vocabulary's, computed in double on the reference
// device, and the ranks must agree in every bit.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <utility>

#include "shards.h"

namespace shards {

// A rank's results, on the host.
struct Outcome {
  std::vector<float> loss{0};       // []
  std::vector<float> target_logit;  // [N]
  std::vector<float> grad_input;    // [N, D]
  std::vector<float> grad_weight;   // [V_p, D]
  bool in_order = true;             // grad_input has the bits of the sum in the ranks' order
};

// Returns whether a rank's sum has the bits of the parts added in order, rank 0's first.
inline bool is_in_order(const Shard& s) {
  std::vector<float> parts(static_cast<size_t>(s.ranks * s.share));
  std::vector<float> sum(static_cast<size_t>(s.share));
  s.received.read(s.place, &parts);
  s.sum.read(s.place, &sum);
  for (int64_t k = 0; k < s.share; ++k) {
    float total = parts[k];
    for (int p = 1; p < s.ranks; ++p) total += parts[p * s.share + k];
    if (total != sum[k] && !std::isnan(total)) return false;
  }
  return true;
}

inline Outcome read(const Shard& s) {
  Outcome outcome;
  outcome.target_logit.resize(static_cast<size_t>(s.sizes.tokens));
  outcome.grad_input.resize(static_cast<size_t>(s.ranks * s.share));
  outcome.grad_weight.resize(static_cast<size_t>(s.own.count * s.sizes.hidden));
  s.loss.read(s.place, &outcome.loss);
  s.anchor.read(s.place, &outcome.target_logit);
  s.grad_input.read(s.place, &outcome.grad_input);
  s.grad_weight.read(s.place, &outcome.grad_weight);
  outcome.grad_input.resize(static_cast<size_t>(s.sizes.tokens * s.sizes.hidden));  // no padding
  outcome.in_order = is_in_order(s);
  return outcome;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
// Returns whether two ranks have the same bits; grad_weight is not compared: each has its own rows.
inline bool agree(const Outcome& a, const Outcome& b) {
  return same_bits(a.loss, b.loss) && same_bits(a.target_logit, b.target_logit) &&
         same_bits(a.grad_input, b.grad_input);
}

// The whole vocabulary's results in one process, and the error bounds of a rank's results.
class Judge {
 public:
  Judge(const Sizes& sizes, bool tensor_cores, int ranks)
      : s_(sizes), tensor_cores_(tensor_cores && sizes.dtype == DType::bf16), ranks_(ranks) {
    evaluate();
    for (const int64_t t : target_) counted_ += t >= 0;
    for (int64_t i = 0; i < s_.tokens; ++i) {
      if (target_[i] >= 0) add_token(i);
    }
    bound_.loss[0] = bound_.loss[0] / counted_ + 2 * kUnit * std::fabs(whole_.loss[0]);
    add_rounding(whole_.grad_input, &bound_.grad_input);
    add_rounding(whole_.grad_weight, &bound_.grad_weight);
  }

  // Returns the largest error of a rank's outcome in units of its bound; at most 1 is correct.
  double worst(const Outcome& outcome, Columns own) const {
    const int64_t first = own.first * s_.hidden;
    return std::max({worst_of(outcome.loss, whole_.loss, bound_.loss, 0),
                     worst_of(outcome.target_logit, whole_.target_logit, bound_.target_logit, 0),
                     worst_of(outcome.grad_input, whole_.grad_input, bound_.grad_input, 0),
                     worst_of(outcome.grad_weight, whole_.grad_weight, bound_.grad_weight, first)});
  }

 private:
  static constexpr double kUnit = 0x1p-24;  // the unit roundoff of f32
  struct Bounds {
    std::vector<double> loss{0}, target_logit, grad_input, grad_weight;
  };

  static double worst_of(const std::vector<float>& got, const std::vector<float>& want,
                         const std::vector<double>& bound, int64_t first) {
    double worst = 0;
    for (size_t k = 0; k < got.size(); ++k) {
      const double error = std::fabs(double(got[k]) - want[first + k]), most = bound[first + k];
      // The bound may be 0 (an ignored token); without an error the ratio is 0.
      const double ratio = error == 0 ? 0 : error / most;
      if (!(ratio <= worst)) worst = std::isnan(ratio) ? INFINITY : ratio;
    }
    return worst;
  }

  void evaluate() {
    const std::vector<char> input = encode(input_, s_.dtype), weight = encode(weight_, s_.dtype);
    whole_.target_logit.resize(target_.size());
    whole_.grad_input.resize(input_.size());
    whole_.grad_weight.resize(weight_.size());
    const LinearCrossEntropyForwardBackward op{
        .input = matrix_view(input.data(), s_.dtype, s_.tokens, s_.hidden),
        .weight = matrix_view(weight.data(), s_.dtype, s_.vocab, s_.hidden),
        .target = vector_view(target_.data(), DType::i64, s_.tokens),
        .loss = scalar_view(whole_.loss.data(), DType::f32),
        .grad_input = matrix_view(whole_.grad_input.data(), DType::f32, s_.tokens, s_.hidden),
        .grad_weight = matrix_view(whole_.grad_weight.data(), DType::f32, s_.vocab, s_.hidden),
        .statistics = {.target_logit =
                           vector_view(whole_.target_logit.data(), DType::f32, s_.tokens)}};
    const Execution execution{.device = {.type = DeviceType::reference}};
    WorkspaceSize size;
    Status status = workspace(op, execution, &size);
    if (status.ok()) {
      const Scratch scratch({}, size.recommended, nullptr);
      status = run(op, {scratch.data(), size.recommended}, execution);
    }
    if (!status.ok()) {
      std::fprintf(stderr, "one process: %s\n", status.message());
      whole_.loss[0] = NAN;  // equals nothing, so every rank fails
    }
    bound_.target_logit.resize(target_.size());
    bound_.grad_input.resize(input_.size());
    bound_.grad_weight.resize(weight_.size());
  }

  double gamma(int64_t terms) const {
    const double k = static_cast<double>(terms);
    return kUnit * (4 + (tensor_cores_ ? k / 16 : std::sqrt(k)));
  }

  // Adds token i's part to the bounds: from its logits, its loss and its dz [V].
  void add_token(int64_t i) {
    const float* const h = &input_[i * s_.hidden];
    std::vector<double> z(s_.vocab), e(s_.vocab);
    double m = -INFINITY, s = 0, entropy = 0, mean_error = 0;
    for (int64_t j = 0; j < s_.vocab; ++j) {
      double magnitude = 0;
      for (int64_t d = 0; d < s_.hidden; ++d) {
        const double product = double(h[d]) * weight_[j * s_.hidden + d];
        z[j] += product, magnitude += std::fabs(product);
      }
      e[j] = gamma(s_.hidden) * magnitude + 3 * kUnit * std::fabs(z[j]);
      m = std::max(m, z[j]);
    }
    for (const double logit : z) s += std::exp(logit - m);
    const double lse = m + std::log(s);
    for (int64_t j = 0; j < s_.vocab; ++j) {
      const double p = std::exp(z[j] - lse);
      entropy += p * (lse - z[j]), mean_error += p * e[j];
    }
    const double of_lse = 4 * kUnit * (entropy + std::log2(s_.vocab) + 3 + std::log(s)) +
                          kUnit * std::fabs(lse) + mean_error;
    const int64_t t = target_[i];
    const double loss = lse - z[t];
    bound_.target_logit[i] = e[t] + 3 * kUnit * std::fabs(z[t]);
    bound_.loss[0] += of_lse + e[t] + 2 * kUnit * (std::fabs(z[t]) + loss) +
                      kUnit * (std::log2(counted_) + 2) * loss;
    for (int64_t j = 0; j < s_.vocab; ++j) {
      const double p = std::exp(z[j] - lse), magnitude = (p + (j == t)) / counted_;
      const double of_p = p * (e[j] + of_lse + 4 * kUnit * (3 + std::fabs(z[j] - m)));
      add_products(i, j, of_p / counted_ + 4 * kUnit * magnitude, magnitude);
    }
  }

  // Adds the error of dz_ij, and its share of the rounding errors of both sums that it enters.
  void add_products(int64_t i, int64_t j, double of_dz, double magnitude) {
    const double stored = s_.dtype == DType::bf16 ? 2 * 0x1p-8 : 0;
    const double over_columns = gamma(s_.vocab) + (ranks_ - 1) * kUnit + stored;
    const double over_tokens = gamma(counted_) + stored;
    for (int64_t d = 0; d < s_.hidden; ++d) {
      bound_.grad_input[i * s_.hidden + d] +=
          (of_dz + over_columns * magnitude) * std::fabs(weight_[j * s_.hidden + d]);
      bound_.grad_weight[j * s_.hidden + d] +=
          (of_dz + over_tokens * magnitude) * std::fabs(input_[i * s_.hidden + d]);
    }
  }

  // Both results are rounded to f32, ours and that of one process.
  static void add_rounding(const std::vector<float>& values, std::vector<double>* bounds) {
    for (size_t k = 0; k < values.size(); ++k) {
      if ((*bounds)[k] > 0) (*bounds)[k] += 2 * kUnit * std::fabs(values[k]) + 0x1p-110;
    }
  }

  const Sizes s_;
  const bool tensor_cores_;
  const int ranks_;
  const std::vector<float> input_ = input_of(s_);                   // [N, D]
  const std::vector<float> weight_ = weight_of(s_, {0, s_.vocab});  // [V, D]
  const std::vector<int64_t> target_ = target_of(s_);               // [N]
  double counted_ = 0;
  Outcome whole_;
  Bounds bound_;
};

// A rank's line of the table, sent between ranks as plain bytes.
struct Report {
  int64_t first = 0, count = 0, received_bytes = 0, kept_bytes = 0;
  double milliseconds = 0, worst = 0;
  float loss = 0;
  bool agrees = false, in_order = false;
};

// Prints the results of all ranks and returns whether they are correct.
inline bool print(const Sizes& sizes, const std::vector<Report>& ranks) {
  bool good = true;
  std::printf("N %" PRId64 ", D %" PRId64 ", V %" PRId64 ", %s, %zu ranks\n", sizes.tokens,
              sizes.hidden, sizes.vocab, sizes.dtype == DType::f32 ? "f32" : "bf16", ranks.size());
  std::printf("%4s %19s %11s %14s %12s %10s %13s %12s\n", "rank", "columns", "loss", "received, B",
              "kept, B", "ms", "error/bound", "bits");
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Report& of = ranks[r];
    std::printf("%4zu %8" PRId64 " to %7" PRId64 " %11.6f %14" PRId64 " %12" PRId64 " %10.3f ", r,
                of.first, of.first + of.count - 1, of.loss, of.received_bytes, of.kept_bytes,
                of.milliseconds);
    if (sizes.judge) {
      std::printf("%13.3f", of.worst);
    } else {
      std::printf("%13s", "not judged");
    }
    std::printf(" %12s\n", !of.agrees ? "DIFFERENT" : of.in_order ? "as rank 0" : "OUT OF ORDER");
    good = good && of.agrees && of.in_order && (!sizes.judge || of.worst <= 1);
  }
  std::printf("%s\n", !good ? "FAILED"
                      : sizes.judge
                          ? "PASSED: the same bits on every rank, within the bound of one process"
                          : "PASSED: the same bits on every rank; not compared with one process");
  return good;
}

}  // namespace shards
