// SPDX-License-Identifier: Apache-2.0
// Prints a digest of what the CUDA backend writes on this machine's GPU: a line for each case of
// the conformance table but for divergences, with its name and its outputs' digests. Compare the
// output of two builds as text; LOGITLESS_CUDA_KERNELS picks an engine.
//   --step 8      every eighth case; 1: all of them
// Exit code 77: there is no such device.
#include <cstdio>

#include "tests/reliability/report.h"
#include "tests/support/device.h"
#include "tests/support/judge.h"

namespace logitless::guards {
namespace {

template <class T>
uint64_t digest_of(const T& bytes) {
  reliability::Digest digest;
  digest.add(bytes.data(), bytes.size());
  return digest.value();
}

void run(const conformance::TestDevice& device, const conformance::Row& row) {
  conformance::with_op(row.c.op, [&](auto op) {
    const auto problem = conformance::build<decltype(op)>(row.c);
    const conformance::Outcome got =
        conformance::execute(device, problem.op, problem.pool, {.memory = row.memory});
    std::printf("%s: status=%d", row.name.c_str(), static_cast<int>(got.status.code()));
    for (const auto& [output, field] : got.fields) {
      std::printf(" %s=%016" PRIx64, output.c_str(), digest_of(field.bits));
    }
    std::printf(" fault=%" PRId64 " violations=%zu\n", got.fault, got.violations.size());
  });
}

}  // namespace
}  // namespace logitless::guards

int main(int argc, char** argv) {
  using namespace logitless;
  const conformance::Found found = conformance::find_cuda_device();
  if (found.device == nullptr) {
    std::printf("skipped: %s\n", found.reason.c_str());
    return 77;
  }
  const auto step = static_cast<size_t>(reliability::option(argc, argv, "--step", 1));
  for (const auto op : reliability::kOps) {
    for (const DType dtype : reliability::kDtypes) {
      const conformance::Part part{
          (static_cast<size_t>(op) * 5 + static_cast<size_t>(dtype)) % step, step};
      for (const auto& row : conformance::pair_rows(op, dtype, part)) {
        guards::run(*found.device, row);
      }
      for (const auto& row : conformance::shape_rows(op, dtype, part)) {
        guards::run(*found.device, row);
      }
    }
  }
  return 0;
}
