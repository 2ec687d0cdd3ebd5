// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend on this machine's adapter, as JSON lines: its three tiled products alone, the
// linear op with gradients beside them, cross_entropy in place beside a copy. Least of several
// times, each of enough calls to outlast the submission.
//   logitless_webgpu_bench [--quick] [--peak TFLOPS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "logitless/webgpu.h"
#include "src/webgpu/native.h"
#include "src/webgpu/run.h"

using namespace logitless;
using namespace logitless::webgpu;
using nlohmann::json;

namespace {

NativeDevice* device = nullptr;

void check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message());
  std::exit(1);
}

// Seconds of one call of f, which records and submits.
double seconds(const std::function<void()>& f, int repeats = 5) {
  f();
  device->wait();
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    int calls = 0;
    const auto start = std::chrono::steady_clock::now();
    double took = 0;
    do {
      f();
      ++calls;
      if (calls % 4 == 0 || calls == 1) {
        device->wait();
        took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }
    } while (took < 0.1);
    device->wait();
    took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::min(best, took / calls);
  }
  return best;
}

Buffer filled(uint64_t floats, float scale) {
  const Buffer buffer = device->create_buffer(floats * 4);
  if (buffer == 0) {
    std::fprintf(stderr, "no buffer of %llu floats: %s\n", static_cast<unsigned long long>(floats),
                 device->error());
    std::exit(1);
  }
  std::vector<float> piece(1 << 20);
  uint32_t state = 1;
  for (float& x : piece) {
    state = state * 1664525u + 1013904223u;
    x = scale * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
  }
  for (uint64_t at = 0; at < floats; at += piece.size()) {
    device->write(buffer, at * 4, piece.data(), std::min<uint64_t>(piece.size(), floats - at) * 4);
  }
  device->submit();
  return buffer;
}

TensorView view_of(Buffer buffer, DType dtype, int32_t rank, int64_t rows, int64_t columns) {
  TensorView v{.data = reinterpret_cast<void*>(buffer), .dtype = dtype, .rank = rank};
  v.device = {DeviceType::webgpu, 0};
  v.shape = {rows, columns};
  v.stride = {rank == 2 ? columns : 1, rank == 2 ? 1 : 0};
  return v;
}

Buffer targets(int64_t tokens, int64_t vocab) {
  std::vector<int32_t> values(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) values[i] = static_cast<int32_t>(i * 7919 % vocab);
  const Buffer buffer = device->create_buffer(static_cast<uint64_t>(tokens) * 4);
  device->write(buffer, 0, values.data(), values.size() * 4);
  return buffer;
}

// One of the three products of rows x columns x depth with a tile, by itself.
double product(const char* tile, int64_t edge, bool a_transposed, bool b_transposed, int64_t rows,
               int64_t columns, int64_t depth, Buffer a, Buffer b, Buffer result) {
  ProductParams p{.rows = static_cast<uint32_t>(rows),
                  .columns = static_cast<uint32_t>(columns),
                  .depth = static_cast<uint32_t>(depth)};
  p.a_stride = static_cast<uint32_t>((a_transposed ? rows : depth) / 4);
  p.b_stride = static_cast<uint32_t>((b_transposed ? depth : columns) / 4);
  p.result_stride = static_cast<uint32_t>(columns / 4);
  p.b_rows = static_cast<uint32_t>(columns);
  const Buffer params = device->create_buffer(65536), none = device->create_buffer(256);
  const auto bytes = [](int64_t count) { return static_cast<uint64_t>(count) * 4; };
  const double time = seconds([&] {
    Recorder recorder(device, params);
    recorder.dispatch(
        "product", tile,
        {{"a_transposed", a_transposed ? 1.0 : 0.0}, {"b_transposed", b_transposed ? 1.0 : 0.0}}, p,
        {{a, 0, bytes(rows * depth)},
         {b, 0, bytes(columns * depth)},
         {result, 0, bytes(rows * columns)},
         {none, 0, 256},
         {none, 0, 256}},
        static_cast<uint32_t>((columns + edge - 1) / edge),
        static_cast<uint32_t>((rows + edge - 1) / edge));
    if (!recorder.finish()) std::fprintf(stderr, "product: %s\n", device->error());
  });
  device->destroy_buffer(params);
  device->destroy_buffer(none);
  return time;
}

// The three products of a chunk and the whole vocabulary, each with the faster tile.
double products(int64_t tokens, int64_t vocab, int64_t hidden, double peak) {
  const Buffer h = filled(tokens * hidden, 1), w = filled(vocab * hidden, 1),
               z = filled(tokens * vocab, 1e-3f), gh = filled(tokens * hidden, 1),
               gw = filled(vocab * hidden, 1);
  const double work = 2.0 * tokens * vocab * hidden;
  double total = 0;
  const auto one = [&](const char* name, bool at, bool bt, int64_t m, int64_t n, int64_t k,
                       Buffer a, Buffer b, Buffer c) {
    double best = 1e9;
    for (const auto& [tile, edge] : {std::pair{"product_64", 64}, {"product_128", 128}}) {
      const double time = product(tile, edge, at, bt, m, n, k, a, b, c);
      best = std::min(best, time);
      json line{{"product", name}, {"tile", tile}, {"N", tokens}, {"V", vocab}, {"D", hidden}};
      line["ms"] = time * 1e3;
      line["tflops"] = work / time * 1e-12;
      if (peak > 0) line["of_peak"] = work / time * 1e-12 / peak;
      std::printf("%s\n", line.dump().c_str());
      std::fflush(stdout);
    }
    total += best;
  };
  one("logits", false, true, tokens, vocab, hidden, h, w, z);
  one("grad_input", false, false, tokens, hidden, vocab, z, w, gh);
  one("grad_weight", true, false, vocab, hidden, tokens, z, h, gw);
  for (const Buffer buffer : {h, w, z, gh, gw}) device->destroy_buffer(buffer);
  return total;
}

void linear(int64_t tokens, int64_t vocab, int64_t hidden, double peak) {
  const Buffer h = filled(tokens * hidden, 1), w = filled(vocab * hidden, 0.05f),
               t = targets(tokens, vocab), loss = device->create_buffer(4),
               gh = device->create_buffer(tokens * hidden * 4),
               gw = device->create_buffer(vocab * hidden * 4);
  LinearCrossEntropyForwardBackward op;
  op.input = view_of(h, DType::f32, 2, tokens, hidden);
  op.weight = view_of(w, DType::f32, 2, vocab, hidden);
  op.target = view_of(t, DType::i32, 1, tokens, 0);
  op.loss = view_of(loss, DType::f32, 0, 0, 0);
  op.grad_input = view_of(gh, DType::f32, 2, tokens, hidden);
  op.grad_weight = view_of(gw, DType::f32, 2, vocab, hidden);
  const Execution on{.device = {DeviceType::webgpu, 0}};
  WorkspaceSize size;
  check(workspace(op, on, &size), "workspace");
  std::vector<std::pair<uint64_t, double>> runs;
  for (const uint64_t bytes : {size.minimum, size.recommended, 4 * size.recommended}) {
    const WebGpuWorkspace scratch(0, bytes);
    const double time = seconds([&] { check(run(op, scratch.workspace(), on), "run"); }, 3);
    runs.emplace_back(bytes, time);
  }
  for (const Buffer buffer : {h, w, t, loss, gh, gw}) device->destroy_buffer(buffer);
  const double alone = products(tokens, vocab, hidden, peak);
  for (const auto& [bytes, time] : runs) {
    json line{{"op", "LinearCrossEntropyForwardBackward"},
              {"N", tokens},
              {"V", vocab},
              {"D", hidden},
              {"workspace_MiB", static_cast<double>(bytes) / (1 << 20)}};
    line["ms"] = time * 1e3;
    line["products_ms"] = alone * 1e3;
    line["ratio"] = time / alone;
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
}

void rows(int64_t tokens, int64_t vocab) {
  const Buffer z = filled(tokens * vocab, 3), other = device->create_buffer(tokens * vocab * 4),
               t = targets(tokens, vocab), loss = device->create_buffer(tokens * 4);
  CrossEntropyForwardBackward op;
  op.logits = op.grad_logits = view_of(z, DType::f32, 2, tokens, vocab);
  op.target = view_of(t, DType::i32, 1, tokens, 0);
  op.loss = view_of(loss, DType::f32, 0, 0, 0);
  const Execution on{.device = {DeviceType::webgpu, 0}};
  WorkspaceSize size;
  check(workspace(op, on, &size), "workspace");
  const WebGpuWorkspace scratch(0, size.recommended);
  const double copy = seconds([&] {
    device->copy(z, 0, other, 0, static_cast<uint64_t>(tokens) * vocab * 4);
    device->submit();
  });
  const double time = seconds([&] { check(run(op, scratch.workspace(), on), "run"); });
  const double bytes = 8.0 * tokens * vocab;
  json line{{"op", "CrossEntropyForwardBackward in place"}, {"N", tokens}, {"V", vocab}};
  line["ms"] = time * 1e3;
  line["copy_ms"] = copy * 1e3;
  line["copy_GBps"] = bytes / copy * 1e-9;
  line["of_copy"] = copy / time;
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
  for (const Buffer buffer : {z, other, t, loss}) device->destroy_buffer(buffer);
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  double peak = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--quick") quick = true;
    if (std::string(argv[i]) == "--peak" && i + 1 < argc) peak = std::atof(argv[++i]);
  }
  Status status;
  device = find_device(0, &status);
  check(status, "device");
  char text[256];
  logitless_describe_backend(LOGITLESS_WEBGPU, text, sizeof(text), status.c());
  std::printf("%s\n", json{{"device", text}, {"peak_tflops", peak}}.dump().c_str());
  if (quick) {
    linear(128, 2048, 128, peak);
    rows(64, 4096);
    return 0;
  }
  for (const int64_t vocab : {1024, 4096, 50257}) rows((int64_t{1} << 27) / vocab / 64 * 64, vocab);
  linear(1024, 50304, 768, peak);
  linear(4096, 50304, 768, peak);
  linear(4096, 32768, 4096, peak);
  return 0;
}
