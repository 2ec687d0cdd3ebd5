// SPDX-License-Identifier: Apache-2.0
// Measures the host time of a linear op on CUDA: microseconds of planning, checks and launches on a
// simulated H100 (tests/cuda/recorded.h), the least of many.
//   logitless_host_calls        a thread's first call, then the same call again, and by a plan
//   logitless_host_calls OLD    the same, compared with OLD, an older build of this program
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "logitless/logitless.h"
#include "tests/cuda/recorded.h"

namespace logitless {
namespace {

constexpr int kThreads = 40, kAgain = 20, kTurns = 6;

// Fake addresses, 256 GiB apart: nothing is read or written there.
class Tensors {
 public:
  TensorView operator()(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v{.data = next(),
                 .dtype = dtype,
                 .device = {DeviceType::cuda, 0},
                 .rank = static_cast<int32_t>(shape.size())};
    std::copy(shape.begin(), shape.end(), v.shape.begin());
    v.stride = {v.rank == 2 ? v.shape[1] : 1, 1};
    return v;
  }
  void* next() { return reinterpret_cast<void*>(next_ += uint64_t{1} << 38); }

 private:
  uint64_t next_ = uint64_t{1} << 40;
};

struct Head {
  const char* name;
  int64_t tokens, hidden, vocab;
};
constexpr Head kHeads[] = {
    {"tiny", 4, 16, 32}, {"gpt-2", 20480, 768, 50257}, {"llama-3", 8192, 4096, 128256}};

template <class Op>
Op op_of(const Head& h, Tensors* tensors) {
  Op op;
  op.input = (*tensors)(DType::bf16, {h.tokens, h.hidden});
  op.weight = (*tensors)(DType::bf16, {h.vocab, h.hidden});
  op.target = (*tensors)(DType::i32, {h.tokens});
  op.loss = (*tensors)(DType::f32, {});
  if constexpr (GradientOp<Op>) {
    op.grad_input = (*tensors)(DType::bf16, {h.tokens, h.hidden});
    op.grad_weight = (*tensors)(DType::bf16, {h.vocab, h.hidden});
  }
  return op;
}

void expect_ok(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "host_calls: %s\n", status.message());
  std::exit(1);
}

class Times {
 public:
  template <class F>
  void time(const std::string& name, int count, F&& call) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) expect_ok(call());
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - start;
    double& least = least_.try_emplace(name, 1e30).first->second;
    least = std::min(least, spent.count() / count);
  }
  void print() const {
    for (const auto& [name, us] : least_) std::printf("%s\t%.2f\n", name.c_str(), us);
  }

 private:
  std::map<std::string, double> least_;
};

template <class Op>
void measure(const char* kind, const Head& head, Times* times) {
  Tensors tensors;
  const Op op = op_of<Op>(head, &tensors);
  const Execution execution{.device = {DeviceType::cuda, 0}};
  void* memory = tensors.next();
  WorkspaceSize size;
  expect_ok(workspace(op, execution, &size));
  for (const bool recommended : {false, true}) {
    const std::string name =
        std::string(head.name) + ", " + kind + ", " + (recommended ? "recommended: " : "minimum: ");
    const Workspace scratch{memory, recommended ? size.recommended : size.minimum};
    const auto sizes = [&] { return workspace(op, execution, &size); };
    const auto runs = [&] { return run(op, scratch, execution); };
    Plan plan;
    expect_ok(plan.create(op, execution, scratch.bytes));
    const auto plans = [&] { return plan.run(Addresses(op), scratch); };
    for (int i = 0; i < kThreads; ++i) {
      std::thread([&] {
        times->time(name + "1 run alone", 1, runs);
        times->time(name + "4 run again", kAgain, runs);
        times->time(name + "5 run of a plan", kAgain, plans);
      }).join();
      std::thread([&] {
        times->time(name + "2 workspace", 1, sizes);
        times->time(name + "3 run after it", 1, runs);
      }).join();
    }
  }
}

void print_times() {
  setenv("LOGITLESS_CUDA_KERNELS", "", 1);
  const cuda::RecordedCuda machine({{"H100", 9, 0, true, 132, 232448}});
  Times times;
  for (const Head& head : kHeads) {
    measure<LinearCrossEntropyForward>("loss", head, &times);
    measure<LinearCrossEntropyForwardBackward>("loss and gradients", head, &times);
  }
  times.print();
}

// Merges the times that a program prints.
void read_times(const char* program, std::map<std::string, double>* least) {
  FILE* output = popen(program, "r");
  char name[128];
  double us;
  while (output != nullptr && std::fscanf(output, "%127[^\t]\t%lf\n", name, &us) == 2) {
    double& one = least->try_emplace(name, us).first->second;
    one = std::min(one, us);
  }
  if (output == nullptr || pclose(output) != 0) std::exit(1);
}

void compare(const char* old_program, const char* new_program) {
  std::map<std::string, double> before, now;
  for (int turn = 0; turn < kTurns; ++turn) {
    read_times(old_program, &before);
    read_times(new_program, &now);
  }
  std::printf("%-52s %9s %9s %6s\n", "us on the host", "old", "new", "ratio");
  for (const auto& [name, us] : now) {
    std::printf("%-52s %9.2f %9.2f %6.2f\n", name.c_str(), before[name], us, us / before[name]);
  }
}

}  // namespace
}  // namespace logitless

int main(int count, char** words) {
  if (count > 1) {
    logitless::compare(words[1], words[0]);
  } else {
    logitless::print_times();
  }
}
