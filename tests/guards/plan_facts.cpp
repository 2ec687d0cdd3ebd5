// SPDX-License-Identifier: Apache-2.0
#include "plan_facts.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "src/call.h"
#include "src/cpu/plan.h"
#include "src/cpu/thread_pool.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/linear/tiled/panels.h"
#include "src/cuda/linear/tiled/teams.h"
#include "src/cuda/rows/rows_plan.h"
#include "src/webgpu/cost.h"
#include "tests/support/executors.h"

namespace logitless::guards {
namespace {

constexpr int kThreads[] = {1, 2, 8};

// A list of key=value, without the usual values.
class Facts {
 public:
  void add(const std::string& key, const std::string& value, const std::string& usual = "") {
    if (value != usual) text_ += (text_.empty() ? "" : " ") + prefix + key + "=" + value;
  }
  void add(const std::string& key, int64_t value, int64_t usual = 0) {
    add(key, std::to_string(value), std::to_string(usual));
  }
  void add_bytes(const std::string& key, uint64_t value) { add(key, std::to_string(value)); }
  void add_number(const std::string& key, double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.9g", value);
    add(key, text);
  }
  const std::string& text() const { return text_; }
  std::string prefix;

 private:
  std::string text_;
};

// FNV-1a with 32 bits, over several numbers.
class Hash {
 public:
  Hash& operator<<(uint64_t value) {
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ (value >> 8 * i & 255)) * 16777619u;
    return *this;
  }
  std::string text() const {
    char text[16];
    std::snprintf(text, sizeof(text), "%08" PRIx32, hash_);
    return text;
  }

 private:
  uint32_t hash_ = 2166136261u;
};

std::string refused(const Status& status) {
  return "refused=" + std::to_string(static_cast<int>(status.code()));
}

// Part one: CUDA.

// Adds the panels of columns in the order in which the products take them: their number, and a hash
// of their positions.
void add_panels(const cuda::LinearShape& s, const cuda::LinearPlan& p, Facts* facts) {
  Hash hash;
  int64_t count = 0;
  const auto take = [&](const cuda::PanelPlace& at) {
    hash << at.first << at.columns << at.lent << at.copied;
    hash << (at.lent ? cuda::tiled::lent_offset(s, p, at) : -1);
    ++count;
  };
  const int64_t kept = cuda::kept_columns(p);
  for (cuda::PanelPlace at; at.end() < kept;) take(at = cuda::tiled::kept_part_at(s, p, at.end()));
  for (cuda::PanelPlace at{.columns = kept}; at.end() < s.vocab;) {
    take(at = cuda::tiled::panel_at(s, p, at.end()));
  }
  if (count > 1) facts->add("panels", std::to_string(count) + ":" + hash.text());
}

bool is_tiled(const cuda::Engine& engine) { return std::string_view(engine.name()) == "sm90"; }

// Adds a tiled engine's decisions, in the terms of docs/kernels.
void add_hopper(const cuda::LinearShape& s, const cuda::LinearPlan& p, Facts* facts) {
  const cuda::tiled::TiledPart& own = cuda::tiled::tiled_part(p);
  facts->add("options", !s.kernels.plain);
  facts->add("dz", forms_dz(s.kernels.kept) && cuda::kept_columns(p) > 0);
  facts->add("apart", cuda::tiled::works_apart(p));
  facts->add("unit", own.unit_width);
  facts->add("single", own.single_tiles);
  facts->add("slots", own.slots);
  facts->add("inputclusters", own.input_teams);
  facts->add("lent", p.lent_columns);
  facts->add("lentsums", p.lent_sum_rows);
  if (p.lent_columns > 0) {
    facts->add("copies", own.copies_lent, 1);
    facts->add("inputfirst", s.grad_input && !sums_grad_input(s, p));
  }
  if (s.gradients()) add_panels(s, p, facts);
}

void add_plan(const cuda::Engine& engine, const cuda::LinearShape& s, const cuda::LinearPlan& p,
              Facts* facts) {
  constexpr const char* kinds[] = {"loss", "whole", "chunks", "mixed", "frugal", "two"};
  facts->add("kind", kinds[static_cast<int>(p.kind)]);
  facts->add("on", engine.name());
  facts->add("chunk", p.token_chunk);
  facts->add("chunks", p.chunks, 1);
  facts->add("kept", p.stored_columns);
  facts->add("again", p.remade_columns);
  facts->add("weight", s.copies_weight ? "copy" : "own", "own");
  facts->add("input", lends_input(s, p) ? "lent" : p.copies_input ? "copy" : "own", "copy");
  const bool lent = is_tiled(engine) && cuda::tiled::tiled_part(p).lent_scaled >= 0;
  if (scales_apart(s, p)) facts->add("scaled", lent ? "lent" : "copy");
  facts->add("wsum", sums_grad_weight(s, p));
  facts->add("isum", sums_grad_input(s, p));
  facts->add("rowsums", p.sum_rows);
  facts->add("pitch", s.hidden_pitch(), s.hidden);
  facts->add("segments", p.segments);
  facts->add("rows", s.weight_rows);
  if (is_tiled(engine)) {
    add_hopper(s, p, facts);
  } else {
    facts->add("block", std::to_string(p.block_rows) + "x" + std::to_string(p.block_columns));
  }
  facts->add_bytes("bytes", p.bytes);
  facts->add_number("s", p.seconds);
}

// Plans as `run` does. A plan of two passes is two calls, each planned for the memory that the
// rows' states leave.
void add_linear(const cuda::Asked& asked, uint64_t bytes, Facts* facts) {
  const auto& [engine, s, speed] = asked;
  const cuda::LinearPlan p = asked.plan(bytes);
  if (p.kind != cuda::PlanKind::two_passes) return add_plan(engine, s, p, facts);
  facts->add("kind", "two");
  facts->add("first", p.first_rows, -1);
  facts->add_bytes("bytes", p.bytes);
  facts->add_number("s", p.seconds);
  int number = 0;
  for (const cuda::Planned& pass : cuda::passes(asked, bytes)) {
    facts->prefix = std::to_string(++number) + ".";
    add_plan(engine, pass.shape, pass.plan, facts);
  }
}

template <class Op>
void add_cuda(const Op& op, const Assumed& assumed, uint64_t bytes, Facts* facts) {
  const cuda::DeviceInfo* device = nullptr;
  if (!cuda::find_device(assumed.device.index, &device).ok()) return;
  if constexpr (LinearOp<Op>) {
    add_linear(cuda::asked_of(op, *device), bytes, facts);
  } else {
    // The kernel of a row decides by itself. Probabilities take another kernel, without a plan.
    if constexpr (LossOp<Op>) {
      if (op.options.input_kind == InputKind::probabilities) return;
    }
    const cuda::RowsPlan p =
        cuda::plan_rows(op.logits.shape[1], size_of(op.logits.dtype),
                        device->shared_bytes_per_block, device->has_clusters());
    facts->add("cluster", p.cluster);
    facts->add("threads", p.threads);
    facts->add("tile", p.tile);
    facts->add("tiles", p.tiles);
    facts->add("shared", p.shared_bytes);
  }
}

// Part two: the CPU.

// Named sets of CPU features on which a plan depends, independent of this machine's: AMX, AVX-512,
// AVX-512 with bf16 dot products, AVX2 and NEON.
struct NamedEngine {
  const char* name;
  bool well_known;
  cpu::Engine engine;
};
constexpr NamedEngine kEngines[] = {{"cpuamx", true, {cpu::Arithmetic::amx, 32, 32, 32, 2}},
                                    {"cpu512", true, {cpu::Arithmetic::f32, 8, 32, 1, 4}},
                                    {"cpudot", false, {cpu::Arithmetic::bf16_dot, 8, 32, 2, 2}},
                                    {"cpu256", false, {cpu::Arithmetic::f32, 8, 16, 1, 4}},
                                    {"cpu128", false, {cpu::Arithmetic::f32, 4, 12, 1, 4}}};

template <class Op>
cpu::LinearShape shape_on(const Op& op, const Assumed& assumed) {
  cpu::LinearShape shape = cpu::shape_of(op);
  for (const NamedEngine& e : kEngines) {
    if (assumed.name == e.name) shape.engine = e.engine;
  }
  return shape;
}

WorkspaceSize cpu_sizes(const cpu::LinearShape& shape, int threads) {
  const uint64_t minimum = plan_linear(shape, 0, 1).bytes;
  return {minimum, std::max(minimum, recommended_plan(shape, threads).bytes), 64};
}

Facts cpu_facts(const cpu::LinearShape& shape, const cpu::LinearPlan& p) {
  Facts facts;
  facts.add("kind", !shape.gradients() ? "loss" : p.stored ? "stored" : "again");
  facts.add("chunk", p.token_chunk);
  facts.add("chunks", p.chunks, 1);
  facts.add("tiles", p.vocab_tiles);
  facts.add("slots", p.slots);
  facts.add("depth", p.depth_block);
  facts.add("wsum", p.weight_sum);
  facts.add("hidden", std::to_string(p.padded_hidden_a) + "," + std::to_string(p.padded_hidden_b));
  facts.add_bytes("lane", p.lane_bytes);
  Hash places;
  places << p.tokens_at << p.states_at << p.gradients_at << p.blocks_at << p.logits_at
         << p.input_along_at << p.input_across_at << p.slots_at << p.weight_sum_at << p.bias_sum_at
         << p.lanes_at << p.weight_block_at << p.tile_at << p.along_vocab_at << p.along_tokens_at
         << p.weight_panels_at << p.product_at << p.rows_at << p.bias_at << p.class_weight_at;
  facts.add("places", places.text());
  facts.add_number("cost", p.cost);
  return facts;
}

// Adds what does not depend on the number of threads, then lanes and bytes for each number.
template <class Op>
void add_cpu(const Op& op, const Assumed& assumed, uint64_t bytes, std::string* text) {
  if constexpr (LinearOp<Op>) {
    const cpu::LinearShape shape = shape_on(op, assumed);
    std::string lanes, used;
    for (const int threads : kThreads) {
      const cpu::LinearPlan p = plan_linear(shape, bytes, threads);
      const std::string same = cpu_facts(shape, p).text();
      if (text->empty()) *text = same;
      if (*text != same) *text += " threads=" + std::to_string(threads) + " " + same;
      lanes += (lanes.empty() ? "" : ",") + std::to_string(p.lanes);
      used += (used.empty() ? "" : ",") + std::to_string(p.bytes);
    }
    *text += " lanes=" + lanes + " bytes=" + used;
  }
}

// Part three: WebGPU.

webgpu::Limits limits_of(const Assumed& assumed) {
  if (assumed.device.index == 0) return {};
  return {.buffer_bytes = uint64_t{1} << 34,
          .storage_binding_bytes = (uint64_t{1} << 32) - 4,
          .storage_buffers = 16,
          .workgroup_bytes = 49152,
          .workgroup_invocations = 1024};
}

// Returns the tiles of a chunk's and a window's products: logits, grad_input and grad_weight.
std::string tiles_of(const webgpu::Problem& problem, const webgpu::Plan& p) {
  const auto text = [](const webgpu::Tile& t) {
    return std::string(t.small ? "small" : "") + std::to_string(t.m) + "x" + std::to_string(t.n);
  };
  std::string all = text(webgpu::tile_of(p.chunk, p.window, problem.hidden, true));
  if (problem.wants_grad_input) {
    all += ",i" + text(webgpu::tile_of(p.chunk, problem.hidden, p.window, false));
  }
  if (problem.wants_grad_weight) {
    all += ",w" + text(webgpu::tile_of(p.window, problem.hidden, p.chunk, false));
  }
  return all;
}

void add_webgpu(const webgpu::Problem& problem, const webgpu::Limits& limits, uint64_t bytes,
                Facts* facts) {
  webgpu::Plan p;
  if (!make_plan(problem, limits, bytes, &p).ok()) return;
  facts->add("kind", p.plain ? "plain" : p.whole ? "whole" : "windows");
  facts->add("chunk", p.chunk);
  facts->add("chunks", p.chunks, 1);
  facts->add("window", p.window);
  facts->add("windows", p.windows, 1);
  facts->add("slots", p.slots);
  facts->add("slices", p.slices, 1);
  facts->add("products", p.products);
  if (problem.linear) facts->add("tiles", tiles_of(problem, p));
  facts->add_bytes("block", p.window_bytes);
  Hash roles;
  for (size_t i = 0; i < p.bytes.size(); ++i) {  // the last ones only for divergences
    if (i <= static_cast<size_t>(webgpu::Role::grad_bias) || p.bytes[i] > 0) roles << p.bytes[i];
  }
  facts->add("roles", roles.text());
  facts->add_bytes("bytes", p.total);
  facts->add_number("us", predicted_microseconds(problem, p));
}

// Last part: all devices.

// Calls the library's public `workspace`.
template <class Op>
Status public_sizes(const Op& op, const Assumed& assumed, int threads, WorkspaceSize* size) {
  const conformance::SerialExecutor executor(threads);
  return workspace(op, {.device = assumed.device, .executor = executor.get()}, size);
}

template <class Op>
Status sizes_on(const Op& op, const Assumed& assumed, int threads, WorkspaceSize* size) {
  if (assumed.device.type == DeviceType::webgpu) {
    const webgpu::Problem problem =
        webgpu::problem_of(logitless::Call(op, {.device = assumed.device}));
    return workspace_sizes(problem, limits_of(assumed), &size->minimum, &size->recommended);
  }
  if constexpr (LinearOp<Op>) {
    if (assumed.device.type == DeviceType::cpu) {
      *size = cpu_sizes(shape_on(op, assumed), threads);
      return {};
    }
  }
  return public_sizes(op, assumed, threads, size);
}

}  // namespace

std::vector<Assumed> assumed_devices() {
  std::vector<Assumed> all = assumed_cuda_devices();
  for (const NamedEngine& e : kEngines) {
    all.push_back({e.name, {DeviceType::cpu, 0}, "", e.well_known});
  }
  all.push_back({"webgpu", {DeviceType::webgpu, 0}});
  all.push_back({"webgpularge", {DeviceType::webgpu, 1}});
  return all;
}

Sizes sizes_of(const AnyOp& op, const Assumed& assumed) {
  return std::visit(
      [&](const auto& typed) -> Sizes {
        Sizes out;
        std::string recommended, before;
        for (const int threads : kThreads) {
          WorkspaceSize size{};
          const Status status = sizes_on(typed, assumed, threads, &size);
          if (!status.ok()) return {.text = refused(status)};
          const std::string now = std::to_string(size.recommended);
          if (now != before) recommended += (before.empty() ? "" : ",") + now;
          before = now;
          out.minimum = size.minimum, out.recommended = size.recommended;
          if (assumed.device.type != DeviceType::cpu) break;
        }
        out.ok = true;
        out.text = "min=" + std::to_string(out.minimum) + " rec=" + recommended;
        return out;
      },
      op);
}

std::string decision_of(const AnyOp& op, const Assumed& assumed, uint64_t bytes) {
  return std::visit(
      [&](const auto& typed) {
        Facts facts;
        std::string text;
        switch (assumed.device.type) {
          case DeviceType::cuda:
            add_cuda(typed, assumed, bytes, &facts);
            break;
          case DeviceType::webgpu:
            add_webgpu(webgpu::problem_of(logitless::Call(typed, {.device = assumed.device})),
                       limits_of(assumed), bytes, &facts);
            break;
          default:
            add_cpu(typed, assumed, bytes, &text);
            return text;
        }
        return facts.text();
      },
      op);
}

std::string check_sizes(const AnyOp& op) {
  return std::visit(
      [&]<class Op>(const Op& typed) -> std::string {
        for (const int threads : kThreads) {
          const Assumed here{"here", {DeviceType::cpu, 0}};
          WorkspaceSize size{}, planned{};
          const Status status = public_sizes(typed, here, threads, &size);
          if (!status.ok()) return status.message();
          if (!sizes_on(typed, here, threads, &planned).ok()) return "no sizes";
          if (planned.minimum != size.minimum || planned.recommended != size.recommended) {
            return "workspace() says " + std::to_string(size.minimum) + " and " +
                   std::to_string(size.recommended) + ", the planner " +
                   std::to_string(planned.minimum) + " and " + std::to_string(planned.recommended);
          }
        }
        return "";
      },
      op);
}

}  // namespace logitless::guards
