// SPDX-License-Identifier: Apache-2.0
// logitless bench: the time of ops over a sweep of shapes, compared with the machine's peak rates,
// all measured in this run. FLOP counts the products that every plan needs (one that recomputes the
// logits does more); bytes are those of the head, or of given logits.
#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <memory>

#include "cli/bench_case.h"
#include "cli/bench_gpu.h"
#include "cli/chart.h"
#include "cli/commands.h"
#include "cli/first_call.h"
#include "cli/output_file.h"
#include "cli/probe.h"
#include "cli/progress.h"
#include "cli/text.h"
#include "src/cpu/dispatch.h"
#include "src/cpu/gemm.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

struct BenchArguments {
  std::vector<std::string> ops{"linear-forward-backward"}, dtypes{"f32"}, memories;
  std::vector<int64_t> tokens{1024}, hidden{768}, vocab{50257}, threads{0};
  std::string device = "cpu", grad_dtype = "f32", chart;
  int repeats = 5, samples = 2;
  bool in_place = false, first_call = false, warmup = false, quick = false;
};

// Makes the sweep one small shape with few repeats, except for options given on the command line.
void make_quick(BenchArguments& a, const CLI::App& command) {
  const auto set = [&](const char* name, auto& value, auto quick) {
    if (command.count(name) == 0) value = quick;
  };
  set("--n", a.tokens, std::vector<int64_t>{512});
  set("--d", a.hidden, std::vector<int64_t>{128});
  set("--v", a.vocab, std::vector<int64_t>{32768});
  set("--repeats", a.repeats, 2);
}

struct Case {
  OpShape shape;
  int threads = 0;
  std::optional<uint64_t> memory;
};

// The best rates seen in this run, for one number of threads.
struct Machine {
  double fma = 0, bf16_dot = 0, amx = 0;  // FLOP/s; 0: none
  Bandwidth bandwidth;
};

struct Row {
  Case c;
  int threads = 0;
  cpu::Arithmetic arithmetic = cpu::Arithmetic::f32;
  Measurement m;
  Machine machine;
  const GpuBench* gpu = nullptr;  // null: the CPU is measured

  double flops() const;
  uint64_t logits_bytes() const;
  double bytes() const;
  bool writes() const { return c.shape.op != "linear-forward" && c.shape.op != "forward"; }
  double peak() const;  // FLOP/s
  double bandwidth() const { return writes() ? machine.bandwidth.copy : machine.bandwidth.read; }
  double rate() const { return flops() / m.median(); }
  double throughput() const { return bytes() / m.median(); }
};

double Row::flops() const {
  const OpShape& s = c.shape;
  if (!s.linear()) return 0;
  const int products = s.op == "linear-forward" ? 1 : 3;
  return 2.0 * products * static_cast<double>(s.tokens) * static_cast<double>(s.vocab) *
         static_cast<double>(s.hidden);
}

// The bytes of all logits in f32.
uint64_t Row::logits_bytes() const {
  return static_cast<uint64_t>(c.shape.tokens) * static_cast<uint64_t>(c.shape.vocab) *
         sizeof(float);
}

double Row::bytes() const {
  const OpShape& s = c.shape;
  const auto elements =
      static_cast<double>(s.vocab) * static_cast<double>(s.linear() ? s.hidden : s.tokens);
  return elements * static_cast<double>(size_of(s.dtype) + (writes() ? size_of(s.grad_dtype) : 0));
}

double Row::peak() const {
  switch (arithmetic) {
    case cpu::Arithmetic::bf16_dot:
      return machine.bf16_dot;
    case cpu::Arithmetic::amx:
      return machine.amx;
    case cpu::Arithmetic::f32:
      break;
  }
  return machine.fma;
}

std::vector<Case> cases(const BenchArguments& a) {
  std::vector<std::optional<uint64_t>> memories;
  for (const std::string& text : a.memories) memories.push_back(parse_bytes(text, "--memory"));
  if (memories.empty()) memories.emplace_back();
  std::vector<Case> all;
  // The two innermost loops reuse the tensors.
  for (const int64_t n : a.tokens)
    for (const int64_t d : a.hidden)
      for (const int64_t v : a.vocab)
        for (const std::string& dtype : a.dtypes)
          for (const std::string& op : a.ops)
            for (const int64_t threads : a.threads)
              for (const auto& memory : memories) {
                OpShape shape{.op = op,
                              .tokens = n,
                              .hidden = d,
                              .vocab = v,
                              .dtype = parse_dtype(dtype),
                              .grad_dtype = parse_dtype(a.grad_dtype)};
                shape.in_place = a.in_place && !shape.linear() && op != "forward";
                if (shape.in_place) shape.grad_dtype = shape.dtype;
                all.push_back({shape, static_cast<int>(threads), memory});
              }
  return all;
}

// Refuses shapes that do not fit in memory, before the system kills the process. For a GPU the host
// holds a copy of the tensors, and the device the tensors and the workspace; the same sum is asked
// of both, to be safe.
void check_fits(const Case& c, const GpuBench* gpu) {
  uint64_t needed = with_op(c.shape.op, [&](auto op) {
    uint64_t bytes = 0;
    // Fake addresses, aligned and disjoint, because the plan for null pointers may differ. Nothing
    // is read.
    uintptr_t address = uintptr_t{1} << 32;
    set_views(op, c.shape, [&](const char*, TensorView view) {
      bytes += bytes_of(view);
      if (gpu != nullptr) view.data = reinterpret_cast<void*>(address);
      address += (bytes_of(view) + 511) / 256 * 256;
      return view;
    });
    WorkspaceSize size;
    if (gpu != nullptr) {
      size = gpu->size(op);
    } else {
      check(workspace(op, {}, &size));
    }
    return bytes + c.memory.value_or(size.recommended);
  });
  const uint64_t host = available_memory();
  const uint64_t available = gpu != nullptr ? std::min(host, gpu->free_bytes()) : host;
  if (needed > available) {
    throw BadInput(fmt::format("{} N {} D {} V {} needs {}; {} are available", c.shape.op,
                               c.shape.tokens, c.shape.hidden, c.shape.vocab, format_bytes(needed),
                               format_bytes(available)));
  }
}

json to_json(const Row& row) {
  const OpShape& s = row.c.shape;
  const Measurement& m = row.m;
  json out = {{"op", s.op},
              {"tokens", s.tokens},
              {"vocab", s.vocab},
              {"dtype", name_of(s.dtype)},
              {"grad_dtype", name_of(s.grad_dtype)},
              {"in_place", s.in_place},
              {"threads", row.threads},
              {"device", row.gpu == nullptr ? "cpu" : row.gpu->name()},
              {"isa", row.gpu == nullptr ? json(cpu::target_name()) : json()},
              {"repeats", m.seconds.size()},
              {"ms_median", m.median() * 1e3},
              {"ms_min", m.best() * 1e3},
              {"gbytes_per_second", row.throughput() * 1e-9},
              {"bandwidth_gbytes_per_second", row.bandwidth() * 1e-9},
              {"bandwidth_share", row.throughput() / row.bandwidth()},
              {"workspace_bytes", m.workspace},
              {"workspace_minimum", m.size.minimum},
              {"workspace_recommended", m.size.recommended},
              {"rss_growth_bytes", m.rss_growth ? json(*m.rss_growth) : json()},
              {"error_ratio", m.error_ratio ? json(*m.error_ratio) : json()}};
  if (s.linear()) {
    out["hidden"] = s.hidden;
    out["logits_bytes"] = row.logits_bytes();
    out["arithmetic"] = row.gpu == nullptr ? cpu::name_of(row.arithmetic) : row.gpu->arithmetic();
    out["gflops"] = row.rate() * 1e-9;
    out["peak_gflops"] = row.peak() * 1e-9;
    out["peak_share"] = row.rate() / row.peak();
  }
  return out;
}

constexpr const char* kLine =
    "{:<24} {:>5} {:>6} {:>5} {:>6} {:>3} {:>9} {:>9} {:>8} {:>6} {:>7} "
    "{:>6} {:>10} {:>10} {:>10} {:>7}\n";

void print_head() {
  fmt::print(kLine, "op", "dtype", "N", "D", "V", "thr", "ms median", "ms min", "GFLOP/s", "% peak",
             "GB/s", "% mem", "logits", "workspace", "RSS grew", "err/bnd");
}

std::string percent(double share) { return fmt::format("{:.1f}", share * 100); }

void print_row(const Row& row) {
  const OpShape& s = row.c.shape;
  const Measurement& m = row.m;
  fmt::print(
      kLine, s.op, name_of(s.dtype), s.tokens, s.linear() ? std::to_string(s.hidden) : "-", s.vocab,
      row.threads, fmt::format("{:.3f}", m.median() * 1e3), fmt::format("{:.3f}", m.best() * 1e3),
      s.linear() ? fmt::format("{:.1f}", row.rate() * 1e-9) : "-",
      s.linear() ? percent(row.rate() / row.peak()) : "-",
      fmt::format("{:.1f}", row.throughput() * 1e-9), percent(row.throughput() / row.bandwidth()),
      s.linear() ? format_bytes(row.logits_bytes()) : "-", format_bytes(m.workspace),
      m.rss_growth ? format_bytes(*m.rss_growth) : "-",
      m.error_ratio ? fmt::format("{:.3f}", *m.error_ratio) : "-");
  std::fflush(stdout);
}

Chart make_chart(const std::vector<Row>& rows) {
  const GpuBench* gpu = rows.empty() ? nullptr : rows[0].gpu;
  Chart chart{.title = "logitless bench: share of what this machine can do",
              .subtitle = fmt::format("{}, measured in the same run",
                                      gpu == nullptr ? cpu::target_name() : gpu->name()),
              .legend = {"f32 FMA peak", "bf16 dot peak", "AMX peak", "memory bandwidth"},
              .bars = {}};
  if (gpu != nullptr) chart.legend = {"f32 product", "16-bit product", "-", "copy bandwidth"};
  for (const Row& row : rows) {
    const OpShape& s = row.c.shape;
    const bool products = s.linear();
    std::string label = fmt::format("{} {}, N {}", s.op, name_of(s.dtype), s.tokens);
    if (s.linear()) label += fmt::format(" D {}", s.hidden);
    label += fmt::format(" V {}, {} thr", s.vocab, row.threads);
    if (row.c.memory) label += ", " + format_bytes(*row.c.memory);
    const double share = products ? row.rate() / row.peak() : row.throughput() / row.bandwidth();
    const std::string rate = products ? fmt::format("{:.0f} GFLOP/s", row.rate() * 1e-9)
                                      : fmt::format("{:.1f} GB/s", row.throughput() * 1e-9);
    chart.bars.push_back(
        {.label = label,
         .note = fmt::format("{:.0f} %, {}, {:.3g} ms", share * 100, rate, row.m.median() * 1e3),
         .share = share,
         .group = products ? static_cast<int>(row.arithmetic) : 3});
  }
  return chart;
}

// Probes every rate once, then before each measurement the rate of its products again: the best
// counts, in case the machine was slow at first.
void probe(Machine& machine, cpu::Arithmetic arithmetic) {
  constexpr int kFirst = 5, kAgain = 2;
  const bool first = machine.fma == 0;
  if (first) machine.bandwidth = probe_bandwidth();
  const auto measure = [&](cpu::Arithmetic of, double& best, auto loop) {
    if (first || of == arithmetic) best = std::max(best, loop(first ? kFirst : kAgain));
  };
  measure(cpu::Arithmetic::bf16_dot, machine.bf16_dot, probe_bf16_dot);
  measure(cpu::Arithmetic::amx, machine.amx, probe_amx);
  measure(cpu::Arithmetic::f32, machine.fma, probe_fma);
}

void print_machine(int threads, const Machine& m) {
  const auto peak = [](double flops) {
    return flops > 0 ? fmt::format("{:.1f} GFLOP/s", flops * 1e-9) : "none";
  };
  fmt::print(
      "\nmachine, {} threads: f32 FMA {}, bf16 dot {}, AMX {}, read {:.1f} GB/s, "
      "copy {:.1f} GB/s\n",
      threads, peak(m.fma), peak(m.bf16_dot), peak(m.amx), m.bandwidth.read * 1e-9,
      m.bandwidth.copy * 1e-9);
}

// Other implementations are measured by scripts that use PyTorch: our own products with whole
// logits would be a baseline that nobody uses.
void print_peers(const std::string& device, const std::vector<Row>& rows) {
  if (std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.c.shape.linear(); })) {
    fmt::print(
        "logits: theirs in f32, which a plain implementation holds, and as much for their "
        "gradient\n");
  }
  if (device == "webgpu") return;
  fmt::print("PyTorch and others beside it: {}, or docs/results.md\n",
             device == "cuda" ? "python bench/compare_gpu.py" : "make bench-cpu");
}

// Measures the GPU's product rates in f32 and bf16, and its copy bandwidth, once.
Machine probe_gpu(GpuBench& gpu) {
  Machine machine;
  machine.bandwidth.read = machine.bandwidth.copy = gpu.copy_bandwidth();
  machine.fma = gpu.product_rate(DType::f32);
  machine.bf16_dot = gpu.product_rate(DType::bf16);
  return machine;
}

void print_gpu(const GpuBench& gpu, const Machine& m) {
  fmt::print("\nmachine, {}: product f32 {:.1f} TFLOP/s, bf16 {:.1f} TFLOP/s, copy {:.0f} GB/s\n",
             gpu.name(), m.fma * 1e-12, m.bf16_dot * 1e-12, m.bandwidth.copy * 1e-9);
}

void run_bench(const Context& context, const BenchArguments& a) {
  const std::vector<Case> all = cases(a);
  if (a.first_call) {
    if (a.device != "cuda") throw BadInput("--first-call: of --device cuda alone");
    if (all.size() != 1) throw BadInput("--first-call: one op, dtype and shape; given: several");
    return run_first_call(context, all[0].shape, a.warmup);
  }
  std::unique_ptr<GpuBench> gpu;
  if (a.device == "cuda") gpu = make_cuda_bench();
  if (a.device == "webgpu") gpu = make_webgpu_bench();
  GpuBench* const device = gpu.get();
  for (const Case& c : all) check_fits(c, device);
  const std::unique_ptr<OutputFile> chart =
      std::move(open_outputs({{"--chart", a.chart}}, {}).front());
  Progress progress(static_cast<int64_t>(all.size()) * (a.repeats + 1));
  Tensors tensors;
  std::map<int, Machine> machines;
  std::vector<Row> rows;
  if (device != nullptr) machines[0] = probe_gpu(*device);
  for (const Case& c : all) {
    Row row{.c = c, .m = {}, .machine = {}};
    if (device == nullptr) {
      row.threads = logitless_set_num_threads(c.threads);
      row.arithmetic = cpu::choose_engine(c.shape.dtype).arithmetic;
      probe(machines[row.threads], row.arithmetic);
    } else {
      row.gpu = device;
      if (c.shape.dtype != DType::f32) row.arithmetic = cpu::Arithmetic::bf16_dot;
    }
    row.m = measure(
        c.shape, {.memory = c.memory, .repeats = a.repeats, .gpu = device, .samples = a.samples},
        tensors, [&](int run) {
          progress.update(static_cast<int64_t>(rows.size()) * (a.repeats + 1) + run,
                          fmt::format("{} {} N {} V {}", c.shape.op, name_of(c.shape.dtype),
                                      c.shape.tokens, c.shape.vocab));
        });
    row.machine = machines[row.threads];
    rows.push_back(row);
    progress.clear();
    if (context.json) {
      print_json(to_json(row));
      std::fflush(stdout);
    } else {
      if (rows.size() == 1) print_head();  // if all are refused, no table is printed
      print_row(row);
    }
  }
  if (!context.json) {
    for (const auto& [threads, machine] : machines) {
      if (device == nullptr) print_machine(threads, machine);
      if (device != nullptr) print_gpu(*device, machine);
    }
    print_peers(a.device, rows);
  }
  if (chart) {
    chart->write(to_svg(make_chart(rows)));
    chart->commit();
  }
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* command =
      add_command(app, context, "bench", "times ops over a sweep, beside what the machine can do");
  auto arguments = std::make_shared<BenchArguments>();
  BenchArguments& a = *arguments;
  const auto list = [&](const char* name, auto& values, const char* text) {
    return command->add_option(name, values, text)->delimiter(',')->capture_default_str();
  };
  command->add_option("--device", a.device)->check(device_of("bench"))->capture_default_str();
  list("--op", a.ops, "ops, each")->check(CLI::IsMember(kOpNames));
  list("--dtype", a.dtypes, "f32, f16, bf16")->check(CLI::IsMember(kFloatDtypes));
  list("--n", a.tokens, "tokens")->check(integer(1));
  list("--d", a.hidden, "hidden sizes")->check(integer(1));
  list("--v", a.vocab, "vocabularies")->check(integer(1));
  list("--threads", a.threads, "0: all that this process may use")->check(integer(0, 1024));
  list("--memory", a.memories, "workspaces, e.g. 16MiB,64MiB; default: the recommended");
  command->add_option("--grad-dtype", a.grad_dtype, "of the gradients")
      ->check(CLI::IsMember(kFloatDtypes))
      ->capture_default_str();
  command->add_flag("--in-place", a.in_place, "gradients of given logits over the logits");
  CLI::Option* first = command->add_flag("--first-call", a.first_call,
                                         "what a fresh process pays for its first call on CUDA");
  command->add_flag("--warmup", a.warmup, "which comes after a warmup")->needs(first);
  command->add_option("--repeats", a.repeats)->check(integer(1, 1000))->capture_default_str();
  command->add_option("--samples", a.samples, "tokens and vocabulary rows judged; 0: none")
      ->check(integer(0, 64))
      ->capture_default_str();
  command->add_flag("--quick", a.quick, "one small shape, twice, but for what is named");
  command->add_option("--chart", a.chart, "write an SVG chart to this file");
  command->callback([&context, arguments, command] {
    if (arguments->quick) make_quick(*arguments, *command);
    run_bench(context, *arguments);
  });
}

}  // namespace logitless::cli
