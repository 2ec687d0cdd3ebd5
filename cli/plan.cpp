// SPDX-License-Identifier: Apache-2.0
// logitless plan: how the CPU, CUDA or WebGPU would run an op in a given workspace, without running
// it.
#include "src/cpu/plan.h"

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/op_shape.h"
#include "cli/plan_devices.h"
#include "cli/text.h"
#include "src/cpu/dispatch.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

struct PlanArguments {
  OpShape shape;
  std::string device = "cpu", dtype = "f32", grad_dtype = "f32";
  std::optional<uint64_t> memory, kept;
  int threads = 0;
  int64_t shards = 1;
  bool steps = false, no_grad_input = false, no_grad_weight = false;
};

// Returns the op's call; its tensors have no addresses.
Call call_of(const OpShape& shape) {
  return with_planned_op(shape.op, [&](auto op) {
    set_views(op, shape, [](const char*, const TensorView& view) { return view; });
    return Call(op);
  });
}

cpu::LinearShape linear_shape(const OpShape& s) {
  if (s.diverges()) return cpu::shape_of(call_of(s));
  const bool gradients = s.op != "linear-forward";
  return {.tokens = s.tokens,
          .vocab = s.vocab,
          .hidden = s.hidden,
          .dtype = s.dtype,
          .forward = s.op != "linear-backward",  // Backward reads what Forward wrote
          .grad_input = gradients && s.grad_input,
          .grad_weight = gradients && s.grad_weight,
          .direct_grad_weight = !(gradients && s.grad_weight) || s.grad_dtype == DType::f32,
          .kept = gradients ? cpu::columns_kept(call_of(s)) : 0};
}

WorkspaceSize workspace_size(const OpShape& shape) {
  return with_planned_op(shape.op, [&](auto op) {
    set_views(op, shape, [](const char*, const TensorView& view) { return view; });
    WorkspaceSize size;
    check(workspace(op, {}, &size));
    return size;
  });
}

int products(const cpu::LinearShape& shape, const cpu::LinearPlan& plan) {
  const bool again = shape.gradients() && !plan.stored && !shape.all_kept();
  const bool teachers = shape.forward && shape.teacher_hidden > 0;
  return shape.forward + teachers + again + shape.grad_input + shape.grad_weight;
}

// Describes the kept state of a Forward, or of the Forward of this Backward.
json kept_state(const OpShape& s) {
  const Call call = call_of(s);
  const Kept kept = kept_in(call, s.kept);
  return {{"columns", cpu::columns_kept(call)},
          {"holds", s.diverges()            ? "gradients of logits"
                    : s.dtype == DType::f32 ? "f32 logits"
                                            : "bf16 exponentials"},
          {"bytes", kept.bytes}};
}

// Lists the parts of the workspace; the parts add up to plan.bytes.
json parts(const cpu::LinearShape& shape, const cpu::LinearPlan& p) {
  json out = json::array();
  uint64_t rest = p.bytes;
  const auto add = [&](const char* name, uint64_t bytes) {
    if (bytes > 0) out.push_back({{"name", name}, {"bytes", bytes}});
    rest -= bytes;
  };
  const uint64_t logits = static_cast<uint64_t>(p.vocab_tiles) *
                          static_cast<uint64_t>(p.token_chunk) * cpu::vocab_tile * 4;
  add("tokens and their sums", p.logits_at);
  add(shape.diverges ? "both heads' logits of one chunk" : "logits of one chunk",
      p.stored ? (shape.diverges ? 2 : 1) * logits : 0);
  add("f32 sum of grad_weight", p.bias_sum_at - p.weight_sum_at);
  add("f32 sum of grad_bias", p.lanes_at - p.bias_sum_at);
  add("scratch of the threads", static_cast<uint64_t>(p.lanes) * p.lane_bytes);
  // One part: partial sums may reuse the memory of the packed input, which is not needed then.
  add("packed input, partial sums", rest);
  return out;
}

std::string plan_name(const cpu::LinearShape& shape, const cpu::LinearPlan& plan) {
  if (!shape.gradients()) return "loss only";
  if (shape.diverges && shape.all_kept()) return "kept gradients of logits";
  if (shape.all_kept()) return shape.dtype == DType::f32 ? "kept logits" : "kept exponentials";
  return plan.stored ? "stored chunks" : "recompute";
}

json linear_plan(const OpShape& s, uint64_t bytes) {
  const cpu::LinearShape shape = linear_shape(s);
  const cpu::LinearPlan p = cpu::plan_linear(shape, bytes, logitless_num_threads());
  const double product = 2.0 * static_cast<double>(s.tokens) * static_cast<double>(s.vocab) *
                         static_cast<double>(s.hidden);
  // The recomputed logits leave out kept columns.
  const double spared = shape.kept == 0 || shape.all_kept()
                            ? 0
                            : static_cast<double>(shape.kept) / static_cast<double>(s.vocab);
  const double more =
      shape.forward && shape.teacher_hidden > 0  // products() counts the teacher's with D
          ? product *
                (static_cast<double>(shape.teacher_hidden) / static_cast<double>(s.hidden) - 1)
          : 0;
  return {{"name", plan_name(shape, p)},
          {"arithmetic", cpu::name_of(p.engine.arithmetic)},
          {"token_chunk", p.token_chunk},
          {"chunks", p.chunks},
          {"vocab_tile", cpu::vocab_tile},
          {"vocab_tiles", p.vocab_tiles},
          {"slots", shape.grad_input ? p.slots : 0},
          {"threads", p.lanes},
          {"bytes", p.bytes},
          {"parts", parts(shape, p)},
          {"products", products(shape, p)},
          {"flops", (products(shape, p) - spared) * product + more}};
}

// An implementation that stores logits holds those of each head, and the gradient of the student's.
uint64_t held_bytes(const json& out) {
  const bool gradients = !out["op"].get<std::string>().ends_with("-forward") ||
                         out["op"].get<std::string>().ends_with("backward");
  const int heads = out.contains("teacher_hidden") ? 2 : 1;
  return static_cast<uint64_t>(heads + gradients) * out["logits_bytes"].get<uint64_t>();
}

void describe_teacher(const OpShape& s, json* out) {
  if (!s.diverges()) return;
  if (s.teacher_logits) {
    (*out)["teacher_logits"] = true;
  } else {
    (*out)["teacher_hidden"] = s.teacher_hidden > 0 ? s.teacher_hidden : s.hidden;
  }
}

json gather(const PlanArguments& arguments) {
  const OpShape& s = arguments.shape;
  const WorkspaceSize size = workspace_size(s);
  const uint64_t given = arguments.memory.value_or(size.recommended);
  check_memory(given, size);
  const auto logits = static_cast<uint64_t>(s.tokens) * static_cast<uint64_t>(s.vocab) * 4;
  json out = {{"op", s.op},
              {"tokens", s.tokens},
              {"hidden", s.hidden},
              {"vocab", s.vocab},
              {"dtype", name_of(s.dtype)},
              {"grad_dtype", name_of(s.grad_dtype)},
              {"isa", cpu::target_name()},
              {"threads", logitless_num_threads()},
              {"workspace",
               {{"minimum", size.minimum}, {"recommended", size.recommended}, {"given", given}}}};
  if (s.linear() || s.diverges()) {
    out["plan"] = linear_plan(s, given);
    out["workspace"]["used"] = out["plan"]["bytes"];
    out["logits_bytes"] = logits;
    if (s.kept > 0) out["kept"] = kept_state(s);
    describe_teacher(s, &out);
    const uint64_t held = held_bytes(out);
    const uint64_t used = out["plan"]["bytes"];
    out["logits_bytes_avoided"] = held > used ? held - used : 0;
    if (held <= used) out["remark"] = nothing_saved(held, size);
  } else {
    out["workspace"]["used"] = size.minimum;
  }
  return out;
}

std::string bytes_text(const json& bytes) { return format_bytes(bytes.get<uint64_t>()); }

void print_avoided(const json& out) {
  const json& plan = out["plan"];
  const uint64_t held = held_bytes(out);
  const int heads = out.contains("teacher_hidden") ? 2 : 1;
  const bool gradients = held > heads * out["logits_bytes"].get<uint64_t>();
  const std::string avoided = bytes_text(out["logits_bytes_avoided"]);
  const std::string what = fmt::format("{} {}", heads == 2 ? "both heads' logits" : "the logits",
                                       gradients ? "and their gradient are" : "are");
  if (out.contains("remark")) {
    fmt::print("{:<12}nothing: {} {}; {}\n", "avoided", what, format_bytes(held),
               out["remark"].get<std::string>());
  } else if (heads == 1 && plan["name"] == "stored chunks" && plan["chunks"] == 1) {
    fmt::print(
        "{:<12}{} of the gradient alone: one chunk holds all logits, whose place it takes; "
        "--memory {} would hold none\n",
        "avoided", avoided, memory_argument(out["workspace"]["minimum"]));
  } else {
    fmt::print("{:<12}{}: {} {}, {:.1f} x this workspace\n", "avoided", avoided, what,
               format_bytes(held), static_cast<double>(held) / plan["bytes"].get<double>());
  }
}

void print_linear(const json& out) {
  const json& plan = out["plan"];
  const auto chunks = plan["chunks"].get<int64_t>();
  fmt::print("{:<12}{}, {} product{}, arithmetic {} on {}\n", "plan",
             plan["name"].get<std::string>(), plan["products"].get<int>(),
             plan["products"] == 1 ? "" : "s", plan["arithmetic"].get<std::string>(),
             out["isa"].get<std::string>());
  fmt::print("{:<12}{} of {} tokens; {} vocabulary tiles of {}", "chunks", chunks,
             plan["token_chunk"].get<int64_t>(), plan["vocab_tiles"].get<int64_t>(),
             plan["vocab_tile"].get<int64_t>());
  if (plan["slots"] > 0) {
    fmt::print("; {} partial sums of grad_input", plan["slots"].get<int64_t>());
  }
  fmt::print("; {} of {} threads\n", plan["threads"].get<int64_t>(), out["threads"].get<int>());
  fmt::print("{:<12}{:.1f} GFLOP\n", "work", plan["flops"].get<double>() * 1e-9);
  if (!out.contains("kept")) return print_avoided(out);
  const json& kept = out["kept"];
  fmt::print("{:<12}{} of {} columns, {}; {} for every token\n", "kept",
             kept["columns"].get<int64_t>(), out["vocab"].get<int64_t>(),
             kept["holds"].get<std::string>(), bytes_text(kept["bytes"]));
}

void print_parts(const json& out) {
  if (!out.contains("plan")) return;
  for (const json& part : out["plan"]["parts"]) {
    fmt::print("{:<12}{:>10}  {}\n", "", bytes_text(part["bytes"]),
               part["name"].get<std::string>());
  }
}

std::string teacher_text(const json& out) {
  if (out.contains("teacher_logits")) return ", the teacher's logits given";
  if (!out.contains("teacher_hidden")) return "";
  return fmt::format(", a teacher of D {}", out["teacher_hidden"].get<int64_t>());
}

// Prints the lines common to all devices, and within them the device's own.
void print_text(const json& out, void (*print_plan)(const json&)) {
  const std::string of_all =
      out.contains("vocab_total") ? fmt::format(" of {}", out["vocab_total"].get<int64_t>()) : "";
  fmt::print("{:<12}{}, N {} x D {} x V {}{}, {}, gradients {}{}\n", "op",
             out["op"].get<std::string>(), out["tokens"].get<int64_t>(),
             out["hidden"].get<int64_t>(), out["vocab"].get<int64_t>(), of_all,
             out["dtype"].get<std::string>(), out["grad_dtype"].get<std::string>(),
             teacher_text(out));
  if (out.contains("plan")) print_plan(out);
  const json& workspace = out["workspace"];
  // The recommended size must not depend on the machine, because the plan depends on it; so it has
  // room for the scratch of more threads.
  const bool spare = print_plan == print_linear && out.contains("plan") &&
                     workspace["given"] == workspace["recommended"] &&
                     workspace["used"] < workspace["given"];
  fmt::print("{:<12}{} ({} bytes) of {} given{}; minimum {}, recommended {}\n", "workspace",
             bytes_text(workspace["used"]), workspace["used"].get<uint64_t>(),
             bytes_text(workspace["given"]), spare ? " (the rest: scratch of more threads)" : "",
             bytes_text(workspace["minimum"]), bytes_text(workspace["recommended"]));
}

void check_shape_options(const PlanArguments& a) {
  const OpShape& s = a.shape;
  const bool whole = s.op.ends_with("forward-backward");
  if (s.kept > 0 && (whole || !(s.linear() || s.diverges()))) {
    throw BadInput(
        fmt::format("--kept: given with --op {}; allowed: linear-forward, "
                    "linear-backward, divergence-forward, divergence-backward",
                    s.op));
  }
  for (const auto& [name, given] : {std::pair{"--teacher-hidden", s.teacher_hidden > 0},
                                    std::pair{"--teacher-logits", s.teacher_logits}}) {
    if (given && !s.diverges()) {
      throw BadInput(
          fmt::format("{}: given with --op {}; allowed: divergence-forward, "
                      "divergence-backward, divergence-forward-backward",
                      name, s.op));
    }
  }
  if (s.teacher_logits && s.teacher_hidden > 0) {
    throw BadInput("--teacher-hidden: given beside --teacher-logits; allowed: one of them");
  }
  if (a.steps && s.diverges()) {
    throw BadInput(fmt::format("--steps: given with --op {}; allowed: linear ops", s.op));
  }
}

void run_plan(const Context& context, PlanArguments& arguments) {
  OpShape& shape = arguments.shape;
  shape.dtype = parse_dtype(arguments.dtype);
  shape.grad_dtype = parse_dtype(arguments.grad_dtype);
  shape.grad_input = !arguments.no_grad_input;
  shape.grad_weight = !arguments.no_grad_weight;
  shape.kept = arguments.kept.value_or(0);
  check_shape_options(arguments);
  if (arguments.shards > 1) {
    if (shape.op != "linear-forward" && shape.op != "linear-backward") {
      throw BadInput(fmt::format(
          "--shards: given with --op {}; allowed: linear-forward, linear-backward", shape.op));
    }
    shape.vocab_total = shape.vocab;
    shape.vocab = divide_up(shape.vocab, arguments.shards);
  }
  if (arguments.threads > 0) logitless_set_num_threads(arguments.threads);
  const bool cuda = arguments.device == "cuda";
  const bool webgpu = arguments.device == "webgpu";
  if (arguments.steps && !cuda) {
    throw BadInput(fmt::format("--steps: given with --device {}; allowed: cuda", arguments.device));
  }
  json out = cuda     ? cuda_plan(shape, arguments.memory, arguments.steps)
             : webgpu ? webgpu_plan(shape, arguments.memory)
                      : gather(arguments);
  if (shape.vocab_total > 0) out["vocab_total"] = shape.vocab_total;
  describe_teacher(shape, &out);
  if (context.json) {
    print_json(out);
  } else if (cuda) {
    print_text(out, print_cuda_plan);
    if (arguments.steps) print_cuda_steps(out);
  } else if (webgpu) {
    print_text(out, print_webgpu_plan);
  } else {
    print_text(out, print_linear);
    print_parts(out);
  }
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  CLI::App* command =
      add_command(app, context, "plan", "how an op would run: chunks, workspace, work");
  auto arguments = std::make_shared<PlanArguments>();
  PlanArguments& a = *arguments;
  command->add_option("N", a.shape.tokens, "tokens")->required()->check(integer(0));
  command->add_option("D", a.shape.hidden, "hidden size; of no effect on ops of logits")
      ->required()
      ->check(integer(1));
  command->add_option("V", a.shape.vocab, "vocabulary")->required()->check(integer(1));
  std::vector<std::string> ops = kOpNames;
  ops.insert(ops.end(), kDivergenceNames.begin(), kDivergenceNames.end());
  command->add_option("--op", a.shape.op)->check(CLI::IsMember(ops))->capture_default_str();
  command->add_option("--device", a.device)->check(device_of("plan"))->capture_default_str();
  command->add_option("--dtype", a.dtype, "of input and weight, or of the logits")
      ->check(CLI::IsMember(kFloatDtypes))
      ->capture_default_str();
  command->add_option("--grad-dtype", a.grad_dtype, "of the gradients")
      ->check(CLI::IsMember(kFloatDtypes))
      ->capture_default_str();
  add_memory_option(*command, a.memory);
  command
      ->add_option_function<std::string>(
          "--kept", [&a](const std::string& text) { a.kept = parse_bytes(text, "--kept"); },
          "what a forward keeps for its backward, at most, e.g. 64MiB; default: nothing")
      ->type_name("SIZE");
  command
      ->add_option("--shards", a.shards,
                   "of linear-forward and linear-backward: the vocabulary is split over so many")
      ->check(integer(1, 1 << 16));
  command->add_option("--teacher-hidden", a.shape.teacher_hidden, "of divergences; default: D")
      ->check(integer(1));
  command->add_flag("--teacher-logits", a.shape.teacher_logits,
                    "of divergences: they are given in the place of the teacher's head");
  command->add_option("--threads", a.threads, "0: all that this process may use")
      ->check(integer(0, 1024));
  command->add_flag("--steps", a.steps, "with --device cuda: what the plan does, in its order");
  command->add_flag("--no-grad-input", a.no_grad_input, "frozen below the head");
  command->add_flag("--no-grad-weight", a.no_grad_weight, "frozen head");
  command->callback([&context, arguments] { run_plan(context, *arguments); });
}

}  // namespace logitless::cli
