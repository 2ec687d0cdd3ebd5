// SPDX-License-Identifier: Apache-2.0
// Prints what a thousand calls launch on assumed CUDA devices: a line for each, with a digest of
// its transcript (transcript.h), sorted:
//   lin-both bf16 8192x4096x128256 gw=f32 | sm90x132 | 256M | launches=37 digest=0123456789abcdef
// With an argument it prints the transcripts of the calls whose line begins with it. Each call also
// runs through a plan, which must launch the same. Exit code 77: this build lacks kernels.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "assumed.h"
#include "plan_calls.h"
#include "transcript.h"

namespace logitless::guards {
namespace {

constexpr size_t kCalls = 1000;
constexpr uint64_t kWorkspace = uint64_t{0x7e} << 40;  // after every tensor of a call
// A plan of small chunks would launch hundreds of thousands of kernels.
constexpr int kMostLaunches = 400;

uint64_t digest_of(const std::string& text) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const char c : text) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return digest;
}

// Half of the calls are those of the well-known heads; the others are random.
std::vector<Call> calls() {
  std::vector<Call> all;
  const auto add = [&](const std::vector<Call>& from, size_t most) {
    const size_t step = std::max<size_t>(1, from.size() / (most - all.size()));
    for (size_t i = 0; i < from.size() && all.size() < most; i += step) {
      if (!from[i].lacks_address()) all.push_back(from[i]);
    }
  };
  add(named_calls(), kCalls / 2);
  add(drawn_calls(2 * kCalls), kCalls);
  return all;
}

template <class Op>
void name_tensors(Op op, Transcript* transcript) {
  const logitless_op unused{};
  for_each_tensor(op, unused, [&](const char* name, Access, TensorView& view, auto&&) {
    if (view) transcript->name(view.data, name);
  });
}

struct Run {
  std::string head, text;
  int launches = 0;
};

// Runs `op` through a plan that was created with other addresses of the same alignment.
template <class Op>
Status run_planned(const Op& op, const Workspace& workspace, const Execution& execution) {
  Op other = op;
  const logitless_op unused{};
  for_each_tensor(other, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (view) view.data = static_cast<char*>(view.data) + 4096;
  });
  Plan plan;
  const Status status = plan.create(other, execution, workspace.bytes);
  return status.ok() ? plan.run(Addresses(op), workspace, execution.stream) : status;
}

Run run_on(const Call& call, const Assumed& assumed, const MemorySize& memory,
           const FunctionNames& names, bool by_plan) {
  const AnyOp any = op_of(call, assumed.device);
  AssumedMachine machine(assumed.kernels);
  Transcript transcript(&names);
  transcript.name(reinterpret_cast<void*>(kWorkspace), "workspace");
  machine->listener = &transcript;
  machine->most_launches = kMostLaunches;
  Status status = std::visit(
      [&](const auto& op) {
        name_tensors(op, &transcript);
        WorkspaceSize size;
        const Execution execution{.device = assumed.device};
        const Status asked = workspace(op, execution, &size);
        if (!asked.ok()) return asked;
        const uint64_t bytes = std::max(size.minimum, memory.bytes(size.minimum, size.recommended));
        const Workspace given{reinterpret_cast<void*>(kWorkspace), bytes};
        return by_plan ? run_planned(op, given, execution) : run(op, given, execution);
      },
      any);
  std::string text = transcript.text();
  if (!status.ok()) text += std::string("status: ") + status.message() + "\n";
  if (machine->fault()[0] != 0) text += std::string("broken rule: ") + machine->fault() + "\n";
  return {call.text() + " | " + assumed.name + " | " + memory.name, text, transcript.launches()};
}

int print_launches(const char* wanted) {
  if (!has_hoppers_kernels()) {
    std::puts("this build lacks Hopper's kernels (LOGITLESS_CUDA_ARCHITECTURES)");
    return 77;
  }
  const std::vector<Assumed> devices = assumed_cuda_devices();
  const FunctionNames names;
  std::vector<std::string> lines;
  Random random(3);
  for (const Call& call : calls()) {
    const Assumed& assumed = devices[static_cast<size_t>(random.below(std::ssize(devices)))];
    const MemorySize& memory = random.of(kMemories);
    const Run run = run_on(call, assumed, memory, names, false);
    if (run_on(call, assumed, memory, names, true).text != run.text) {
      std::printf("by a plan other than at once: %s\n", run.head.c_str());
      return 1;
    }
    if (wanted == nullptr) {
      char end[64];
      std::snprintf(end, sizeof(end), " | launches=%d digest=%016lx", run.launches,
                    digest_of(run.text));
      lines.push_back(run.head + end);
    } else if (run.head.starts_with(wanted)) {
      std::printf("== %s\n%s", run.head.c_str(), run.text.c_str());
    }
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) std::puts(line.c_str());
  return 0;
}

}  // namespace
}  // namespace logitless::guards

int main(int count, char** words) {
  return logitless::guards::print_launches(count > 1 ? words[1] : nullptr);
}
