// SPDX-License-Identifier: Apache-2.0
// Input data of the kinds with different error behaviour.
#include "data.h"

#include <cmath>
#include <map>
#include <utility>

namespace logitless::conformance {
namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;

std::vector<double> make_targets(const Case& c, Random& random) {
  const int64_t vocab = c.options.vocab_total ? c.options.vocab_total : c.shape.vocab;
  std::vector<double> target(c.shape.tokens);  // [N]
  for (double& t : target) {
    // Never ignore_index by chance: the case decides how many tokens count.
    do t = static_cast<double>(random.below(vocab));
    while (vocab > 1 && t == static_cast<double>(c.options.ignore_index));
    const double share = random.uniform();
    if (share < c.ignored) {
      t = static_cast<double>(c.options.ignore_index);
    } else if (share < c.ignored + c.outside) {
      static constexpr int64_t kOutside[] = {-1, 0, 1, 1 << 20, -77};
      const int64_t which = random.below(5);
      t = static_cast<double>(which == 1 || which == 2 ? vocab + kOutside[which] : kOutside[which]);
    }
  }
  return target;
}

// The target's column within the op's views, or -1.
int64_t column_of(const Case& c, double target) {
  const auto column = static_cast<int64_t>(target) - c.options.vocab_start;
  return column >= 0 && column < c.shape.vocab ? column : -1;
}

void make_linear(const Case& c, Values& v, Random& random) {
  const auto [tokens, hidden, vocab] = c.shape;
  v.input.resize(tokens * hidden);
  v.weight.resize(vocab * hidden);
  const double spread = 2 / std::sqrt(static_cast<double>(hidden));
  if (c.data == Data::constant) {
    for (int64_t i = 0; i < tokens * hidden; ++i)
      v.input[i] = 0.7 + 0.01 * static_cast<double>(i / hidden % 5);
    for (int64_t j = 0; j < vocab * hidden; ++j)
      v.weight[j] = 0.3 + 0.001 * static_cast<double>(j / hidden % 7);
    return;
  }
  const double scale = c.data == Data::large ? 1000 : 1;
  random.fill_normal(v.input);
  random.fill_normal(v.weight);
  for (double& x : v.input) x *= scale;
  for (double& w : v.weight) w *= spread;
  if (c.data != Data::peaked) return;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t column = column_of(c, v.target[i]);
    if (column < 0) continue;
    const double* w = &v.weight[column * hidden];
    double norm = 1e-3;
    for (int64_t d = 0; d < hidden; ++d) norm += w[d] * w[d];
    for (int64_t d = 0; d < hidden; ++d)
      v.input[i * hidden + d] = 0.3 * v.input[i * hidden + d] + 10 * w[d] / norm;
  }
}

void make_logits(const Case& c, Values& v, Random& random) {
  const auto [tokens, hidden, vocab] = c.shape;
  v.logits.resize(tokens * vocab);
  const double scale = c.data == Data::large ? 10000 : 3;
  random.fill_normal(v.logits);
  for (double& z : v.logits) z *= scale;
  for (int64_t i = 0; i < tokens; ++i) {
    double* row = &v.logits[i * vocab];
    if (c.data == Data::constant) {
      for (int64_t j = 0; j < vocab; ++j) row[j] = 3.7 + static_cast<double>(i % 3);
    }
    const int64_t column = c.op == OpKind::softmax ? i % vocab : column_of(c, v.target[i]);
    if (c.data == Data::peaked && column >= 0) row[column] += 15;
    if (c.options.input_kind != InputKind::probabilities) continue;
    double sum = 0;
    for (int64_t j = 0; j < vocab; ++j) sum += row[j] = std::exp(row[j] / (scale / 3));
    for (int64_t j = 0; j < vocab; ++j) row[j] = random.below(16) == 0 ? 0 : row[j] / sum;
  }
}

}  // namespace

uint64_t Random::bits() {
  uint64_t z = state_ += kStep;  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * M_PI * uniform());
}

void Random::fill_normal(std::vector<double>& values) {
  constexpr size_t kKept = size_t{1} << 21;  // 16 MiB
#ifdef __wasm__                              // thread-local destructors are not supported
  static std::map<std::pair<uint64_t, size_t>, std::vector<double>> kept;
  static size_t size = 0;
#else
  thread_local std::map<std::pair<uint64_t, size_t>, std::vector<double>> kept;
  thread_local size_t size = 0;
#endif
  const auto found = kept.find({state_, values.size()});
  if (found != kept.end()) {
    values = found->second;
    state_ += 2 * values.size() * kStep;
    return;
  }
  const std::pair key{state_, values.size()};
  for (double& x : values) x = normal();
  if (size + values.size() > kKept) kept.clear(), size = 0;
  if (values.size() > kKept) return;
  kept.emplace(key, values);
  size += values.size();
}

std::vector<double> normals(int64_t count, uint64_t seed, double scale, double offset) {
  Random random(seed);
  std::vector<double> values(count);
  random.fill_normal(values);
  for (double& x : values) x = offset + scale * x;
  return values;
}

Values make_values(const Case& c) {
  Random random(c.seed);
  Values v;
  if (c.op != OpKind::softmax) v.target = make_targets(c, random);
  if (is_linear(c.op)) {
    make_linear(c, v, random);
  } else {
    make_logits(c, v, random);
  }
  return v;
}

}  // namespace logitless::conformance
