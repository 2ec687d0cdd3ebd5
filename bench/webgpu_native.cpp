// SPDX-License-Identifier: Apache-2.0
// Measures the WebGPU backend on this machine's adapter, and prints JSON lines: its three tiled
// products alone; the linear op with gradients, compared with them, in workspaces from the minimum
// up; and cross_entropy in place, run by the host and by the kernel with the published bindings,
// compared with WebGPU's own copy and a shader's. Each figure is the least of two to five times,
// each of enough calls to hide the submission.
//   logitless_webgpu_bench [--quick | --rows | --products] [--peak TFLOPS]
//   --rows and --products run only cross_entropy, or the products of a call
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "logitless/webgpu.h"
#include "src/webgpu/cost.h"
#include "src/webgpu/native.h"
#include "src/webgpu/run.h"

using namespace logitless;
using namespace logitless::webgpu;
using nlohmann::json;

namespace {

NativeDevice* device = nullptr;

void print(const json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

void check(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.message());
  std::exit(1);
}

// Returns the seconds of one call of f, which records and submits work.
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

struct Shape {
  bool a_transposed, b_transposed;
  int64_t rows, columns, depth;
  bool blocked = false;  // grad_weight as in a call: one sum per part of the depth
};

uint64_t bytes_of(int64_t floats) { return static_cast<uint64_t>(floats) * 4; }

// Measures one of the three products alone, with the given tile, in slices that are then added.
double product(const Tile& tile, int64_t slices, const Shape& s, Buffer a, Buffer b,
               Buffer result) {
  ProductParams p{.rows = u32(s.rows), .columns = u32(s.columns), .depth = u32(s.depth)};
  p.a_stride = u32((s.a_transposed ? s.rows : s.depth) / 4);
  p.b_stride = u32((s.b_transposed ? s.depth : s.columns) / 4);
  p.result_stride = u32(s.columns / 4);
  p.b_rows = u32(s.columns);
  p.slice_depth = blocks(s.depth, 16 * slices) * 16;
  if (s.blocked) p.block_depth = 32;
  if (slices > 1) p.slice_stride = p.rows * p.result_stride;
  const SliceParams add{p.result_stride, u32(slices), p.slice_stride, 0};
  const uint64_t bytes = bytes_of(s.rows * s.columns);
  const Buffer params = device->create_buffer(65536), none = device->create_buffer(256),
               parts =
                   slices > 1 ? device->create_buffer(bytes * static_cast<uint64_t>(slices)) : 0;
  const double time = seconds(
      [&] {
        Recorder recorder(device, params);
        recorder.dispatch("product", "product",
                          {{"a_transposed", s.a_transposed ? 1.0 : 0.0},
                           {"b_transposed", s.b_transposed ? 1.0 : 0.0},
                           {"tile_m", static_cast<double>(tile.m)},
                           {"tile_n", static_cast<double>(tile.n)},
                           {"threads", static_cast<double>(tile.threads())}},
                          p,
                          {{a, 0, bytes_of(s.rows * s.depth)},
                           {b, 0, bytes_of(s.columns * s.depth)},
                           {slices > 1 ? parts : result, 0, bytes * static_cast<uint64_t>(slices)},
                           {none, 0, 256},
                           {none, 0, 256}},
                          blocks(s.columns, tile.n), blocks(s.rows, tile.m), u32(slices));
        if (slices > 1) {
          recorder.dispatch("slices", "add_slices", {}, add,
                            {{parts, 0, bytes * static_cast<uint64_t>(slices)},
                             {result, 0, bytes},
                             {none, 0, 256}},
                            blocks(p.result_stride, 64), p.rows);
        }
        if (!recorder.finish()) std::fprintf(stderr, "product: %s\n", device->error());
      },
      3);
  for (const Buffer buffer : {params, none, parts}) device->destroy_buffer(buffer);
  return time;
}

// Measures the three products of all tokens and the whole vocabulary, and returns the sum of their
// seconds, each with the fastest of its tiles and numbers of slices.
double products(int64_t tokens, int64_t vocab, int64_t hidden, double peak) {
  const Buffer h = filled(tokens * hidden, 1), w = filled(vocab * hidden, 1),
               z = filled(tokens * vocab, 1e-3f), gh = filled(tokens * hidden, 1),
               gw = filled(vocab * hidden, 1);
  const double work = 2.0 * tokens * vocab * hidden;
  const auto one = [&](const char* name, const Shape& s, std::initializer_list<int64_t> slices,
                       Buffer a, Buffer b, Buffer c) {
    double best = 1e9;
    for (const Tile tile : {Tile{false, 128, 128}, Tile{false, 128, 64}, Tile{false, 64, 64}}) {
      for (const int64_t count : slices) {
        const double time = product(tile, count, s, a, b, c);
        best = std::min(best, time);
        json line{{"product", name}, {"N", tokens}, {"V", vocab}, {"D", hidden}};
        line["tile"] = std::to_string(tile.m) + " x " + std::to_string(tile.n);
        line["slices"] = count;
        if (s.blocked) line["blocked"] = true;
        line["ms"] = time * 1e3;
        line["tflops"] = work / time * 1e-12;
        if (peak > 0) line["of_peak"] = work / time * 1e-12 / peak;
        print(line);
      }
    }
    return best;
  };
  double total = one("logits", {false, true, tokens, vocab, hidden}, {1}, h, w, z);
  total += one("grad_input", {false, false, tokens, hidden, vocab}, {1, 4, 11}, z, w, gh);
  const Shape of_weight{true, false, vocab, hidden, tokens};
  Shape blocked = of_weight;
  blocked.blocked = true;
  total += std::min(one("grad_weight", of_weight, {1}, z, h, gw),
                    one("grad_weight", blocked, {1}, z, h, gw));
  for (const Buffer buffer : {h, w, z, gh, gw}) device->destroy_buffer(buffer);
  return total;
}

// Budgets from the minimum to where everything fits, by doubling.
std::vector<uint64_t> budgets(uint64_t minimum, int64_t tokens, int64_t vocab) {
  std::vector<uint64_t> all;
  const uint64_t whole = bytes_of(tokens * vocab) * 3 / 2;
  for (uint64_t bytes = minimum; bytes < whole; bytes *= 2) all.push_back(bytes);
  all.push_back(whole);
  return all;
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
  std::vector<uint64_t> bytes = budgets(size.minimum, tokens, vocab);
  bytes.push_back(size.recommended);
  std::sort(bytes.begin(), bytes.end());
  for (const uint64_t budget : bytes) {
    const WebGpuWorkspace scratch(0, budget);
    const double time = seconds([&] { check(run(op, scratch.workspace(), on), "run"); }, 2);
    runs.emplace_back(budget, time);
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
    if (bytes == size.recommended) line["recommended"] = true;
    print(line);
  }
}

// A copy by a shader: WebGPU's own may be slower.
constexpr const char* kCopy = R"(
@group(0) @binding(0) var<storage, read> source: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> result: array<vec4<f32>>;
@compute @workgroup_size(256)
fn copy(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
  let i = (group.x + group.y * groups.x) * 1024u + thread;
  for (var k = 0u; k < 4u; k++) {
    if (i + k * 256u < arrayLength(&source)) {
      result[i + k * 256u] = source[i + k * 256u];
    }
  }
}
)";

double shader_copy(Buffer from, Buffer to, uint64_t bytes) {
  static const Pipeline pipeline = device->pipeline_of_text(kCopy, "copy", nullptr, 0);
  const uint32_t groups = blocks(static_cast<int64_t>(bytes), 16384);
  return seconds([&] {
    const Binding bindings[] = {{from, 0, bytes}, {to, 0, bytes}};
    device->dispatch(pipeline, bindings, 2, std::min(groups, kGroups), blocks(groups, kGroups), 1);
    device->submit();
  });
}

// Measures cross_entropy.wgsl with its published bindings.
double seed_shaped(Buffer logits, Buffer target, Buffer losses, int64_t tokens, int64_t vocab) {
  const uint32_t sizes[4] = {u32(tokens), u32(vocab), 0, 0};
  const float factors[4] = {1 / static_cast<float>(tokens), 0, 0, 1 / static_cast<float>(vocab)};
  const Buffer dims = device->create_buffer(256), params = device->create_buffer(256);
  device->write(dims, 0, sizes, sizeof(sizes));
  device->write(params, 0, factors, sizeof(factors));
  const Pipeline pipeline = device->pipeline("cross_entropy", "cross_entropy", nullptr, 0);
  const double time = seconds([&] {
    const Binding bindings[] = {{logits, 0, bytes_of(tokens * vocab)},
                                {target, 0, bytes_of(tokens)},
                                {losses, 0, bytes_of(tokens)},
                                {dims, 0, 256},
                                {params, 0, 256}};
    device->dispatch(pipeline, bindings, 5, std::min(u32(tokens), kGroups), blocks(tokens, kGroups),
                     1);
    device->submit();
  });
  for (const Buffer buffer : {dims, params}) device->destroy_buffer(buffer);
  return time;
}

void rows(int64_t tokens, int64_t vocab) {
  const Buffer z = filled(tokens * vocab, 3),
               other = device->create_buffer(bytes_of(tokens * vocab)), t = targets(tokens, vocab),
               loss = device->create_buffer(bytes_of(tokens));
  CrossEntropyForwardBackward op;
  op.logits = op.grad_logits = view_of(z, DType::f32, 2, tokens, vocab);
  op.target = view_of(t, DType::i32, 1, tokens, 0);
  op.loss = view_of(loss, DType::f32, 0, 0, 0);
  const Execution on{.device = {DeviceType::webgpu, 0}};
  WorkspaceSize size;
  check(workspace(op, on, &size), "workspace");
  const WebGpuWorkspace scratch(0, size.recommended);
  const double copy = seconds([&] {
    device->copy(z, 0, other, 0, bytes_of(tokens * vocab));
    device->submit();
  });
  const double by_shader = shader_copy(z, other, bytes_of(tokens * vocab));
  const double bytes = 2.0 * static_cast<double>(bytes_of(tokens * vocab));
  const auto report = [&](const char* name, double time) {
    json line{{"op", name}, {"N", tokens}, {"V", vocab}};
    line["ms"] = time * 1e3;
    line["GBps"] = bytes / time * 1e-9;
    line["copy_GBps"] = bytes / copy * 1e-9;
    line["shader_copy_GBps"] = bytes / by_shader * 1e-9;
    line["of_copy"] = copy / time;
    line["of_shader_copy"] = by_shader / time;
    print(line);
  };
  report("CrossEntropyForwardBackward in place",
         seconds([&] { check(run(op, scratch.workspace(), on), "run"); }));
  report("cross_entropy.wgsl", seed_shaped(z, t, loss, tokens, vocab));
  for (const Buffer buffer : {z, other, t, loss}) device->destroy_buffer(buffer);
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false, rows_alone = false, products_alone = false;
  double peak = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--quick") quick = true;
    if (std::string(argv[i]) == "--rows") rows_alone = true;
    if (std::string(argv[i]) == "--products") products_alone = true;
    if (std::string(argv[i]) == "--peak" && i + 1 < argc) peak = std::atof(argv[++i]);
  }
  Status status;
  device = find_device(0, &status);
  check(status, "device");
  char text[256];
  logitless_describe_backend(LOGITLESS_WEBGPU, text, sizeof(text), status.c());
  print({{"device", text}, {"peak_tflops", peak}});
  if (quick) {
    linear(128, 2048, 128, peak);
    rows(64, 4096);
    return 0;
  }
  if (products_alone) {
    products(1024, 50304, 768, peak);
    products(4096, 32768, 4096, peak);
    return 0;
  }
  for (const int64_t vocab : {256, 1024, 4096, 50257})
    rows((int64_t{1} << 27) / vocab / 64 * 64, vocab);
  if (rows_alone) return 0;
  linear(1024, 50304, 768, peak);
  linear(4096, 50304, 768, peak);
  linear(4096, 32768, 4096, peak);
  return 0;
}
