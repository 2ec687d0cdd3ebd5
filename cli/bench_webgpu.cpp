// SPDX-License-Identifier: Apache-2.0
// Measurements on WebGPU, timed from the call until the queue is empty.
#include "cli/bench_gpu.h"

#include "cli/commands.h"
#include "cli/text.h"
#ifdef LOGITLESS_WITH_WEBGPU
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "logitless/webgpu.h"
#include "src/webgpu/cost.h"
#include "src/webgpu/native.h"
#include "src/webgpu/run.h"
#endif

namespace logitless::cli {

#ifdef LOGITLESS_WITH_WEBGPU
namespace {

using webgpu::Binding;
using webgpu::NativeDevice;

constexpr Device kAdapter{DeviceType::webgpu, 0};
constexpr int kRepeats = 3;

NativeDevice* own_device() {
  Status status;
  NativeDevice* device = webgpu::find_device(kAdapter.index, &status);
  check(status);
  return device;
}

class WebGpuBench final : public GpuBench {
 public:
  WebGpuBench() : GpuBench(kAdapter), device_(own_device()) {}
  ~WebGpuBench() override { forget(); }

  const char* name() const override { return device_->description().c_str(); }
  // WebGPU does not report free memory; allocating too much fails.
  uint64_t free_bytes() const override { return UINT64_MAX; }
  const char* arithmetic() const override { return "f32 tiles"; }
  bool has_tensor_cores() const override { return false; }
  double product_rate(DType) override;
  double copy_bandwidth() override;

  void forget() override {
    scratch_.reset();
    const std::lock_guard lock(device_->mutex());
    for (const auto& [host, buffer] : copies_) device_->destroy_buffer(buffer);
    copies_.clear();
  }

 private:
  webgpu::Buffer make(uint64_t bytes) {
    const std::lock_guard lock(device_->mutex());
    const webgpu::Buffer buffer = device_->create_buffer(bytes);
    if (buffer == 0) throw Failure(why("no buffer"));
    return buffer;
  }
  void destroy(std::initializer_list<webgpu::Buffer> buffers) {
    const std::lock_guard lock(device_->mutex());
    for (const webgpu::Buffer buffer : buffers) device_->destroy_buffer(buffer);
  }
  void* device_of(const TensorView& host) override {
    webgpu::Buffer& buffer = copies_[host.data];
    if (buffer == 0) {
      buffer = make(std::max<uint64_t>(bytes_of(host), 4));
      write(buffer, host.data, bytes_of(host));
    }
    return reinterpret_cast<void*>(buffer);
  }
  // WebGPU writes whole 4-byte words, so the last one is padded.
  void write(webgpu::Buffer buffer, const void* data, uint64_t bytes) {
    const std::lock_guard lock(device_->mutex());
    const uint64_t whole = bytes / 4 * 4;
    if (whole > 0) device_->write(buffer, 0, data, whole);
    if (whole == bytes) return;
    uint32_t rest = 0;
    std::memcpy(&rest, static_cast<const char*>(data) + whole, bytes - whole);
    device_->write(buffer, whole, &rest, 4);
  }
  void fetch(const TensorView& host) override {
    const std::lock_guard lock(device_->mutex());
    if (!device_->read(copies_.at(host.data), 0, host.data, bytes_of(host))) {
      throw Failure(why("a buffer could not be read"));
    }
  }
  Workspace reserve(uint64_t bytes) override {
    if (scratch_ == nullptr || scratch_->workspace().bytes != bytes) {
      scratch_.reset();
      scratch_ = std::make_unique<WebGpuWorkspace>(kAdapter.index, bytes);
      check(scratch_->status());
    }
    return scratch_->workspace();
  }
  double seconds(const std::function<void()>& work) override {
    device_->wait();
    const auto start = std::chrono::steady_clock::now();
    work();
    device_->wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  double product_time(int64_t n, webgpu::Buffer a, webgpu::Buffer b, webgpu::Buffer c,
                      webgpu::Buffer params);
  std::string why(const char* otherwise) {
    const char* text = device_->error();
    return std::string("webgpu: ") + (text != nullptr ? text : otherwise);
  }

  NativeDevice* const device_;
  std::map<const void*, webgpu::Buffer> copies_;
  std::unique_ptr<WebGpuWorkspace> scratch_;
};

// The time of a product of two square matrices, with the kernel that computes logits.
double WebGpuBench::product_time(int64_t n, webgpu::Buffer a, webgpu::Buffer b, webgpu::Buffer c,
                                 webgpu::Buffer params) {
  const webgpu::Tile tile{.m = 128, .n = 128};
  const auto quarter = static_cast<uint32_t>(n / 4), whole = static_cast<uint32_t>(n);
  const webgpu::ProductParams p{.rows = whole,
                                .columns = whole,
                                .depth = whole,
                                .a_stride = quarter,
                                .b_stride = quarter,
                                .result_stride = quarter,
                                .b_rows = whole,
                                .slice_depth = whole};
  const uint64_t bytes = static_cast<uint64_t>(n * n) * 4;
  const std::lock_guard lock(device_->mutex());
  return seconds([&] {
    webgpu::Recorder recorder(device_, params);
    const uint32_t groups = webgpu::blocks(n, tile.m);
    recorder.dispatch("product", "product", {}, p,
                      {{a, 0, bytes}, {b, 0, bytes}, {c, 0, bytes}, {a, 0, 256}, {a, 0, 256}},
                      groups, groups);
    if (!recorder.finish()) throw Failure(why("the product was refused"));
  });
}

double WebGpuBench::product_rate(DType) {
  const webgpu::Buffer params = make(65536);
  double best = 0, elapsed = 0;
  // The product grows until it takes 20 ms, because a large one is very slow in software.
  for (int64_t n = 256; n <= 4096 && elapsed < 0.02; n *= 2) {
    const uint64_t bytes = static_cast<uint64_t>(n * n) * 4;
    const webgpu::Buffer a = make(bytes), b = make(bytes), c = make(bytes);
    const std::vector<float> numbers(static_cast<size_t>(n * n), 0.75F);
    write(a, numbers.data(), bytes);
    write(b, numbers.data(), bytes);
    product_time(n, a, b, c, params);
    elapsed = 1e30;
    for (int i = 0; i < kRepeats; ++i) {
      elapsed = std::min(elapsed, product_time(n, a, b, c, params));
    }
    best = std::max(best, 2.0 * static_cast<double>(n * n * n) / elapsed);
    destroy({a, b, c});
  }
  destroy({params});
  return best;
}

// Measures WebGPU's own copy of a buffer.
double WebGpuBench::copy_bandwidth() {
  const uint64_t bytes =
      std::min<uint64_t>(device_->limits().buffer_bytes, uint64_t{256} << 20) / 256 * 256;
  const webgpu::Buffer from = make(bytes), to = make(bytes);
  double best = 1e30;
  {
    const std::lock_guard lock(device_->mutex());
    for (int i = 0; i <= kRepeats; ++i) {
      const double elapsed = seconds([&] {
        device_->copy(from, 0, to, 0, bytes);
        if (!device_->submit()) throw Failure(why("the copy was refused"));
      });
      if (i > 0) best = std::min(best, elapsed);
    }
  }
  destroy({from, to});
  return 2.0 * static_cast<double>(bytes) / best;
}

}  // namespace

std::unique_ptr<GpuBench> make_webgpu_bench() { return std::make_unique<WebGpuBench>(); }
#else
std::unique_ptr<GpuBench> make_webgpu_bench() {
  throw Failure("webgpu: this library was built without it");
}
#endif

}  // namespace logitless::cli
