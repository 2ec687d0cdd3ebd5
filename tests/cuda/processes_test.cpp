// SPDX-License-Identifier: Apache-2.0
// What CUDA promises across processes and devices: a caller's error survives the first launches of
// a process (scripts/test-device runs each of these tests in its own), another process gives the
// same bits, and so does another device of the same kind.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <cuda.h>

#include "resident.h"
#include "src/cuda/runtime/driver.h"
#include "src/cuda/runtime/runtime.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

// Calls that together launch many kernels of an op: plain, with many options, with rows that
// clusters share, and with workspaces for none of E, a part of it and all.
struct Call {
  Case c;
  double share = 1;  // of the recommended workspace beyond the minimum
};
std::vector<Call> calls(OpKind op, DType dtype) {
  const auto plain = [&](Shape shape) { return Case{.op = op, .shape = shape, .dtype = dtype}; };
  std::vector<Call> all{{plain({33, 64, 300})}, {plain({33, 64, 300})}, {plain({70, 40, 515})}};
  all[1].c.statistics = true;
  apply_everything(all[2].c);
  if (is_linear(op)) {
    for (const double share : {0.0, 0.5, 2.0}) all.push_back({plain({600, 64, 30000}), share});
  } else {
    for (const int64_t vocab : {20000, 50257, 128256, 950001})
      all.push_back({plain({3, 1, vocab})});
  }
  for (Call& call : all) call.c.fault = true;
  return all;
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

class CudaErrors : public ConformanceTest {
 protected:
  // Leaves an error in the CUDA runtime that nobody has read.
  static cudaError_t leave_error() {
    (void)cudaGetLastError();
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = dim3(1);
    return cudaLaunchKernelExC(&config, nullptr, nullptr);
  }
};

// An earlier error of the caller's is neither reported as the library's nor cleared.
TEST_P(CudaErrors, OfTheCallersStayTheCallers) {
  for (const Call& call : calls(op_, dtype_)) {
    with_op(op_, [&](auto op) {
      const auto p = build<decltype(op)>(call.c);
      Resident<decltype(op)> resident(device_, p, call.share);
      const cudaError_t failed = leave_error();
      ASSERT_NE(failed, cudaSuccess);
      ASSERT_EQ(cudaPeekAtLastError(), failed);
      const Status status = resident.run();
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(cudaPeekAtLastError(), failed) << describe(call.c) << ", " << call.share;
      (void)cudaGetLastError();
    });
  }
}

TEST_P(CudaErrors, OfTheCallersSurviveEveryVerb) {
  const Case c = calls(op_, dtype_).front().c;
  with_op(op_, [&](auto op) {
    const auto p = build<decltype(op)>(c);
    Resident<decltype(op)> resident(device_, p);
    const cudaError_t failed = leave_error();
    EXPECT_TRUE(warmup(resident.execution()).ok());
    EXPECT_EQ(cudaPeekAtLastError(), failed) << "warmup";
    WorkspaceSize size;
    EXPECT_TRUE(workspace(resident.op(), resident.execution(), &size).ok());
    EXPECT_EQ(cudaPeekAtLastError(), failed) << "workspace";
    EXPECT_TRUE(resident.run().ok());
    EXPECT_EQ(cudaPeekAtLastError(), failed) << "run";
    (void)cudaGetLastError();
    const Comparison result = compare(expected(device_, p.op, p.model), resident.fields());
    EXPECT_TRUE(result.ok()) << result.report;
    // The library's own error leaves none in the runtime.
    auto elsewhere = resident.op();
    place(elsewhere, {DeviceType::cuda, 4096});
    EXPECT_EQ(run(elsewhere, {}, {.device = {DeviceType::cuda, 4096}}).code(),
              StatusCode::wrong_device);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  });
}

// Makes each query of a launch alone, to name the one at fault if the tests above fail.
TEST_P(CudaErrors, OfTheCallersSurviveWhatALaunchAsksFor) {
  const void* kernel = cuda::KernelFile::first()->kernel();
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 64), cudaSuccess);
  cudaFunction_t function = nullptr;
  cudaFuncAttributes attributes;
  int device = 0;
  const std::pair<const char*, std::function<bool()>> steps[] = {
      {"cudaGetDevice", [&] { return cudaGetDevice(&device) == cudaSuccess; }},
      {"cudaSetDevice", [&] { return cudaSetDevice(0) == cudaSuccess; }},
      {"cudaFuncGetAttributes",
       [&] { return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess; }},
      {"cudaGetFuncBySymbol",
       [&] { return cudaGetFuncBySymbol(&function, kernel) == cudaSuccess; }},
      {"allow_shared_memory", [&] { return cuda::allow_shared_memory(kernel, 100000).ok(); }},
      {"allow_shared_memory again", [&] { return cuda::allow_shared_memory(kernel, 9).ok(); }},
      {"cudaMemsetAsync", [&] { return cudaMemsetAsync(memory, 0, 64, nullptr) == cudaSuccess; }},
  };
  for (const auto& [name, step] : steps) {
    (void)cudaGetLastError();
    (void)cudaSetDevice(4096);
    const cudaError_t failed = cudaPeekAtLastError();
    ASSERT_NE(failed, cudaSuccess);
    EXPECT_TRUE(step()) << name;
    EXPECT_EQ(cudaPeekAtLastError(), failed) << name;
  }
  (void)cudaGetLastError();
  // Asks the driver, because the runtime does not report what was set through the driver.
  const auto get_attribute = reinterpret_cast<CUresult (*)(int*, CUfunction_attribute, CUfunction)>(
      cuda::find_driver_function("cuFuncGetAttribute"));
  ASSERT_NE(get_attribute, nullptr);
  int bytes = 0;
  ASSERT_EQ(get_attribute(&bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function),
            CUDA_SUCCESS);
  EXPECT_GE(bytes, 100000);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

class CudaProcesses : public ConformanceTest {
 protected:
  // FNV-1a over every output of every call.
  std::string bits(const TestDevice& device) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const Call& call : calls(op_, dtype_)) {
      const uint64_t bytes = bytes_of(workspace_of(device, call.c), call.share);
      const Outcome outcome = run_case(device, call.c, {.memory = Memory::exact, .bytes = bytes});
      EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
      for (const auto& [name, field] : outcome.fields) {
        for (const std::byte b : field.bits) {
          hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3;
        }
      }
    }
    char text[32];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
    return text;
  }
};

constexpr const char* kSayBits = "LOGITLESS_TEST_SAY_BITS";

// bits() of a new process, which runs the same test and prints them.
std::string bits_of_another_process() {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string command =
      std::string(kSayBits) + "=1 env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX '" + self +
      "' --gtest_filter='" + info->test_suite_name() + "." + info->name() + "'";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "no process";
  std::string said = "no bits";
  for (char line[256]; std::fgets(line, sizeof(line), pipe) != nullptr;) {
    char word[32];
    if (std::sscanf(line, "[ bits ] %31s", word) == 1) said = word;
  }
  pclose(pipe);
  return said;
}

TEST_P(CudaProcesses, GiveTheSameBits) {
  const std::string own = bits(device_);
  if (is_set(kSayBits)) {
    std::printf("[ bits ] %s\n", own.c_str());
    return;
  }
  EXPECT_EQ(bits(device_), own) << "in this process";
  for (int process = 0; process < 2; ++process) EXPECT_EQ(bits_of_another_process(), own);
}

// Two devices run at once, each from its own thread. Devices of the same kind give the same bits.
TEST_P(CudaProcesses, ServeTwoDevices) {
  const Found second = find_cuda_device(1);
  if (second.device == nullptr) {
    std::printf("[ one device ] calls on a second were not made: %s\n", second.reason.c_str());
    return;
  }
  std::string said[2];
  std::thread other([&] { said[1] = bits(*second.device); });
  said[0] = bits(device_);
  other.join();
  const cuda::DeviceInfo *one, *two;
  ASSERT_TRUE(cuda::find_device(0, &one).ok() && cuda::find_device(1, &two).ok());
  if (std::string(one->name) == two->name && one->multiprocessors == two->multiprocessors) {
    EXPECT_EQ(said[0], said[1]);
  }
  for (const Call& call : calls(op_, dtype_)) {
    if (call.c.shape.vocab > 3000) continue;  // slow in the reference
    const Comparison result = judge(*second.device, call.c);
    EXPECT_TRUE(result.ok()) << describe(call.c) << "\n" << result.report;
  }
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);
}

constexpr DType kTwo[] = {DType::f32, DType::bf16};
#define LOGITLESS_CUDA_SUITE(Suite)                                                            \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite);                                        \
  INSTANTIATE_TEST_SUITE_P(All, Suite,                                                         \
                           testing::Combine(testing::ValuesIn(cuda_alone()),                   \
                                            testing::ValuesIn(kOps), testing::ValuesIn(kTwo)), \
                           parameter_name)
LOGITLESS_CUDA_SUITE(CudaErrors);
LOGITLESS_CUDA_SUITE(CudaProcesses);
#undef LOGITLESS_CUDA_SUITE

}  // namespace
}  // namespace logitless::conformance
