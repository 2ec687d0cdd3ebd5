// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_devices.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_WEBGPU
#include "src/validate.h"
#include "src/webgpu/cost.h"
#endif

namespace logitless::cli {

using nlohmann::json;

#ifdef LOGITLESS_WITH_WEBGPU
namespace {

// Gives a dense tensor a fake buffer of its own: a handle neither null nor another tensor's.
TensorView in_a_buffer(TensorView view, uintptr_t number) {
  view.data = reinterpret_cast<void*>(number);
  view.device.type = DeviceType::webgpu;
  return view;
}

}  // namespace

json webgpu_plan(const OpShape& s, std::optional<uint64_t> memory) {
  json out = {{"op", s.op},
              {"tokens", s.tokens},
              {"hidden", s.hidden},
              {"vocab", s.vocab},
              {"dtype", cli::name_of(s.dtype)},
              {"grad_dtype", cli::name_of(s.grad_dtype)}};
  with_planned_op(s.op, [&](auto op) {
    uintptr_t buffers = 0;
    set_views(op, s, [&](const char*, TensorView view) { return in_a_buffer(view, ++buffers); });
    const Execution execution{.device = {DeviceType::webgpu, 0}};
    check(validate(Call(op, execution)));
    const webgpu::Problem problem = webgpu::problem_of(Call(op, execution));
    WorkspaceSize size{.alignment = 1};
    check(webgpu::workspace_sizes(problem, {}, &size.minimum, &size.recommended));
    const uint64_t given = memory.value_or(size.recommended);
    check_memory(given, size);
    webgpu::Plan plan;
    check(webgpu::make_plan(problem, {}, given, &plan));
    out["plan"] = {{"name", plan.whole ? "whole vocabulary of a chunk" : "window by window"},
                   {"token_chunk", plan.chunk},
                   {"chunks", plan.chunks},
                   {"window", plan.window},
                   {"windows", plan.windows},
                   {"slices", plan.slices},
                   {"products", plan.products},
                   {"predicted_ms", webgpu::predicted_microseconds(problem, plan) * 1e-3},
                   {"bytes", plan.total}};
    out["workspace"] = {{"minimum", size.minimum},
                        {"recommended", size.recommended},
                        {"given", given},
                        {"used", plan.total}};
  });
  return out;
}
#else
json webgpu_plan(const OpShape&, std::optional<uint64_t>) {
  throw Failure("webgpu: this library was built without it");
}
#endif

void print_webgpu_plan(const json& out) {
  const json& plan = out["plan"];
  fmt::print("{:<12}{}, {} products, at WebGPU's default limits, predicted {:.3f} ms on an H200\n",
             "plan", plan["name"].get<std::string>(), plan["products"].get<int>(),
             plan["predicted_ms"].get<double>());
  fmt::print("{:<12}{} of {} tokens, {} windows of {} columns\n", "chunks",
             plan["chunks"].get<int64_t>(), plan["token_chunk"].get<int64_t>(),
             plan["windows"].get<int64_t>(), plan["window"].get<int64_t>());
}

}  // namespace logitless::cli
