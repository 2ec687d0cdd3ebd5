// SPDX-License-Identifier: Apache-2.0
// The largest logits of a row, and of a token's shards, in order ("Top-k" and "Combine" of
// docs/semantics.md).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/reference/statistics.h"

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A row with a NaN has no order: any column may be named.
std::vector<Listed> without_order(int64_t count, int64_t vocab) {
  std::vector<Listed> list(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r) {
    Listed& listed = list[static_cast<size_t>(r)];
    listed.logit = {kNan, 0};
    listed.id = {r, std::vector<int64_t>(static_cast<size_t>(vocab))};
    std::iota(listed.id.accepted.begin(), listed.id.accepted.end(), int64_t{0});
  }
  return list;
}

const Listed nothing{{-kInfinity, 0}, {-1, {-1}}};

bool any_nan(const std::vector<double>& values) {
  return std::ranges::any_of(values, [](double x) { return std::isnan(x); });
}

std::vector<double> falling(std::vector<double> values) {
  std::ranges::sort(values, std::greater{});
  return values;
}

}  // namespace

std::vector<Listed> largest_logits(const RowOf& of, int64_t count) {
  const std::vector<double>& z = of.row.z;
  if (any_nan(z)) return without_order(count, of.call.vocab_total());
  std::vector<int64_t> order(z.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  // Ordered by the values written, which are f32.
  std::ranges::sort(order, [&](int64_t a, int64_t b) {
    const auto first = static_cast<float>(z[a]), second = static_cast<float>(z[b]);
    return first != second ? first > second : a < b;
  });
  // Bounds of each computed logit; sorted, they bound the logit at each position.
  std::vector<double> least, most;
  for (int64_t j = 0; j < std::ssize(z); ++j) {
    const double error = std::isfinite(z[j]) ? logit_at(of, j).error : 0;
    least.push_back(z[j] - error);
    most.push_back(z[j] + error);
  }
  const std::vector<double> lower = falling(least), upper = falling(most);
  std::vector<Listed> list(static_cast<size_t>(count), nothing);
  for (size_t r = 0; r < std::min(list.size(), z.size()); ++r) {
    const int64_t column = order[r], start = of.call.vocab_start();
    const double value = z[column];
    list[r].logit = {value,
                     std::isfinite(value) ? std::max(upper[r] - value, value - lower[r]) : 0};
    list[r].id = {column + start, {}};
    for (int64_t j = 0; j < std::ssize(z); ++j) {
      if (most[j] >= lower[r] && least[j] <= upper[r]) list[r].id.accepted.push_back(j + start);
    }
  }
  return list;
}

std::vector<Listed> largest_of_shards(const Shards& shards, int64_t token, int64_t count,
                                      int64_t vocab) {
  struct Entry {
    double logit, id;
  };
  std::vector<Entry> entries;
  const std::vector<double>& logits = shards.given.at("shard_top_logits");
  const std::vector<double>& ids = shards.given.at("shard_top_ids");
  for (int64_t s = 0; s < shards.count; ++s) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (s * shards.tokens + token) * count + r;
      if (std::isnan(logits[at])) return without_order(count, vocab);
      if (ids[at] >= 0) entries.push_back({logits[at], ids[at]});
    }
  }
  std::ranges::sort(entries, [](const Entry& a, const Entry& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  });
  std::vector<Listed> list(static_cast<size_t>(count), nothing);
  for (size_t r = 0; r < std::min(list.size(), entries.size()); ++r) {
    const auto id = static_cast<int64_t>(entries[r].id);
    list[r] = {{entries[r].logit, 0}, {id, {id}}};
  }
  return list;
}

}  // namespace logitless::reference
