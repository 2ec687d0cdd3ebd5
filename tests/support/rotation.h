// SPDX-License-Identifier: Apache-2.0
// Which cases run. With LOGITLESS_TEST_SEED (set by scripts/test to the number of commits) a test
// with more than kSwept parameters runs a third of them, with more than kMany a sixth, and with the
// next seeds the others (rotation.py does the same for pytest). With LOGITLESS_TEST_SLOW=1 a test
// of two parameters or more runs a sixth, so a few run none of theirs. LOGITLESS_TEST_COUNTS names
// a file to which the number of cases that ran, and of all, is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace logitless::conformance {

inline bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string(value) == "1";
}
// Whether every case runs, however long it takes.
inline bool full() { return is_set("LOGITLESS_TEST_FULL"); }
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(LOGITLESS_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
// Whether tests run fewer cases (Conformance an eighth), because each takes many times as long.
inline bool eighth() { return !full() && (kSanitized || is_set("LOGITLESS_TEST_EIGHTH")); }

// Advances the selected part of the cases from commit to commit.
inline size_t rotation() {
  const char* value = std::getenv("LOGITLESS_TEST_SEED");
  return value == nullptr ? 0 : std::strtoull(value, nullptr, 10);
}
// Selects a part of the runs within one case. It advances more slowly than the cases: otherwise a
// case would always meet the same part.
inline size_t rotation_within() { return rotation() / 6; }
// Whether to do this run of a case: always, or, if eighth(), in a third of the runs, which differs
// from case to case.
inline bool in_third(size_t run, size_t which_case) {
  return !eighth() || (run + which_case + rotation_within()) % 3 == 0;
}

inline constexpr size_t kSwept = 3;
inline constexpr size_t kMany = 12;

// Whether a name matches a pattern with *.
inline bool matches(std::string_view name, std::string_view pattern) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*')
    return !name.empty() && name[0] == pattern[0] && matches(name.substr(1), pattern.substr(1));
  for (size_t i = 0; i <= name.size(); ++i) {
    if (matches(name.substr(i), pattern.substr(1))) return true;
  }
  return false;
}
inline bool matches_one(std::string_view name, std::string_view patterns) {
  while (true) {
    const size_t end = patterns.find(':');
    if (matches(name, patterns.substr(0, end))) return true;
    if (end == std::string_view::npos) return false;
    patterns.remove_prefix(end + 1);
  }
}
// Whether googletest's filter POSITIVE-NEGATIVE selects a test.
inline bool takes(std::string_view filter, std::string_view name) {
  const size_t minus = filter.find('-');
  const std::string_view wanted = filter.substr(0, minus);
  if (!matches_one(name, wanted.empty() ? "*" : wanted)) return false;
  return minus == std::string_view::npos || !matches_one(name, filter.substr(minus + 1));
}

// The cases of each test: "All/Edges.OneColumn" has "/cpu_forward_f32".
using CasesByTest = std::map<std::string, std::vector<std::string>>;

inline size_t count(const CasesByTest& tests) {
  size_t all = 0;
  for (const auto& [test, cases] : tests) all += cases.size();
  return all;
}

inline CasesByTest taken_by(const std::string& filter) {
  CasesByTest taken;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(t)->name();
      const size_t parameters = std::min(name.find('/', name.find('.')), name.size());
      if (takes(filter, name)) taken[name.substr(0, parameters)].push_back(name.substr(parameters));
    }
  }
  return taken;
}

inline uint64_t hash_of(std::string_view text) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, because std::hash may differ between machines
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// Returns the cases that run now: a part of each test's, or all if it has few. Cases are in the
// order of hashes, because adjacent ones share a backend or an op. The test's hash moves its parts,
// so that no commit gets the larger part of every test.
inline CasesByTest part_of(CasesByTest tests, size_t seed, bool slow = false) {
  for (auto& [name, cases] : tests) {
    if (cases.size() <= (slow ? 1 : kSwept)) continue;
    const auto order = [&test = name](const std::string& c) {
      return std::pair(hash_of(test + c), c);
    };
    std::sort(cases.begin(), cases.end(),
              [&](const auto& a, const auto& b) { return order(a) < order(b); });
    std::vector<std::string> kept;
    const size_t parts = cases.size() <= kMany && !slow ? 3 : 6;
    const size_t first = (seed + hash_of(name) % parts) % parts;
    for (size_t i = first; i < cases.size(); i += parts) kept.push_back(cases[i]);
    cases = kept;
  }
  return tests;
}

// Sets googletest's filter to the selected cases. Suites in `whole` run all cases.
inline void rotate_cases(std::string_view whole = {}) {
  if (full() || std::getenv("LOGITLESS_TEST_SEED") == nullptr) return;
  const CasesByTest taken = taken_by(GTEST_FLAG_GET(filter));
  CasesByTest chosen = part_of(taken, rotation(), is_set("LOGITLESS_TEST_SLOW"));
  for (auto& [test, cases] : chosen) {
    if (!whole.empty() && test.find(whole) != test.npos) cases = taken.at(test);
  }
  std::string filter;
  for (const auto& [test, cases] : chosen) {
    for (const std::string& c : cases) filter += (filter.empty() ? "" : ":") + test + c;
  }
  GTEST_FLAG_SET(filter, filter.empty() ? "-*" : filter);
  const char* file = std::getenv("LOGITLESS_TEST_COUNTS");
  const char* shard = std::getenv("GTEST_SHARD_INDEX");  // one shard reports for all
  if (file == nullptr || (shard != nullptr && std::string(shard) != "0")) return;
  if (std::FILE* counts = std::fopen(file, "a")) {
    std::fprintf(counts, "%zu %zu\n", count(chosen), count(taken));
    std::fclose(counts);
  }
}

}  // namespace logitless::conformance
