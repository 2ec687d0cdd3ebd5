// SPDX-License-Identifier: Apache-2.0
// Prints what every planner decides for thousands of calls, a line per call, device and memory, as
//   lin-both bf16 8192x4096x128256 gw=f32 | sm90x132 | 256M | kind=mixed chunk=8192 ...
// The lines are sorted, so that two prints can be compared: golden.py. Exit code 77: this build
// lacks kernels.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "assumed.h"
#include "plan_facts.h"

namespace logitless::guards {
namespace {

constexpr int64_t kDrawn = 9600;

// A call, and the devices and memories for which to plan it.
struct Asked {
  Call call;
  uint32_t devices = 0;   // bit i: assumed_devices()[i]
  uint32_t memories = 0;  // bit i: kMemories[i]
};

// Returns the named calls for every device and memory, except CPUs equal to another one. Each
// random call gets up to three memories on one CUDA device, preferably one with kernels of its own;
// half of these calls get another device too.
std::vector<Asked> all_asked() {
  std::vector<uint32_t> cuda, others;
  uint32_t well_known = 0, bit = 1;
  for (const Assumed& assumed : assumed_devices()) {
    (assumed.device.type == DeviceType::cuda ? cuda : others).push_back(bit);
    if (assumed.name.starts_with("sm90")) cuda.push_back(bit);
    if (assumed.well_known) well_known |= bit;
    bit <<= 1;
  }
  std::vector<Asked> all;
  for (const Call& call : named_calls()) all.push_back({call, well_known, ~0u});
  Random random(2);
  const auto any = [&](const std::vector<uint32_t>& bits) {
    return bits[static_cast<size_t>(random.below(static_cast<int64_t>(bits.size())))];
  };
  for (const Call& call : drawn_calls(kDrawn)) {
    Asked asked{call, any(cuda)};
    if (random.once_in(2)) asked.devices |= any(others);
    for (int i = 0; i < 3; ++i) asked.memories |= 1u << random.below(std::size(kMemories));
    all.push_back(asked);
  }
  return all;
}

std::vector<std::string> lines_of(const Asked& asked, const Assumed& assumed) {
  const AnyOp op = op_of(asked.call, assumed.device);
  const std::string head = asked.call.text() + " | " + assumed.name + " | ";
  const Sizes sizes = sizes_of(op, assumed);
  std::vector<std::string> lines{head + "sizes | " + sizes.text};
  if (!sizes.ok || asked.call.lacks_address()) return lines;
  for (size_t i = 0; i < std::size(kMemories); ++i) {
    const uint64_t bytes = kMemories[i].bytes(sizes.minimum, sizes.recommended);
    if ((asked.memories >> i & 1) == 0 || bytes < sizes.minimum) continue;
    const std::string decision = decision_of(op, assumed, bytes);
    if (!decision.empty()) lines.push_back(head + kMemories[i].name + " | " + decision);
  }
  return lines;
}

// Calls f(i) for every i below count, on two threads or more.
template <class F>
void in_parallel(size_t count, F&& f) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(2u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (size_t i; (i = next++) < count;) f(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::string> all_lines(const std::vector<Asked>& all, std::string_view kernels) {
  const std::vector<Assumed> devices = assumed_devices();
  std::vector<std::vector<std::string>> found(all.size());
  in_parallel(all.size(), [&](size_t i) {
    for (size_t d = 0; d < devices.size(); ++d) {
      if ((all[i].devices >> d & 1) == 0 || devices[d].kernels != kernels) continue;
      const auto lines = lines_of(all[i], devices[d]);
      found[i].insert(found[i].end(), lines.begin(), lines.end());
    }
  });
  std::vector<std::string> flat;
  for (const auto& lines : found) flat.insert(flat.end(), lines.begin(), lines.end());
  return flat;
}

// Makes the lines for this machine. Lazy initialization happens here, before threads start.
std::vector<std::string> lines_on_machine(const std::vector<Asked>& all, const char* kernels) {
  const AssumedMachine machine(kernels);
  for (const Assumed& assumed : assumed_devices()) {
    if (assumed.device.type != DeviceType::cuda) continue;
    (void)sizes_of(op_of(all[0].call, assumed.device), assumed);
  }
  return all_lines(all, kernels);
}

int print_plans() {
  if (!has_hoppers_kernels()) {
    std::puts("this build lacks Hopper's kernels (LOGITLESS_CUDA_ARCHITECTURES)");
    return 77;
  }
  const std::vector<Asked> all = all_asked();
  for (const Asked& asked : all) {
    const std::string wrong = check_sizes(op_of(asked.call, {DeviceType::cpu, 0}));
    if (wrong.empty()) continue;
    std::fprintf(stderr, "%s: %s\n", asked.call.text().c_str(), wrong.c_str());
    return 1;
  }
  std::vector<std::string> lines;
  for (const char* kernels : {"", "portable", "sm80"}) {
    for (std::string& line : lines_on_machine(all, kernels)) lines.push_back(std::move(line));
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) std::puts(line.c_str());
  return 0;
}

}  // namespace
}  // namespace logitless::guards

int main() { return logitless::guards::print_plans(); }
