// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_devices.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/divergence/plan.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/runtime/runtime.h"
#include "src/validate.h"
#endif

namespace logitless::cli {

using nlohmann::json;

#ifdef LOGITLESS_WITH_CUDA
namespace {

// The number of products; a part that is recomputed adds its share of a product.
double products(const cuda::LinearShape& s, const cuda::LinearPlan& p) {
  if (p.kind == cuda::PlanKind::two_passes) {
    return 4 - static_cast<double>(p.first_rows) / static_cast<double>(s.vocab);
  }
  const int64_t columns =
      s.kernels.kept == cuda::Origin::dz_in_panels ? s.kept_columns : cuda::kept_columns(p);
  const double kept = static_cast<double>(columns) / static_cast<double>(s.vocab);
  return s.forward + s.grad_input + s.grad_weight + (s.gradients() ? 1 - kept : 0);
}

json describe(const cuda::LinearShape& s, const cuda::LinearPlan& p) {
  return {{"name", name_of(p.kind)},
          {"token_chunk", p.token_chunk},
          {"chunks", p.chunks},
          {"block_rows", p.block_rows},
          {"block_columns", p.block_columns},
          {"stored_columns", p.stored_columns},
          {"lent_columns", p.lent_columns},
          {"first_rows", p.first_rows},
          {"grad_weight_sum", p.kind != cuda::PlanKind::two_passes && sums_grad_weight(s, p)},
          {"grad_input_sum", sums_grad_input(s, p)},
          {"products", products(s, p)},
          {"bytes", p.bytes},
          {"predicted_ms", p.seconds * 1e3}};
}

std::string columns_of(const cuda::Step& step) {
  return fmt::format("columns [{}, {})", step.panel.first, step.panel.first + step.columns());
}

const char* place_of(const cuda::PanelPlace& panel) {
  if (panel.kept) return "the caller's kept memory";
  return panel.lent && !panel.copied ? "grad_weight's memory" : "the workspace";
}

// Describes a step: its inputs and its output.
std::string words_of(const cuda::Step& step) {
  using cuda::StepKind;
  const char* what = step.of_e() ? "E" : "dz";
  const std::string columns = columns_of(step);
  switch (step.kind) {
    case StepKind::tokens:
      return "which tokens count, and their weights";
    case StepKind::copy_weight:
      return "weight to aligned rows in the workspace";
    case StepKind::column_terms:
      return "bias and class weights in f32";
    case StepKind::class_row:
      return "sum of the weight's rows times the class weights";
    case StepKind::weight_tail:
      return "last rows of the weight, to a multiple of 8";
    case StepKind::gather:
      return "rows of input that count, logits of their targets";
    case StepKind::logits:
      return fmt::format(
          "input x weight, {}: partial sums{}", columns,
          is_kept(step.panel.origin) ? fmt::format("; E to {}", place_of(step.panel)) : "");
    case StepKind::states:
      return fmt::format("partial sums to row states, losses{}",
                         step.of_e() ? ", factors of E's rows" : "");
    case StepKind::finish_panel:
      return fmt::format("{}, {}: rows out of its range, zeros behind", what, columns);
    case StepKind::form_dz:
      return fmt::format("dz in the place of E, {}", columns);
    case StepKind::scale_input:
      return "input times the factors of E's rows";
    case StepKind::remake:
      return fmt::format("input x weight again, {}: {} to {}", columns, what, place_of(step.panel));
    case StepKind::form_panel:
      return fmt::format("dz of kept E, {}, to {}", columns, place_of(step.panel));
    case StepKind::copy_panel:
      return fmt::format("E, {}, from grad_weight's memory to the workspace", columns);
    case StepKind::grad_input:
      return fmt::format(
          "{} x weight, {}{}{}", what, columns,
          step.rows.count < step.tokens.count
              ? fmt::format(", rows [{}, {})", step.rows.first, step.rows.first + step.rows.count)
              : "",
          step.to_sums ? ", to sums in f32" : "");
    case StepKind::grad_weight:
      return fmt::format("{} (transposed) x input, {}{}", what, columns,
                         step.to_sums ? ", to sums in f32" : "");
    case StepKind::both_gradients:
      return fmt::format("{} x weight, beside {} (transposed) x input{}; {}", what, what,
                         step.to_sums ? " to sums in f32" : "", columns);
    case StepKind::grad_bias:
      return fmt::format("sums of {}, {}", what, columns);
    case StepKind::write_grad_input:
      return fmt::format("rows [{}, {}) from their sums", step.rows.first,
                         step.rows.first + step.rows.count);
    case StepKind::no_tokens:
      return "the loss of none, gradients of 0";
    default:
      return "from its sums";
  }
}

// Lists the steps of a plan; repeated ones become {"count", "steps"}.
class Listing final : public cuda::StepVisitor {
 public:
  Listing(const cuda::Planned& planned, const cuda::DeviceSpeed& speed)
      : planned_(planned), speed_(speed) {}
  void visit(const cuda::Step& step) override {
    if (step.kind == cuda::StepKind::gather) {
      const auto& [first, count] = step.tokens;
      open_.back().push_back({{"tokens", {first, first + count}}});
    }
    json entry{{"step", cuda::name_of(step.kind)}, {"what", words_of(step)}};
    const double seconds = planned_.engine.seconds(planned_.shape, planned_.plan, speed_, step);
    if (seconds > 0) entry["predicted_ms"] = seconds * 1e3;
    open_.back().push_back(std::move(entry));
  }
  int64_t begin_repeat(int64_t) override {
    open_.push_back(json::array());
    return 1;
  }
  void end_repeat(int64_t count) override {
    json steps = std::move(open_.back());
    open_.pop_back();
    if (count == 1) {
      for (json& step : steps) open_.back().push_back(std::move(step));
    } else {
      open_.back().push_back({{"count", count}, {"steps", std::move(steps)}});
    }
  }
  int64_t most_parts() const override { return 100; }
  json take() {
    planned_.engine.for_steps(planned_.shape, planned_.plan, this);
    return std::move(open_.back());
  }

 private:
  const cuda::Planned& planned_;
  const cuda::DeviceSpeed& speed_;
  std::vector<json> open_{json::array()};
};

json steps_of(const cuda::Asked& asked, uint64_t bytes) {
  const std::vector<cuda::Planned> passes = cuda::passes(asked, bytes);
  json all = json::array();
  for (const cuda::Planned& pass : passes) {
    if (passes.size() > 1) {  // the second pass computes the last columns
      const int64_t first = all.empty() ? 0 : asked.shape.vocab - pass.shape.vocab;
      all.push_back({{"pass", {first, asked.shape.vocab}}});
    }
    for (json& step : Listing(pass, asked.speed).take()) all.push_back(std::move(step));
  }
  return all;
}

// This machine's device, or else the one that the cost model's figures describe.
cuda::DeviceInfo planned_device() {
  const cuda::DeviceInfo* info;
  if (cuda::find_device(0, &info).ok()) return *info;
  return {.major = 9, .minor = 0, .multiprocessors = 132, .name = "one H200 (none is here)"};
}

// Both heads' products, twice if dz is computed for some columns at a time, and the gradients'.
double products(const Call& call, const cuda::DivergencePlan& p) {
  using cuda::DivergenceWay;
  const int gradients = static_cast<int>(static_cast<bool>(call.grad_input)) +
                        static_cast<int>(static_cast<bool>(call.grad_weight));
  const int heads = 1 + call.teacher_is_head();
  if (p.way == DivergenceWay::from_kept) return gradients;
  const auto vocab = static_cast<double>(call.vocab());
  const double again =
      p.way == DivergenceWay::columns && vocab > 0 ? 1 - static_cast<double>(p.stored) / vocab : 0;
  return heads * (1 + again) + gradients;
}

json kept_of(const Call& call, uint64_t bytes) {
  const Kept kept = kept_in(call, bytes);
  return {{"columns", kept.columns}, {"bytes", kept.bytes}};
}

json divergence_plan(const Call& call, std::optional<uint64_t> memory) {
  check(validate(call));
  const cuda::DeviceInfo device = planned_device();
  const cuda::DivergenceCall made = cuda::make_divergence(call);
  const uint64_t least = cuda::smallest_plan(made, device).bytes;
  const WorkspaceSize size{least, cuda::recommended_plan(made, least, device).bytes, 256};
  const uint64_t given = memory.value_or(size.recommended);
  check_memory(given, size);
  const cuda::DivergencePlan p = cuda::quickest_plan(made, given, device);
  const int64_t tokens = call.tokens(),
                chunk = p.chunk > 0 ? p.chunk : std::max<int64_t>(tokens, 1);
  return {{"device", device.name},
          {"plan",
           {{"name", name_of(p.way)},
            {"token_chunk", chunk},
            {"chunks", (tokens + chunk - 1) / chunk},
            {"block_columns", p.columns > 0 ? p.columns : call.vocab()},
            {"stored_columns", p.stored},
            {"products", products(call, p)},
            {"bytes", p.bytes},
            {"predicted_ms", p.seconds * 1e3}}},
          {"workspace",
           {{"minimum", size.minimum},
            {"recommended", size.recommended},
            {"given", given},
            {"used", p.bytes}}}};
}

}  // namespace

json cuda_plan(const OpShape& s, std::optional<uint64_t> memory, bool steps) {
  if (!s.linear() && !s.diverges()) {
    throw BadInput("--device cuda: ops of given logits have no plan; allowed: linear ops");
  }
  json out = {
      {"op", s.op},       {"tokens", s.tokens},        {"hidden", s.hidden},
      {"vocab", s.vocab}, {"dtype", name_of(s.dtype)}, {"grad_dtype", name_of(s.grad_dtype)}};
  const auto fill = [&](auto op) {
    const auto on_cuda = [](const char*, TensorView view) {
      view.device.type = DeviceType::cuda;
      return view;
    };
    if constexpr (DivergenceOp<decltype(op)>) {
      set_views(op, s, on_cuda);
      const Call call(op, {.device = {DeviceType::cuda, 0}});
      out.update(divergence_plan(call, memory));
      if (s.kept > 0) out["kept"] = kept_of(call, s.kept);
    } else if constexpr (LinearOp<decltype(op)>) {
      set_views(op, s, on_cuda);
      check(validate(Call(op, {.device = {DeviceType::cuda, 0}})));
      const cuda::DeviceInfo device = planned_device();
      check(cuda::check_named_engine(device));
      const cuda::Asked asked = cuda::asked_of(op, device);
      const uint64_t least = asked.smallest().bytes;
      const WorkspaceSize size{least, std::max(least, asked.recommended().bytes), 256};
      const uint64_t given = memory.value_or(size.recommended);
      check_memory(given, size);
      out["device"] = device.name;
      out["plan"] = describe(asked.shape, asked.plan(given));
      if (steps) out["plan"]["steps"] = steps_of(asked, given);
      if (s.kept > 0) {
        out["kept"] = {{"columns", asked.shape.kept_columns},
                       {"bytes", kept_in(Call(op), s.kept).bytes}};
      }
      out["workspace"] = {{"minimum", size.minimum},
                          {"recommended", size.recommended},
                          {"given", given},
                          {"used", out["plan"]["bytes"]}};
    }
  };
  with_planned_op(s.op, fill);
  return out;
}
#else
json cuda_plan(const OpShape&, std::optional<uint64_t>, bool) {
  throw Failure("cuda: this library was built without it");
}
#endif

namespace {

void print_kept(const json& out, const char* what) {
  if (!out.contains("kept")) return;
  fmt::print("{:<12}{} of {} of {} columns, {} for every token\n", "kept", what,
             out["kept"]["columns"].get<int64_t>(), out["vocab"].get<int64_t>(),
             format_bytes(out["kept"]["bytes"].get<uint64_t>()));
}

}  // namespace

void print_cuda_plan(const json& out) {
  const json& plan = out["plan"];
  const bool diverges = !plan.contains("lent_columns");
  fmt::print("{:<12}{}, {:.2f} products, predicted {:.3f} ms on {}\n", "plan",
             plan["name"].get<std::string>(), plan["products"].get<double>(),
             plan["predicted_ms"].get<double>(), out["device"].get<std::string>());
  if (diverges) {
    fmt::print("{:<12}{} of {} tokens; dz of {} of {} columns at a time\n", "chunks",
               plan["chunks"].get<int64_t>(), plan["token_chunk"].get<int64_t>(),
               plan["block_columns"].get<int64_t>(), out["vocab"].get<int64_t>());
    return print_kept(out, "dz");
  }
  const auto lent = plan["lent_columns"].get<int64_t>();
  if (plan["name"] == "two passes") {
    const auto first = plan["first_rows"].get<int64_t>(), vocab = out["vocab"].get<int64_t>();
    fmt::print("{:<12}{} of {} tokens; then {} of {} columns again, for grad_weight\n", "chunks",
               plan["chunks"].get<int64_t>(), plan["token_chunk"].get<int64_t>(), vocab - first,
               vocab);
    return;
  }
  fmt::print("{:<12}{} of {} tokens; logits {} x {} at a time; {} of {} columns kept{}\n", "chunks",
             plan["chunks"].get<int64_t>(), plan["token_chunk"].get<int64_t>(),
             plan["block_rows"].get<int64_t>(), plan["block_columns"].get<int64_t>(),
             plan["stored_columns"].get<int64_t>() + lent, out["vocab"].get<int64_t>(),
             lent > 0 ? fmt::format(", {} of them in grad_weight's memory", lent) : "");
  print_kept(out, "E");
}

namespace {

void print_steps(const json& steps, int depth) {
  const std::string indent(static_cast<size_t>(2 * depth), ' ');
  for (const json& step : steps) {
    if (step.contains("pass")) {
      fmt::print("a pass whose columns are [{}, {}) of the vocabulary\n",
                 step["pass"][0].get<int64_t>(), step["pass"][1].get<int64_t>());
    } else if (step.contains("tokens")) {
      fmt::print("{}of tokens [{}, {}), compacted\n", indent, step["tokens"][0].get<int64_t>(),
                 step["tokens"][1].get<int64_t>());
    } else if (step.contains("count")) {
      fmt::print("{}{} times, the first:\n", indent, step["count"].get<int64_t>());
      print_steps(step["steps"], depth + 1);
    } else {
      fmt::print("{:<{}}{:>10}  {}\n", indent + step["step"].get<std::string>(), 24,
                 step.contains("predicted_ms")
                     ? fmt::format("{:.3f} ms", step["predicted_ms"].get<double>())
                     : "",
                 step["what"].get<std::string>());
    }
  }
}

}  // namespace

void print_cuda_steps(const json& out) {
  fmt::print("\n");
  print_steps(out["plan"]["steps"], 0);
}

}  // namespace logitless::cli
