// SPDX-License-Identifier: Apache-2.0
// Prints a digest of what a library writes: a line for each case of the conformance table but for
// divergences, with its name and its outputs' digests. scripts/compare-bits compares two of them.
// The program uses only the C interface, so it tests whichever liblogitless.so the loader finds.
//   --step 8      every eighth case; 1: all of them
//   --webgpu 1    the WebGPU backend instead of the CPU's
//   --sets 1      instead: prints the instruction sets of this machine
// The CPU runs the instruction set that LOGITLESS_CPU_TARGET names, on 1, 2 and 3 threads. Exit
// code 77: the library lacks that instruction set or device.
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "tests/guards/bits_webgpu.h"
#include "tests/reliability/report.h"
#include "tests/support/device_host.h"
#include "tests/support/judge.h"

namespace logitless::guards {
namespace {

using conformance::OpKind;
using conformance::Outcome;
using conformance::Part;
using conformance::Row;
using conformance::TestDevice;
using reliability::Digest;

constexpr int kSkipped = 77;

int print_sets() {
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    std::printf("%s\n", hwy::TargetName(rest & -rest));
  }
  return 0;
}

template <class T>
uint64_t digest_of(const T& bytes) {
  Digest digest;
  digest.add(bytes.data(), bytes.size());
  return digest.value();
}

void print(const std::string& name, int threads, const Outcome& got) {
  std::printf("%s, %d threads: status=%d", name.c_str(), threads,
              static_cast<int>(got.status.code()));
  for (const auto& [output, field] : got.fields) {
    std::printf(" %s=%016" PRIx64, output.c_str(), digest_of(field.bits));
  }
  std::printf(" fault=%" PRId64, got.fault);
  // A byte outside the outputs has changed.
  for (const std::string& violation : got.violations) {
    std::printf(" guards=%016" PRIx64, digest_of(violation));
  }
  std::printf("\n");
}

void run(const TestDevice& device, const Row& row) {
  conformance::with_op(row.c.op, [&](auto op) {
    const auto problem = conformance::build<decltype(op)>(row.c);
    for (int threads = 1; threads <= (device.synchronous() ? 3 : 1); ++threads) {
      logitless_set_num_threads(threads);
      print(row.name, threads,
            conformance::execute(device, problem.op, problem.pool, {.memory = row.memory}));
    }
  });
}

// `seed` picks another part of the cases for each instruction set.
void run_table(const TestDevice& device, size_t step, uint64_t seed) {
  for (const OpKind op : reliability::kOps) {
    for (const DType dtype : reliability::kDtypes) {
      const Part part{(seed + static_cast<size_t>(op) * 5 + static_cast<size_t>(dtype)) % step,
                      step};
      for (const Row& row : conformance::pair_rows(op, dtype, part)) run(device, row);
      for (const Row& row : conformance::shape_rows(op, dtype, part)) run(device, row);
    }
  }
}

int run_cpu(size_t step) {
  const char* wanted = std::getenv("LOGITLESS_CPU_TARGET");
  char runs[256] = "";
  logitless_describe_backend(LOGITLESS_CPU, runs, sizeof(runs), nullptr);
  if (wanted != nullptr && std::string(runs).rfind(std::string(wanted) + ",", 0) != 0) {
    std::printf("skipped: the library has no code for %s\n", wanted);
    return kSkipped;
  }
  const conformance::HostDevice cpu("cpu", DeviceType::cpu);
  run_table(cpu, step, digest_of(std::string(wanted == nullptr ? "" : wanted)) % 1000);
  return 0;
}

int run_webgpu(size_t step) {
  const conformance::Found found = find_webgpu();
  if (found.device == nullptr) {
    std::printf("skipped: %s\n", found.reason.c_str());
    return kSkipped;
  }
  run_table(*found.device, step, 0);
  return 0;
}

}  // namespace
}  // namespace logitless::guards

int main(int argc, char** argv) {
  using namespace logitless;
  if (reliability::option(argc, argv, "--sets", 0) != 0) return guards::print_sets();
  Dl_info library;
  if (dladdr(dlsym(RTLD_DEFAULT, "logitless_run"), &library) == 0) {
    reliability::broken("no library");
  }
  std::printf("library: %s\n", library.dli_fname);
  const int64_t step = reliability::option(argc, argv, "--step", 8);
  if (step < 1) reliability::broken("--step is %" PRId64 "; allowed: >= 1", step);
  const bool webgpu = reliability::option(argc, argv, "--webgpu", 0) != 0;
  const auto cases = static_cast<size_t>(step);
  return webgpu ? guards::run_webgpu(cases) : guards::run_cpu(cases);
}
