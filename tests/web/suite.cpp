// SPDX-License-Identifier: Apache-2.0
// The conformance suite in a browser: the page's device for its cases, and the functions that a
// page calls. Reading a buffer suspends the module until the device has answered.
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <typeinfo>

#include "gtest/gtest.h"
#include "src/backend.h"
#include "src/cpu/thread_pool.h"
#include "src/webgpu/browser/device.h"
#include "tests/support/device.h"
#include "tests/webgpu/paper_calls.h"

#define LOGITLESS_SUITE_IMPORT(name) __attribute__((import_module("suite"), import_name(name)))
extern "C" {
// Returns 0, or the length of the error message that it wrote to `why`.
LOGITLESS_SUITE_IMPORT("read")
uint32_t suite_read(uint32_t buffer, void* data, uint32_t bytes, char* why, uint32_t capacity);
LOGITLESS_SUITE_IMPORT("failed") void suite_failed(const char* what);

// libc++abi for wasm has no exceptions; these replace its functions.
void* __cxa_allocate_exception(size_t bytes) noexcept { return std::malloc(bytes); }
void __cxa_throw(void*, std::type_info*, void* (*)(void*)) {
  suite_failed("an exception was thrown");
  std::abort();
}
}

namespace logitless {
namespace {

webgpu::BrowserDevice& browser() {
  static webgpu::BrowserDevice device;
  return device;
}

struct BrowserBackend final : Backend {
  const char* name() const override { return "webgpu"; }
  Status workspace(const Call& call, uint64_t, WorkspaceSize* size) const override {
    *size = {.alignment = 1};
    return webgpu::workspace_sizes(webgpu::problem_of(call), browser().limits(), &size->minimum,
                                   &size->recommended);
  }
  Status run(const Call& call, const Decisions&, const Workspace& workspace) const override {
    return webgpu::run(call, workspace.bytes,
                       static_cast<webgpu::WorkspaceBuffers*>(workspace.data));
  }
  Status describe(char* text, size_t bytes) const override {
    std::snprintf(text, bytes, "the browser's");
    return {};
  }
};

}  // namespace

const Backend* webgpu_backend(Status*) {
  static const BrowserBackend backend;
  return &backend;
}
// This module has no CPU backend; only the linker needs these.
const Backend& cpu_backend() { return *webgpu_backend(nullptr); }
namespace cpu {
int32_t num_threads() { return 1; }
int32_t set_num_threads(int32_t) { return 1; }
}  // namespace cpu

namespace conformance {
namespace {

class BrowserTestDevice final : public TestDevice {
 public:
  const char* name() const override { return "webgpu"; }
  Device tensors() const override { return {DeviceType::webgpu, 0}; }
  Execution execution() const override { return {.device = tensors()}; }
  void* allocate(size_t bytes) const override {
    const size_t size = (bytes + 3) / 4 * 4;
    std::vector<webgpu::Buffer>& free = free_[size];
    if (free.empty()) free.push_back(browser().create_buffer(size));
    const webgpu::Buffer buffer = free.back();
    free.pop_back();
    sizes_[buffer] = size;
    return reinterpret_cast<void*>(buffer);
  }
  void release(void* data) const override {
    const auto buffer = reinterpret_cast<webgpu::Buffer>(data);
    free_[sizes_[buffer]].push_back(buffer);
  }
  void upload(void* data, const std::byte* host, size_t bytes) const override {
    std::vector<std::byte> padded(host, host + bytes);
    padded.resize((bytes + 3) / 4 * 4);
    browser().write(reinterpret_cast<webgpu::Buffer>(data), 0, padded.data(), padded.size());
  }
  void download(std::byte* host, const void* data, size_t bytes) const override {
    std::vector<std::byte> padded((bytes + 3) / 4 * 4);
    char why[256] = {};
    const auto buffer = static_cast<uint32_t>(reinterpret_cast<webgpu::Buffer>(data));
    if (suite_read(buffer, padded.data(), padded.size(), why, sizeof(why)) > 0) {
      ADD_FAILURE() << why;
    }
    std::memcpy(host, padded.data(), bytes);
  }
  void* reserve(size_t, const Ranges&) const override { return nullptr; }
  void unreserve(void*, size_t) const override {}
  bool has_addresses() const override { return false; }
  void* make_workspace(uint64_t bytes) const override {
    return new webgpu::WorkspaceBuffers(&browser(), bytes);
  }
  void destroy_workspace(void* workspace) const override {
    delete static_cast<webgpu::WorkspaceBuffers*>(workspace);
  }
  uint64_t bytes_of_workspace(const void* workspace) const override {
    return static_cast<const webgpu::WorkspaceBuffers*>(workspace)->made();
  }
  bool synchronous() const override { return false; }
  int64_t most_chosen() const override { return 64; }
  bool has_id_lists() const override { return false; }
  bool has_top() const override { return false; }

 private:
  mutable std::map<size_t, std::vector<webgpu::Buffer>> free_;
  mutable std::map<webgpu::Buffer, size_t> sizes_;
};

}  // namespace

const std::vector<Found>& all_devices() {
  static const BrowserTestDevice device;
  static const std::vector<Found> all{{"webgpu", &device, ""}};
  return all;
}
const std::vector<const TestDevice*>& devices() {
  static const std::vector<const TestDevice*> all{all_devices()[0].device};
  return all;
}
bool asked_for(const std::string& name) { return name == "webgpu"; }
const TestDevice& device(const std::string&) { return *devices()[0]; }

}  // namespace conformance
}  // namespace logitless

extern "C" {

__attribute__((export_name("allocate"))) void* allocate(uint32_t bytes) {
  return std::malloc(bytes);
}

// Runs the tests that a googletest filter selects; returns how many did not pass.
__attribute__((export_name("run_tests"))) int32_t run_tests(const char* filter) {
  static bool started = false;
  if (!started) {
    setenv("LOGITLESS_TEST_EIGHTH", "1", 1);
    int count = 1;
    char name[] = "suite", *arguments[] = {name, nullptr};
    testing::InitGoogleTest(&count, arguments);
    GTEST_FLAG_SET(brief, true);
    started = true;
  }
  GTEST_FLAG_SET(filter, filter);
  (void)RUN_ALL_TESTS();
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  return all.test_to_run_count() == 0 ? -1 : all.test_to_run_count() - all.successful_test_count();
}

// Returns every pipeline that the planner can use, one per line.
__attribute__((export_name("every_pipeline"))) const char* every_pipeline() {
  static std::string* const lines = new std::string;
  lines->clear();
  for (const std::string& name : logitless::webgpu::every_pipeline({})) *lines += name + "\n";
  return lines->c_str();
}

}  // extern "C"
