// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "cli/bench_judge.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

// In elements: 1 GiB, since the reference holds the head in double.
constexpr int64_t kLargestJudgedHead = int64_t{1} << 27;

// Fills the buffer with normal numbers: blocks from random places of one table, so that gigabytes
// are filled at the speed of memory.
void fill_normal(const Buffer& buffer, DType dtype, double scale) {
  constexpr size_t kTable = 1 << 18, kBlock = 4096;  // elements
  std::mt19937_64 random(42);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  const auto element = static_cast<size_t>(size_of(dtype));
  std::vector<std::byte> table((kTable + kBlock) * element);
  for (size_t i = 0; i < kTable + kBlock; ++i) {
    const float value = normal(random);
    if (dtype == DType::f32) {
      std::memcpy(&table[i * element], &value, element);
    } else {
      const uint16_t bits =
          dtype == DType::f16 ? reference::round_to_f16(value) : reference::round_to_bf16(value);
      std::memcpy(&table[i * element], &bits, element);
    }
  }
  for (uint64_t at = 0; at < buffer.bytes(); at += kBlock * element) {
    const size_t from = random() % kTable;
    std::memcpy(buffer.as<std::byte>() + at, &table[from * element],
                std::min<uint64_t>(kBlock * element, buffer.bytes() - at));
  }
}

void fill(const std::string& name, const TensorView& view, int64_t vocab, const Buffer& buffer) {
  if (name == "target") {
    std::mt19937_64 random(43);
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      buffer.as<int64_t>()[i] = static_cast<int64_t>(random() % static_cast<uint64_t>(vocab));
    }
  } else if (name == "input") {
    fill_normal(buffer, view.dtype, 1);
  } else if (name == "weight") {
    fill_normal(buffer, view.dtype, 1 / std::sqrt(static_cast<double>(view.shape[1])));
  } else if (name == "logits") {
    fill_normal(buffer, view.dtype, 1);
  } else if (buffer.bytes() > 0) {
    std::memset(buffer.data(), 0, buffer.bytes());
  }
}

// Returns the bytes of a line of /proc/self/status.
std::optional<uint64_t> process_memory(const std::string& wanted) {
  std::ifstream file("/proc/self/status");
  for (std::string key; file >> key;) {
    uint64_t kibibytes;
    if (key == wanted && file >> kibibytes) return kibibytes << 10;
    file.ignore(1024, '\n');
  }
  return {};
}

// Returns the peak growth of the process's memory during `work`.
template <class F>
std::optional<uint64_t> rss_growth(F&& work) {
  bool reset;
  {
    std::ofstream file("/proc/self/clear_refs");
    file << "5" << std::flush;  // resets the peak
    reset = file.good();
  }
  const std::optional<uint64_t> before = process_memory("VmRSS:");
  work();
  const std::optional<uint64_t> peak = process_memory("VmHWM:");
  if (!reset || !before || !peak) return {};
  return *peak > *before ? *peak - *before : 0;
}

double timed(const auto& op, const Buffer& scratch) {
  const auto start = std::chrono::steady_clock::now();
  check(run(op, scratch.workspace(), {}));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class Op>
WorkspaceSize size_of_workspace(const Op& op, const MeasureOptions& options) {
  if (options.gpu != nullptr) return options.gpu->size(op);
  WorkspaceSize size;
  check(workspace(op, {}, &size));
  return size;
}

template <class Op>
void run_recommended(const Op& op, GpuBench* gpu) {
  if (gpu != nullptr) {
    gpu->timed(op, gpu->size(op).recommended, true);
    return;
  }
  WorkspaceSize size;
  check(workspace(op, {}, &size));
  timed(op, Buffer(size.recommended));
}

template <class Op>
Op make_op(const OpShape& shape, Tensors& tensors) {
  Op op;
  set_views(op, shape, [&](const char* name, const TensorView& view) {
    return tensors.get(name, view, shape.vocab);
  });
  return op;
}

// Prepares the row state that Backward reads, by a Forward on the same tensors.
template <class Op>
void prepare_state(const OpShape& shape, Tensors& tensors, GpuBench* gpu) {
  if constexpr (BackwardOnlyOp<Op>) {
    OpShape forward = shape;
    if constexpr (LinearOp<Op>) {
      forward.op = "linear-forward";
      run_recommended(make_op<LinearCrossEntropyForward>(forward, tensors), gpu);
    } else {
      forward.op = "forward";
      run_recommended(make_op<CrossEntropyForward>(forward, tensors), gpu);
    }
  }
}

// Starts the threads and loads the code, so that only the op's memory grows afterwards.
template <class Op>
void warm_up(OpShape shape) {
  shape.tokens = 64;
  shape.hidden = 64;
  shape.vocab = 1024;
  Tensors tensors;
  prepare_state<Op>(shape, tensors, nullptr);
  run_recommended(make_op<Op>(shape, tensors), nullptr);
}

// The rows of logits that judge() needs, saved before the run overwrites them.
struct SavedRows {
  TensorView view{};
  Buffer buffer;
};

template <class Op>
SavedRows save_rows(const Op& op, int64_t count) {
  SavedRows saved;
  if constexpr (!LinearOp<Op>) {
    const TensorView rows = sample_rows(op.logits, std::min(count, op.logits.shape[0]));
    saved.buffer = Buffer(bytes_of(rows));
    saved.view = matrix_view(saved.buffer.data(), rows.dtype, rows.shape[0], rows.shape[1]);
    const auto bytes = static_cast<uint64_t>(rows.shape[1] * size_of(rows.dtype));
    for (int64_t i = 0; i < rows.shape[0]; ++i) {
      std::memcpy(saved.buffer.as<std::byte>() + static_cast<uint64_t>(i) * bytes,
                  rows.as<const std::byte>() + i * rows.stride[0] * size_of(rows.dtype), bytes);
    }
  }
  return saved;
}

template <class Op>
std::optional<double> error_ratio(const Op& op, const OpShape& shape, Tensors& tensors, int samples,
                                  const SavedRows& saved, bool tensor_cores) {
  if (samples == 0 || (shape.linear() && shape.vocab > kLargestJudgedHead / shape.hidden)) {
    return {};
  }
  const TensorView row = vector_view(nullptr, DType::f32, shape.tokens);
  return judge(op, tensors.get("row_reference", row, 0), tensors.get("row_log_sum", row, 0),
               samples, saved.view, {.tensor_cores = tensor_cores});
}

}  // namespace

TensorView Tensors::get(const std::string& name, TensorView view, int64_t vocab) {
  Entry& entry = entries_[name];
  const bool same = entry.view.rank == view.rank && entry.view.dtype == view.dtype &&
                    entry.view.shape == view.shape && (vocab == 0 || entry.vocab == vocab);
  if (!same) {
    entry = {};
    entry.buffer = Buffer(bytes_of(view));
    fill(name, view, vocab, entry.buffer);
    view.data = entry.buffer.data();
    entry.view = view;
    entry.vocab = vocab;
  }
  return entry.view;
}

void Tensors::forget(const std::string& name) { entries_.erase(name); }

double Measurement::median() const {
  const size_t middle = seconds.size() / 2;
  return seconds.size() % 2 == 1 ? seconds[middle] : (seconds[middle - 1] + seconds[middle]) / 2;
}

Measurement measure(const OpShape& shape, const MeasureOptions& options, Tensors& tensors,
                    const std::function<void(int)>& tick) {
  return with_op(shape.op, [&](auto unset) {
    using Op = decltype(unset);
    tick(0);
    const Op op = make_op<Op>(shape, tensors);
    Measurement m;
    GpuBench* const gpu = options.gpu;
    if (gpu != nullptr) gpu->forget();
    m.size = size_of_workspace(op, options);
    m.workspace = options.memory.value_or(m.size.recommended);
    check_memory(m.workspace, m.size);
    if (gpu == nullptr) warm_up<Op>(shape);
    prepare_state<Op>(shape, tensors, gpu);
    const SavedRows saved = save_rows(op, options.samples);
    const Buffer scratch(gpu == nullptr ? m.workspace : 0);
    if (gpu == nullptr) {
      m.rss_growth = rss_growth([&] { timed(op, scratch); });
    } else {
      gpu->timed(op, m.workspace, true);
    }
    // Linear ops multiply 16-bit inputs on tensor cores, as in tests/support/device_cuda.cpp.
    const bool tensor_cores =
        gpu != nullptr && gpu->has_tensor_cores() && shape.linear() && shape.dtype != DType::f32;
    m.error_ratio = error_ratio(op, shape, tensors, options.samples, saved, tensor_cores);
    for (int i = 0; i < options.repeats; ++i) {
      tick(i + 1);
      m.seconds.push_back(gpu == nullptr ? timed(op, scratch) : gpu->timed(op, m.workspace, false));
    }
    std::sort(m.seconds.begin(), m.seconds.end());
    if (shape.in_place) tensors.forget("logits");
    return m;
  });
}

}  // namespace logitless::cli
