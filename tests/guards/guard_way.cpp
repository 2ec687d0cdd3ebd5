// SPDX-License-Identifier: Apache-2.0
// This program prints the way of a call, for every op on every backend: where it was when something
// was launched. There is a line for each way, with the addresses in this program of the calls that
// were open, innermost first:
//   sm90 lin-both bf16 8192x768x50257 | 1a2b3c 1a2b40 ...
// CUDA's devices are assumed, WebGPU's is on paper; on the CPU it is the first touch of each page
// of the workspace that tells. Exit code 1 says that a backend lacks an op, 77 that this build
// lacks kernels.
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "assumed.h"
#include "logitless/webgpu.h"
#include "plan_calls.h"
#include "tests/webgpu/paper_wgpu.h"

namespace logitless::guards {
namespace {

constexpr uintptr_t kNowhere = uintptr_t{0x7e} << 40;  // it lies behind every tensor of a call

using Way = std::vector<uintptr_t>;
std::set<Way> ways;  // they belong to the call that runs

uintptr_t start_of_program() {
  Dl_info info;
  dladdr(reinterpret_cast<const void*>(&start_of_program), &info);
  return reinterpret_cast<uintptr_t>(info.dli_fbase);
}

void note_way() {
  void* frames[64];
  const int count = backtrace(frames, 64);
  static const uintptr_t start = start_of_program();
  Way way;
  for (int i = 0; i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0) continue;
    const bool own = reinterpret_cast<uintptr_t>(info.dli_fbase) == start;
    // A frame holds where a call returns to, behind the call itself.
    if (own) way.push_back(reinterpret_cast<uintptr_t>(frames[i]) - start - 1);
  }
  ways.insert(way);
}

class Launches final : public cuda::RecordedCuda::Listener {
 public:
  void launch(const cudaLaunchConfig_t&, const void*, void**, const cuda::Parameter*,
              int) override {
    note_way();
  }
  void copy(void*, const void*, size_t) override { note_way(); }
  void multiply(const Operands&, std::array<const void*, 6>, const cuda::lt::Algorithm&, void*,
                size_t) override {
    note_way();
  }
  void encode(const Map&, CUtensorMap*) override {}
  void* layout(int, uint64_t, uint64_t, int64_t) override { return this; }
  void* description(int, int) override { return this; }
  void* preference() override { return this; }
  void set(void*, int, const void*, size_t) override {}
  void choose(const Operands&, void*, cuda::lt::Algorithm*) override {}
};

// Each page of this memory tells who touches it first.
class Watched {
 public:
  explicit Watched(uint64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) {
      note_way();
      const uintptr_t page = reinterpret_cast<uintptr_t>(info->si_addr) / kPage * kPage;
      if (mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE) != 0) std::abort();
    };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before_);
  }
  ~Watched() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(data_, bytes_);
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  static constexpr uintptr_t kPage = 4096;
  uint64_t bytes_;
  void* data_;
  struct sigaction before_ = {};
};

// A call runs here, with the workspace that it is given.
struct Where {
  const char* name;
  Execution execution;
};

Status run_with(const Where& where, const auto& op) {
  const Execution& execution = where.execution;
  WorkspaceSize size;
  const Status asked = workspace(op, execution, &size);
  if (!asked.ok()) return asked;
  switch (execution.device.type) {
    case DeviceType::webgpu:
      return run(op, WebGpuWorkspace(0, size.recommended).workspace(), execution);
    case DeviceType::cuda:  // CUDA's device is assumed, so nothing is written
      return run(op, {reinterpret_cast<void*>(kNowhere), size.recommended}, execution);
    default: {
      const Watched memory(size.recommended + 1);
      return run(op, {memory.workspace().data, size.recommended}, execution);
    }
  }
}

// Gives every tensor memory of zeros.
template <class Op>
std::list<std::vector<char>> give_memory(Op* op) {
  std::list<std::vector<char>> memory;
  const logitless_op unused{};
  for_each_tensor(*op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (!view) return;
    int64_t bytes = size_of(view.dtype);
    for (int d = 0; d < view.rank; ++d) bytes *= view.shape[static_cast<size_t>(d)];
    view.data = memory.emplace_back(static_cast<size_t>(bytes)).data();
  });
  return memory;
}

bool print_ways(const Where& where, const Call& call) {
  ways.clear();
  const DeviceType type = where.execution.device.type;
  const bool on_host = type == DeviceType::cpu || type == DeviceType::reference;
  const Status status = std::visit(
      [&](auto op) {
        std::list<std::vector<char>> memory;
        if (on_host) memory = give_memory(&op);
        return run_with(where, op);
      },
      op_of(call, on_host ? Device{DeviceType::cpu, 0} : where.execution.device));
  const std::string head = std::string(where.name) + " " + call.text();
  // The reference has no workspace, and the CPU none for softmax.
  if (!status.ok() || (ways.empty() && !on_host)) {
    std::printf("%s: %s\n", head.c_str(), status.ok() ? "nothing is launched" : status.message());
    return false;
  }
  for (const Way& way : ways) {
    std::printf("%s |", head.c_str());
    for (const uintptr_t address : way) std::printf(" %lx", static_cast<unsigned long>(address));
    std::puts("");
  }
  return true;
}

int print_all() {
  if (!has_hoppers_kernels()) {
    std::puts("this build lacks Hopper's kernels (LOGITLESS_CUDA_ARCHITECTURES)");
    return 77;
  }
  unsetenv("LOGITLESS_WEBGPU_LIBRARY");  // this program brings its own wgpu-native
  webgpu::paper_wgpu().on_dispatch = note_way;
  const Executor one{sizeof(Executor), 1, nullptr,
                     [](void*, int64_t items, void (*fn)(void*, int64_t), void* context) {
                       for (int64_t i = 0; i < items; ++i) fn(context, i);
                     }};
  bool all = true;
  for (int32_t kind = 0; kind <= LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD; ++kind) {
    const int64_t hidden = kind >= LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD ? 768 : 0;
    const Call small{.kind = kind,
                     .tokens = 64,
                     .hidden = hidden,
                     .vocab = 5000,
                     .dtype = DType::f32,
                     .grad = DType::f32,
                     .grad_weight = DType::f32};
    Call large = small;
    large.tokens = 8192, large.vocab = 50257;
    large.dtype = large.grad = large.grad_weight = DType::bf16;
    for (const bool portable : {false, true}) {
      Launches launches;
      AssumedMachine machine(portable);
      machine->listener = &launches;
      all &= print_ways({portable ? "portable" : "sm90", {.device = {DeviceType::cuda, 0}}}, large);
    }
    all &= print_ways({"webgpu", {.device = {DeviceType::webgpu, 0}}}, small);
    all &= print_ways({"cpu", {.device = {DeviceType::cpu, 0}, .executor = &one}}, small);
    Call tiny = small;
    tiny.tokens = 2, tiny.hidden = hidden > 0 ? 4 : 0, tiny.vocab = 5;
    all &= print_ways({"reference", {.device = {DeviceType::reference, 0}}}, tiny);
  }
  return all ? 0 : 1;
}

}  // namespace
}  // namespace logitless::guards

int main() { return logitless::guards::print_all(); }
