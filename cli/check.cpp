// SPDX-License-Identifier: Apache-2.0
// logitless check: runs cases of the conformance suite on this machine, and compares each element
// of each output with the reference, within the error bound of docs/semantics.md. With --shards it
// splits each case's vocabulary, and checks the shards' results too.
#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/text.h"
#include "tests/support/judge.h"
#include "tests/support/shards.h"

namespace logitless::cli {
namespace {

using conformance::Case;
using conformance::Comparison;
using conformance::OpKind;
using conformance::TestDevice;
using nlohmann::json;

constexpr OpKind kOps[] = {OpKind::softmax,
                           OpKind::forward,
                           OpKind::backward,
                           OpKind::forward_backward,
                           OpKind::linear_forward,
                           OpKind::linear_backward,
                           OpKind::linear_forward_backward};
// The ops of kOps that accept a shard of the vocabulary.
constexpr OpKind kShardOps[] = {OpKind::forward, OpKind::backward, OpKind::linear_forward,
                                OpKind::linear_backward};
constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};

struct CheckArguments {
  std::vector<std::string> devices, ops, dtypes;  // empty: all
  int64_t cases = 150;                            // of each op and dtype
  double within = 1;
  std::optional<int64_t> shards;  // of the vocabulary
  bool full = false, every_isa = false;
};

struct Row {
  const TestDevice* device;
  std::string isa;  // empty: the default
  OpKind op;
  DType dtype;
  int64_t cases = 0, failures = 0;
  double worst_ratio = 0;
  std::string worst{}, report{};
};

// Returns `count` evenly spread items, including the first.
template <class T>
std::vector<T> spread(const std::vector<T>& items, int64_t count) {
  const auto size = static_cast<int64_t>(items.size());
  if (count >= size) return items;
  std::vector<T> some;
  for (int64_t i = 0; i < count; ++i) some.push_back(items[static_cast<size_t>(i * size / count)]);
  return some;
}

struct NamedCase {
  Case c;
  std::string name;
};

// Options alone and in pairs on small shapes, then shapes at block boundaries, every other one with
// all options at once.
std::vector<NamedCase> cases_of(OpKind op, DType dtype, const CheckArguments& a) {
  const int64_t most = a.full ? INT64_MAX : a.cases;
  std::vector<NamedCase> pairs, all;
  for (const conformance::Pair& pair : conformance::feature_pairs(op, dtype)) {
    const Case c = conformance::case_of(op, dtype, pair);
    if (a.shards && !conformance::can_be_split(c)) continue;
    const auto& features = conformance::features();
    std::string name = features[pair.first].name;
    if (pair.second != pair.first) name += std::string(" + ") + features[pair.second].name;
    pairs.push_back({c, name + ", " + describe(c)});
  }
  all = spread(pairs, most - most / 3);
  uint64_t seed = 0;
  for (const conformance::Shape& shape : spread(conformance::shapes(op), most / 3)) {
    Case c{.op = op, .shape = shape, .dtype = dtype, .seed = ++seed};
    if (seed % 2 == 0) conformance::apply_everything(c);
    all.push_back({c, describe(c) + (seed % 2 == 0 ? ", every option" : "")});
  }
  return all;
}

std::span<const OpKind> ops_of(const CheckArguments& a) {
  return a.shards ? std::span<const OpKind>(kShardOps) : std::span<const OpKind>(kOps);
}

bool wanted(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

std::string op_name(OpKind op) {
  std::string name = conformance::name_of(op);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

void refuse_ops_without_shards(const CheckArguments& a) {
  std::vector<std::string> allowed;
  for (const OpKind op : ops_of(a)) allowed.push_back(op_name(op));
  for (const std::string& op : a.ops) {
    if (wanted(allowed, op)) continue;
    throw BadInput(fmt::format("--op: \"{}\" with --shards; allowed: {}", op, joined(allowed)),
                   "--op");
  }
}

std::vector<Row> rows_of(const CheckArguments& a) {
  refuse_ops_without_shards(a);
  std::vector<Row> rows;
  // throws, with the reason, if one is absent
  for (const std::string& name : a.devices) parse_device(name);
  for (const auto& [name, device, reason] : conformance::all_devices()) {
    // Comparing the reference with itself proves little, so it runs only on request.
    if (a.devices.empty() ? name == "reference" : !wanted(a.devices, name)) continue;
    if (device == nullptr && a.devices.empty()) continue;
    if (device == nullptr) throw Failure(reason);
    std::vector<std::string> sets{""};
    if (a.every_isa && !device->instruction_sets().empty()) sets = device->instruction_sets();
    for (const std::string& isa : sets)
      for (const OpKind op : ops_of(a))
        for (const DType dtype : kDtypes)
          if (wanted(a.ops, op_name(op)) && wanted(a.dtypes, name_of(dtype)))
            rows.push_back({.device = device, .isa = isa, .op = op, .dtype = dtype});
  }
  return rows;
}

// Runs and checks the row's next case. With shards, the cases cycle through the ways to split a
// vocabulary; the way is added to the case's name.
Comparison judge_case(const Row& row, NamedCase* named, const CheckArguments& a) {
  const auto memory =
      row.cases % 2 == 0 ? conformance::Memory::recommended : conformance::Memory::minimum;
  if (!a.shards) return conformance::judge(*row.device, named->c, {.memory = memory});
  const auto splits = conformance::splits_of(named->c.shape.vocab, *a.shards);
  const conformance::Split& split = splits[static_cast<size_t>(row.cases / 2) % splits.size()];
  named->name += fmt::format(", {} shards, {}", *a.shards, split.name);
  return conformance::judge_shards(*row.device, named->c, split, {.memory = memory});
}

void judge_row(Row& row, const std::vector<NamedCase>& cases, const CheckArguments& a,
               const std::function<void()>& tick) {
  if (!row.isa.empty()) row.device->force_instruction_set(row.isa);
  for (NamedCase named : cases) {
    tick();
    const Comparison result = judge_case(row, &named, a);
    ++row.cases;
    if (result.worst_ratio > row.worst_ratio) {
      row.worst_ratio = result.worst_ratio;
      row.worst = result.worst + ", " + named.name;
    }
    if (result.ok() && result.worst_ratio <= a.within) continue;
    ++row.failures;
    if (row.report.empty()) {
      row.report = named.name + "\n" +
                   (result.ok() ? fmt::format("  {}: error / bound {:.3f}\n", result.worst,
                                              result.worst_ratio)
                                : result.report);
    }
  }
  if (!row.isa.empty()) row.device->force_instruction_set("");
}

std::string device_name(const Row& row) {
  return row.isa.empty() ? row.device->name() : fmt::format("{} {}", row.device->name(), row.isa);
}

json to_json(const std::vector<Row>& rows, const CheckArguments& a, double seconds) {
  json out = {{"rows", json::array()}, {"within", a.within}, {"seconds", seconds}};
  if (a.shards) out["shards"] = *a.shards;
  int64_t cases = 0, failures = 0;
  for (const Row& row : rows) {
    out["rows"].push_back({{"device", row.device->name()},
                           {"isa", row.isa.empty() ? json() : json(row.isa)},
                           {"op", op_name(row.op)},
                           {"dtype", name_of(row.dtype)},
                           {"cases", row.cases},
                           {"failures", row.failures},
                           {"worst_ratio", row.worst_ratio},
                           {"worst", row.worst},
                           {"report", row.report}});
    cases += row.cases;
    failures += row.failures;
  }
  out["cases"] = cases;
  out["failures"] = failures;
  return out;
}

void print_text(const std::vector<Row>& rows, const CheckArguments& a, double seconds) {
  std::vector<std::vector<std::string>> table{
      {"device", "op", "dtype", "cases", "worst error / bound", "failures"}};
  int64_t cases = 0, failures = 0;
  for (const Row& row : rows) {
    table.push_back({device_name(row), op_name(row.op), name_of(row.dtype),
                     std::to_string(row.cases), fmt::format("{:.3f}", row.worst_ratio),
                     std::to_string(row.failures)});
    cases += row.cases;
    failures += row.failures;
  }
  print_table(table);
  for (const Row& row : rows) {
    if (row.failures == 0) continue;
    fmt::print("\n{} {} {}: {} of {} cases failed, the first of them\n{}", device_name(row),
               op_name(row.op), name_of(row.dtype), row.failures, row.cases, row.report);
  }
  const std::string bound = a.within == 1 ? "its bound" : fmt::format("{} of its bound", a.within);
  fmt::print(
      "\n{}: {} cases, {} failed, {:.1f} s; every element must be within {} of the reference\n",
      failures == 0 ? "PASSED" : "FAILED", cases, failures, seconds, bound);
  if (std::any_of(rows.begin(), rows.end(),
                  [](const Row& row) { return row.dtype != DType::f32; })) {
    fmt::print(
        "A result of 16 bits is rounded once more, by up to half its last digit, and its bound is "
        "little more than that: ratios near 1 are usual there.\n");
  }
}

void run_check(Context& context, const CheckArguments& a) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Row> rows = rows_of(a);
  int64_t total = 0, done = 0;
  for (const Row& row : rows) {
    total += static_cast<int64_t>(cases_of(row.op, row.dtype, a).size());
  }
  Progress progress(total);
  for (Row& row : rows) {
    judge_row(row, cases_of(row.op, row.dtype, a), a, [&] {
      progress.update(
          done++, fmt::format("{} {} {}", device_name(row), op_name(row.op), name_of(row.dtype)));
    });
    if (row.failures > 0) context.exit_code = 1;
  }
  progress.clear();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (context.json) {
    print_json(to_json(rows, a, seconds));
  } else {
    print_text(rows, a, seconds);
  }
}

}  // namespace

void add_check(CLI::App& app, Context& context) {
  CLI::App* command = add_command(app, context, "check",
                                  "conformance cases on this machine, against the reference");
  auto arguments = std::make_shared<CheckArguments>();
  CheckArguments& a = *arguments;
  std::vector<std::string> ops;
  for (const OpKind op : kOps) ops.push_back(op_name(op));
  const auto list = [&](const char* name, auto& values, const auto& allowed, const char* text) {
    command->add_option(name, values, text)->delimiter(',')->check(allowed);
  };
  list("--device", a.devices, device_of("check"),
       "default: all that are present but the reference");
  list("--op", a.ops, CLI::IsMember(ops), "default: all");
  list("--dtype", a.dtypes, CLI::IsMember(kFloatDtypes), "default: all");
  command->add_option("--cases", a.cases, "of each op and dtype, evenly spread over the table")
      ->check(integer(3))
      ->capture_default_str();
  command
      ->add_option("--shards", a.shards,
                   "the vocabulary in so many shards, one after another, and what is combined of "
                   "them: 1 to 8")
      ->check(integer(1, 8));
  command->add_flag("--full", a.full, "every case of the table: minutes to hours");
  command->add_flag("--every-isa", a.every_isa, "each instruction set this machine has, in turn");
  command->add_option("--within", a.within, "share of the bound that errors may reach")
      ->check(number(0, 1))
      ->capture_default_str();
  command->callback([&context, arguments] { run_check(context, *arguments); });
}

}  // namespace logitless::cli
