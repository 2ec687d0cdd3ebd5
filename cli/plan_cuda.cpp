// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_cuda.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/linear/engine.h"
#include "src/cuda/runtime/runtime.h"
#include "src/validate.h"
#endif

namespace logitless::cli {

using nlohmann::json;

#ifdef LOGITLESS_WITH_CUDA
namespace {

// Each of the four products of a plan counts once; what is made again counts by its share.
double products(const cuda::LinearShape& s, const cuda::LinearPlan& p) {
  if (p.kind == cuda::PlanKind::two_passes) {
    return 4 - static_cast<double>(p.first_rows) / static_cast<double>(s.vocab);
  }
  const double kept = static_cast<double>(cuda::kept_columns(p)) / static_cast<double>(s.vocab);
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
          {"grad_weight_sum", p.grad_weight_sum},
          {"grad_input_sum", p.grad_input_sum},
          {"products", products(s, p)},
          {"bytes", p.bytes},
          {"predicted_ms", p.seconds * 1e3}};
}

// The device here, or the one whose figures the cost model holds.
cuda::DeviceInfo planned_device() {
  const cuda::DeviceInfo* info;
  if (cuda::find_device(0, &info).ok()) return *info;
  return {.major = 9, .minor = 0, .multiprocessors = 132, .name = "one H200 (none is here)"};
}

}  // namespace

json cuda_plan(const OpShape& s, std::optional<uint64_t> memory) {
  if (!s.linear()) {
    throw BadInput("--device cuda: ops of given logits have no plan; allowed: linear ops");
  }
  json out = {
      {"op", s.op},       {"tokens", s.tokens},        {"hidden", s.hidden},
      {"vocab", s.vocab}, {"dtype", name_of(s.dtype)}, {"grad_dtype", name_of(s.grad_dtype)}};
  const auto fill = [&](auto op) {
    if constexpr (LinearOp<decltype(op)>) {
      set_views(op, s, [](const char*, TensorView view) {
        view.device.type = DeviceType::cuda;
        return view;
      });
      check(validate(op, {.device = {DeviceType::cuda, 0}}));
      const cuda::DeviceInfo device = planned_device();
      check(cuda::check_named_engine(device));
      const cuda::Asked asked = cuda::asked_of(op, device);
      const uint64_t least = asked.smallest().bytes;
      const WorkspaceSize size{least, std::max(least, asked.recommended().bytes), 256};
      const uint64_t given = memory.value_or(size.recommended);
      check_memory(given, size);
      out["device"] = device.name;
      out["plan"] = describe(asked.shape, asked.plan(given));
      out["workspace"] = {{"minimum", size.minimum},
                          {"recommended", size.recommended},
                          {"given", given},
                          {"used", out["plan"]["bytes"]}};
    }
  };
  with_op(s.op, fill);
  return out;
}
#else
json cuda_plan(const OpShape&, std::optional<uint64_t>) {
  throw Failure("cuda: this library was built without it");
}
#endif

void print_cuda_plan(const json& out) {
  const json& plan = out["plan"];
  const auto lent = plan["lent_columns"].get<int64_t>();
  fmt::print("{:<12}{}, {:.2f} products, predicted {:.3f} ms on {}\n", "plan",
             plan["name"].get<std::string>(), plan["products"].get<double>(),
             plan["predicted_ms"].get<double>(), out["device"].get<std::string>());
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
}

}  // namespace logitless::cli
