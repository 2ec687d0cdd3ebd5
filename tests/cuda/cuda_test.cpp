// SPDX-License-Identifier: Apache-2.0
// What CUDA promises beyond the contract's common part: calls enqueue and do not wait, any thread
// may call, a graph may capture a call, and the caller's device and errors stay unchanged.
#include <atomic>
#include <chrono>
#include <thread>

#include "resident.h"
#include "src/cuda/runtime/warmup.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Cuda : public ConformanceTest {
 protected:
  Case everything(Shape shape = {70, 40, 515}) const {
    Case c{.op = op_, .shape = shape, .dtype = dtype_};
    apply_everything(c);
    c.fault = true;
    return c;
  }
  Case plain(Shape shape = {33, 64, 300}) const {
    return {.op = op_, .shape = shape, .dtype = dtype_, .statistics = true};
  }
  // Calls f(problem, its Resident) for each case.
  template <class F>
  void with_resident(const std::vector<Case>& cases, F&& f) {
    for (const Case& c : cases) {
      with_op(op_, [&](auto op) {
        Problem<decltype(op)> p = build<decltype(op)>(c);
        Resident<decltype(op)> resident(device_, p);
        f(p, resident);
      });
    }
  }
};

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

// A gate that a stream waits for, until it is opened or ten seconds have passed.
struct Gate {
  std::atomic<bool> open{false}, gave_up{false};
  static void CUDART_CB wait(void* gate) {
    auto* g = static_cast<Gate*>(gate);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!g->open) {
      if (std::chrono::steady_clock::now() > end) {
        g->gave_up = true;
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
};

// A call must return while earlier work on its stream still runs.
template <class Op>
void expect_no_wait(Resident<Op>& resident, const Problem<Op>& p, const TestDevice& device) {
  ASSERT_CUDA(cudaStreamSynchronize(resident.stream()));
  Gate gate;
  ASSERT_CUDA(cudaLaunchHostFunc(resident.stream(), Gate::wait, &gate));
  const Status status = resident.run();
  const cudaError_t stream = cudaStreamQuery(resident.stream());
  gate.open = true;
  ASSERT_CUDA(cudaStreamSynchronize(resident.stream()));
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_FALSE(gate.gave_up) << "the call waited for the stream";
  EXPECT_EQ(stream, cudaErrorNotReady);
  const Comparison result = compare(expected(device, p.op, p.model), resident.fields());
  EXPECT_TRUE(result.ok()) << result.report;
}

// First in the file, so that no other test has run anything of the backend before.
TEST_P(Cuda, AfterWarmupTheFirstCallDoesNotWait) {
  if (is_linear(op_)) {
    std::printf("[ not promised ] cuda: cuBLASLt loads its kernels at a product's first run\n");
    return;
  }
  const Status status = warmup(device_.execution());
  ASSERT_TRUE(status.ok()) << status.message();
  with_resident({plain(), everything()},
                [&](auto& p, auto& resident) { expect_no_wait(resident, p, device_); });
}

TEST_P(Cuda, NoCallWaits) {
  with_resident({plain(), everything()}, [&](auto& p, auto& resident) {
    ASSERT_TRUE(resident.run().ok());
    resident.upload();
    expect_no_wait(resident, p, device_);
  });
}

TEST_P(Cuda, WarmupLoadsEveryFilesKernels) {
  cuda::LoadedKernels loaded;
  const Status status = cuda::load_kernels(&loaded);
  ASSERT_TRUE(status.ok()) << status.message();
  std::printf("[ kernels  ] %d in %d files\n", loaded.kernels, loaded.files);
  EXPECT_GT(loaded.files, 0);
  // each file has its own kernels and one that names the file
  EXPECT_GT(loaded.kernels, 2 * loaded.files);
  EXPECT_EQ(warmup({.device = {DeviceType::cuda, 4096}}).code(), StatusCode::wrong_device);
}

cudaGraphExec_t capture(cudaStream_t stream, const std::function<Status()>& run) {
  // In global mode the capture fails if any thread makes a call that captures forbid.
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = run();
  EXPECT_TRUE(status.ok()) << status.message();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  if (graph == nullptr) return nullptr;
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return executable;
}

// A replayed graph reads the current inputs and gives the bits of a direct call.
TEST_P(Cuda, AGraphReplaysTheCall) {
  ASSERT_TRUE(warmup(device_.execution()).ok());
  with_resident({plain(), everything(), everything({1, 33, 40})}, [&](auto& p, auto& resident) {
    const cudaGraphExec_t graph = capture(resident.stream(), [&] { return resident.run(); });
    ASSERT_NE(graph, nullptr);
    ASSERT_TRUE(resident.run().ok());
    const std::vector<std::byte> direct = resident.bits();
    for (int replay = 0; replay < 3; ++replay) {
      resident.upload();
      ASSERT_CUDA(cudaGraphLaunch(graph, resident.stream()));
      ASSERT_EQ(resident.bits(), direct) << "replay " << replay;
    }
    change_inputs(p.op);
    resident.upload();
    ASSERT_CUDA(cudaGraphLaunch(graph, resident.stream()));
    const Comparison result = compare(expected(device_, p.op, p.model), resident.fields());
    EXPECT_TRUE(result.ok()) << result.report;
    const std::vector<std::byte> replayed = resident.bits();
    resident.upload();
    ASSERT_TRUE(resident.run().ok());
    EXPECT_EQ(resident.bits(), replayed);
    EXPECT_NE(replayed, direct);
    ASSERT_CUDA(cudaGraphExecDestroy(graph));
  });
}

TEST_P(Cuda, AThousandRunsGiveTheSameBits) {
  with_resident({everything()}, [&](auto&, auto& resident) {
    ASSERT_TRUE(resident.run().ok());
    const std::vector<std::byte> first = resident.bits();
    for (int i = 1; i < 1000; ++i) {
      resident.upload();
      ASSERT_TRUE(resident.run().ok());
      ASSERT_EQ(resident.bits(), first) << "run " << i;
    }
  });
}

// A thread that has not called CUDA before, such as one of autograd's, has a current device but no
// context.
TEST_P(Cuda, TheFirstCallOfAThread) {
  Case c{.op = op_, .shape = {150, 64, 700}, .dtype = dtype_};
  c.grad_input = c.grad_weight = dtype_;
  with_resident({c}, [&](auto&, auto& resident) {
    ASSERT_TRUE(resident.run().ok());
    const std::vector<std::byte> here = resident.bits();
    resident.upload();
    ASSERT_CUDA(cudaDeviceSynchronize());
    Status status;
    std::thread([&] { status = resident.run(); }).join();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(resident.bits(), here);
  });
}

TEST_P(Cuda, ThreadsOnStreamsOfTheirOwn) {
  const Case c = everything();
  const Outcome alone = run_case(device_, c);
  ASSERT_TRUE(alone.status.ok()) << alone.status.message();
  std::vector<std::string> wrong(8);
  std::vector<std::thread> threads;
  for (std::string& message : wrong) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20 && message.empty(); ++i) {
        const Outcome outcome = run_case(device_, c);
        message = outcome.status.ok() ? differing_bits(alone.fields, outcome.fields)
                                      : outcome.status.message();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& message : wrong) EXPECT_EQ(message, "");
}

// The vocabulary is large enough that workspaces between the minimum and that of all of E have
// plans that keep a part of E.
TEST_P(Cuda, EveryPlanIsRight) {
  if (!is_linear(op_)) return;
  Case c{.op = op_, .shape = {130, 16, 30000}, .dtype = dtype_};
  const WorkspaceSize size = workspace_of(device_, c);
  std::vector<uint64_t> sizes;
  for (const double share : {0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5}) {
    sizes.push_back(bytes_of(size, share));
  }
  for (const double ignored : {0.0, 0.4}) {
    c.ignored = ignored;
    const Comparison result = judge_sizes(device_, c, sizes);
    EXPECT_TRUE(result.ok()) << result.report;
  }
}

// A call for one device works while another is current, and leaves that one current.
TEST_P(Cuda, TheCurrentDeviceIsLeftAsFound) {
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  with_resident({plain()}, [&](auto&, auto& resident) {
    ASSERT_TRUE(resident.run().ok());
    const std::vector<std::byte> first = resident.bits();
    int current = -1;
    ASSERT_CUDA(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    if (count < 2) {
      std::printf("[ one device ] calls from another were not made\n");
      return;
    }
    resident.upload();
    ASSERT_CUDA(cudaStreamSynchronize(resident.stream()));
    ASSERT_CUDA(cudaSetDevice(1));
    const Status status = resident.run();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(warmup(resident.execution()).ok());
    EXPECT_TRUE(warmup({.device = {DeviceType::cuda, 1}}).ok());
    ASSERT_CUDA(cudaGetDevice(&current));
    EXPECT_EQ(current, 1);
    ASSERT_CUDA(cudaSetDevice(0));
    EXPECT_EQ(resident.bits(), first);
  });
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

constexpr DType kTwo[] = {DType::f32, DType::bf16};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Cuda);
INSTANTIATE_TEST_SUITE_P(All, Cuda,
                         testing::Combine(testing::ValuesIn(cuda_alone()), testing::ValuesIn(kOps),
                                          testing::ValuesIn(kTwo)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
