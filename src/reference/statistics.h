// SPDX-License-Identifier: Apache-2.0
// The statistics of a token, from its row or from its shards ("Statistics of a token", "Combine"
// and "Accuracy" of docs/semantics.md).
#pragma once

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "src/reference/row.h"

namespace logitless::reference {

struct RowOf {
  const Call& call;
  const Tokens& tokens;
  const Token& token;
  const Row& row;
};

// Combine's inputs that were given, by name, each [P, N].
struct Shards {
  int64_t count = 0, tokens = 0;
  std::map<std::string_view, std::vector<double>> given;
};
Shards read_shards(const Call& call);

// One token's shards, and their combined values.
struct WholeRow {
  std::map<std::string_view, std::vector<double>> given;  // [P] each
  // The shards that have, or may have, some probability, and its logarithm.
  std::vector<size_t> places;
  std::vector<double> log_probability;
  double reference = 0, target_logit = 0;  // exact
  Estimate log_sum, weighted_logit_sum;
  bool is_one() const { return given.at("shard_row_reference").size() == 1; }
};
WholeRow combine(const Shards& shards, int64_t token);

// `accepted` lists all values that may be returned.
struct Index {
  int64_t value = -1;
  std::vector<int64_t> accepted;
};

// A statistic as a function of a row, or of a token's shards: a number or an index.
template <class Of>
struct Made {
  Estimate (*number)(const Of&) = nullptr;
  Index (*index)(const Of&) = nullptr;
};
struct Statistic {
  const char* name;
  Made<RowOf> of_row;
  Made<WholeRow> of_shards;  // Combine has no rank, no mass_above
  bool is_index() const { return of_row.index != nullptr; }
};
std::span<const Statistic> statistics();
// z of a column of the views; -1 means a column that is not there.
Estimate logit_at(const RowOf& of, int64_t column);
Estimate row_reference(const RowOf& of);
Estimate row_log_sum(const RowOf& of);
Estimate logprob(const RowOf& of);

// An entry of a token's top-k list (top.cpp).
struct Listed {
  Estimate logit;
  Index id;
};
std::vector<Listed> largest_logits(const RowOf& of, int64_t count);
std::vector<Listed> largest_of_shards(const Shards& shards, int64_t token, int64_t count,
                                      int64_t vocab);

Estimate combined_lse(const WholeRow& row);
Estimate combined_loss(const Call& call, const Tokens& tokens, const Token& token,
                       const WholeRow& row);

}  // namespace logitless::reference
