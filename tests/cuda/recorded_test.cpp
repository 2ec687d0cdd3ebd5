// SPDX-License-Identifier: Apache-2.0
// Simulates machines that are not available: old devices together with new ones, devices that do
// not answer, old drivers, and drivers and libraries that appear late or lack functions.
#include "recorded.h"

#include <gtest/gtest.h>

#include "logitless/logitless.h"
#include "src/cuda/promises.h"
#include "src/cuda/runtime/runtime.h"
#include "src/cuda/runtime/warmup.h"

namespace logitless {
namespace {

using cuda::RecordedCuda;
using testing::Test;

constexpr RecordedCuda::Device kT4{"Tesla T4", 7, 5}, kA100{"A100", 8, 0}, kH100{"H100", 9, 0};
constexpr RecordedCuda::Device kSilent{"GPU that is lost", 8, 0, false};

Execution on(int device) { return {.device = {DeviceType::cuda, device}}; }

// Views with addresses but without memory.
TensorView matrix(int device, int number, int64_t rows, int64_t columns) {
  TensorView v =
      matrix_view(reinterpret_cast<void*>(int64_t{number} << 40), DType::f32, rows, columns);
  v.device = {DeviceType::cuda, device};
  return v;
}
TensorView vector(int device, int number, DType dtype, int64_t size) {
  TensorView v = vector_view(reinterpret_cast<void*>(int64_t{number} << 40), dtype, size);
  v.device = {DeviceType::cuda, device};
  return v;
}
Softmax softmax(int device) {
  return {.logits = matrix(device, 1, 4, 100), .probabilities = matrix(device, 2, 4, 100)};
}
LinearCrossEntropyForward linear(int device) {
  LinearCrossEntropyForward op{.input = matrix(device, 1, 4, 64),
                               .weight = matrix(device, 2, 100, 64),
                               .target = vector(device, 3, DType::i32, 4),
                               .loss = vector(device, 4, DType::f32, 4)};
  op.options.reduction = Reduction::none;
  return op;
}
template <class Op>
Status run_on(const Op& op, int device) {
  WorkspaceSize size;
  const Status status = workspace(op, on(device), &size);
  if (!status.ok()) return status;
  return run(op, {reinterpret_cast<void*>(int64_t{9} << 40), size.recommended}, on(device));
}
Status describe(std::string* text) {
  char line[256];
  Status status;
  logitless_describe_backend(LOGITLESS_CUDA, line, sizeof(line), status.c());
  *text = line;
  return status;
}
#define EXPECT_OK(expression)               \
  do {                                      \
    const Status own = (expression);        \
    EXPECT_TRUE(own.ok()) << own.message(); \
  } while (false)
#define EXPECT_REFUSED(expression, wanted, part)                                          \
  do {                                                                                    \
    const Status own = (expression);                                                      \
    EXPECT_EQ(own.code(), StatusCode::wanted) << own.message();                           \
    EXPECT_NE(std::string(own.message()).find(part), std::string::npos) << own.message(); \
  } while (false)

TEST(CudaMachines, ADeviceThatIsTooOldStandsInNobodysWay) {
  const RecordedCuda machine({kT4, kA100});
  std::string text;
  EXPECT_OK(describe(&text));
  EXPECT_NE(text.find("A100"), std::string::npos) << text;
  EXPECT_OK(run_on(softmax(1), 1));
  EXPECT_OK(run_on(linear(1), 1));
  EXPECT_OK(warmup(on(1)));
  EXPECT_REFUSED(run_on(softmax(0), 0), backend_unavailable, "device 0 (Tesla T4)");
  EXPECT_REFUSED(warmup(on(0)), backend_unavailable, "7.5; needed: 8.0 or newer");
  EXPECT_REFUSED(run_on(softmax(2), 2), wrong_device, "allowed: 0 to 1");
  EXPECT_REFUSED(warmup(on(2)), wrong_device, "allowed: 0 to 1");
  EXPECT_EQ(machine.current(), 0);
  EXPECT_EQ(machine.last_error(), cudaSuccess);
}

TEST(CudaMachines, ItsLineSaysWhatItPromises) {
  for (const RecordedCuda::Device& device : {kA100, kH100}) {
    const RecordedCuda machine({device});
    const cuda::DeviceInfo* info;
    EXPECT_OK(cuda::find_device(0, &info));
    const std::string promise = "; row_reference: the row's maximum";
    std::string text;
    EXPECT_OK(describe(&text));
    EXPECT_NE(text.find("batch invariance: all but"), std::string::npos) << text;
    const bool near = !cuda::reference_is_maximum(*info, DType::bf16);
    EXPECT_TRUE(text.ends_with(near ? promise + ", but near it in 16-bit linear ops" : promise))
        << text;
  }
}

TEST(CudaMachines, ADeviceThatDoesNotAnswerStandsInNobodysWay) {
  RecordedCuda machine({kSilent, kA100});
  std::string text;
  EXPECT_OK(describe(&text));
  EXPECT_NE(text.find("A100"), std::string::npos) << text;
  EXPECT_OK(run_on(softmax(1), 1));
  EXPECT_REFUSED(run_on(softmax(0), 0), backend_unavailable, "device 0 does not answer");
  EXPECT_EQ(machine.last_error(), cudaSuccess);
  // A device that failed is tried again: another process may have released it.
  machine.devices()[0].answers = true;
  EXPECT_OK(run_on(softmax(0), 0));
}

TEST(CudaMachines, WhereNoDeviceServesTheBackendSaysWhy) {
  const RecordedCuda machine({kT4, kT4});
  std::string text;
  EXPECT_REFUSED(describe(&text), backend_unavailable, "device 0 (Tesla T4)");
  EXPECT_EQ(text, "");
  EXPECT_REFUSED(run_on(softmax(1), 1), backend_unavailable, "device 1 (Tesla T4)");
}

// Every op reports the wrong name; finding the device alone does not.
TEST(CudaMachines, KernelsThatTheDeviceHasNotAreAnError) {
  setenv("LOGITLESS_CUDA_KERNELS", "fast", 1);
  const RecordedCuda machine({kA100});
  for (const Status& status : {run_on(linear(0), 0), run_on(softmax(0), 0), warmup(on(0))}) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_STREQ(
        status.message(),
        "cuda: LOGITLESS_CUDA_KERNELS is \"fast\"; allowed on device 0 (A100): portable, sm80");
  }
  unsetenv("LOGITLESS_CUDA_KERNELS");  // the variable is read at the first call
}

TEST(CudaMachines, ADriverMayComeLate) {
  RecordedCuda machine({kA100});
  std::string text;
  machine.driver_version = 0;
  EXPECT_REFUSED(describe(&text), backend_unavailable, "no NVIDIA driver found");
  machine.driver_version = 11080;
  EXPECT_REFUSED(run_on(softmax(0), 0), backend_unavailable, "the driver is for CUDA 11.8");
  machine.driver_version = 13000;
  std::vector<RecordedCuda::Device> none;
  std::swap(none, machine.devices());
  EXPECT_REFUSED(run_on(softmax(0), 0), backend_unavailable, "no device");
  std::swap(none, machine.devices());
  EXPECT_EQ(machine.last_error(), cudaSuccess);
  EXPECT_OK(run_on(softmax(0), 0));
  EXPECT_OK(describe(&text));
}

// libcuda, needed to allow more shared memory, is not remembered as absent either.
TEST(CudaMachines, ADriversLibraryMayComeLate) {
  RecordedCuda machine({kH100});
  Softmax op = softmax(0);
  op.logits = matrix(0, 1, 4, 50000);
  op.probabilities = matrix(0, 2, 4, 50000);
  machine.libraries.erase(machine.libraries.begin());
  EXPECT_REFUSED(run_on(op, 0), backend_unavailable, "libcuda.so.1");
  EXPECT_EQ(machine.launches(), 0);
  machine.libraries.emplace_back("libcuda.so.1");
  EXPECT_OK(run_on(op, 0));
}

// Drivers before CUDA 12.4 cannot list the kernels of a file.
TEST(CudaMachines, WarmupLoadsWhatTheDriverCanName) {
  const char* names[] = {"cuFuncGetModule", "cuModuleGetFunctionCount",
                         "cuModuleEnumerateFunctions", "cuFuncLoad"};
  int files = 0;
  {
    const RecordedCuda machine({kA100});
    cuda::LoadedKernels loaded;
    EXPECT_OK(cuda::load_kernels(&loaded));
    EXPECT_GT(loaded.files, 0);
    EXPECT_EQ(loaded.kernels, 3 * loaded.files);
    files = loaded.files;
  }
  for (const char* name : names) {
    RecordedCuda machine({kA100});
    machine.driver_version = CUDART_VERSION / 1000 * 1000;
    machine.lacking = {name};
    cuda::LoadedKernels loaded;
    EXPECT_OK(cuda::load_kernels(&loaded));
    EXPECT_EQ(loaded.files, files);
    EXPECT_EQ(loaded.kernels, 0);
    EXPECT_OK(warmup(on(0)));
    EXPECT_OK(run_on(softmax(0), 0));
  }
}

TEST(CudaMachines, WarmupSaysWhatFails) {
  RecordedCuda machine({kA100});
  machine.failing_creates = 1;
  EXPECT_REFUSED(warmup(on(0)), device_error, "cublasLtCreate returned 3");
  EXPECT_OK(warmup(on(0)));
}

TEST(CudaMachines, CublasLtMayBeAbsentAndComeLate) {
  RecordedCuda machine({kA100});
  machine.libraries = {"libcuda.so.1"};
  std::string text;
  EXPECT_OK(describe(&text));
  EXPECT_NE(text.find("neither libcublasLt.so.13 nor libcublasLt.so.12 was found"),
            std::string::npos)
      << text;
  EXPECT_OK(warmup(on(0)));
  EXPECT_OK(run_on(softmax(0), 0));
  EXPECT_REFUSED(run_on(linear(0), 0), backend_unavailable, "libcublasLt.so.12");
  machine.libraries.emplace_back("libcublasLt.so.12");  // as loaded by another package
  EXPECT_OK(run_on(linear(0), 0));
  EXPECT_OK(describe(&text));
  EXPECT_NE(text.find("cuBLASLt 13.1.0"), std::string::npos) << text;
}

TEST(CudaMachines, ACublasLtThatLacksAFunctionIsLeftForAnother) {
  RecordedCuda machine({kA100});
  machine.lacking = {"cublasLtMatmulAlgoCheck"};
  machine.lacking_library = "libcublasLt.so.13";
  const int before = machine.opened();
  EXPECT_REFUSED(run_on(linear(0), 0), backend_unavailable,
                 "libcublasLt.so.13 has no function cublasLtMatmulAlgoCheck");
  EXPECT_EQ(machine.opened(), before) << "closed again";
  machine.libraries.emplace_back("libcublasLt.so.12");
  EXPECT_OK(run_on(linear(0), 0));
}

// In f32 the block of logits, unused while grad_input is made, holds the parts of a split depth. In
// the minimum workspace it is smaller than cuBLASLt's own workspace, which is lent instead.
TEST(CudaMachines, ABlockOfLogitsIsLentToASplitProduct) {
  RecordedCuda machine({kH100});
  machine.split = {{{.parts = 8, .workspace_bytes = size_t{130} * 64 * 4}}};
  const LinearCrossEntropyForwardBackward op{.input = matrix(0, 1, 130, 64),
                                             .weight = matrix(0, 2, 30000, 64),
                                             .target = vector(0, 3, DType::i32, 130),
                                             .loss = vector(0, 4, DType::f32, 1),
                                             .grad_input = matrix(0, 5, 130, 64),
                                             .grad_weight = matrix(0, 6, 30000, 64)};
  WorkspaceSize size;
  EXPECT_OK(workspace(op, on(0), &size));
  void* const memory = reinterpret_cast<void*>(int64_t{9} << 40);
  EXPECT_OK(run(op, {memory, size.minimum}, on(0)));
  EXPECT_EQ(machine.split_products(), 0);
  EXPECT_OK(run(op, {memory, size.recommended}, on(0)));
  EXPECT_EQ(machine.split_products(), 1);
}

TEST(CudaMachines, AHandleThatWasNotToBeHadIsAskedForAgain) {
  RecordedCuda machine({kA100});
  machine.failing_creates = 1;
  EXPECT_REFUSED(run_on(linear(0), 0), device_error, "cublasLtCreate returned 3");
  EXPECT_EQ(machine.launches(), 0);
  EXPECT_OK(run_on(linear(0), 0));
  EXPECT_GT(machine.launches(), 0);
}

}  // namespace
}  // namespace logitless
