// SPDX-License-Identifier: Apache-2.0
// Checks that softmax and cross-entropies give the same bits in every run: on 1 to 8 threads of the
// library's own pool, with different previous contents of memory, and in every second run with
// other load and other calls at the same time. Prints one digest of all outputs, which must be the
// same in every process.
//   --runs 1000   runs of each case
//   --device 0    1: the CUDA device instead of the CPU
#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include "tests/reliability/report.h"
#include "tests/support/judge.h"

namespace logitless::reliability {
namespace {

using conformance::Case;
using conformance::Fields;
using conformance::Outcome;
using conformance::TestDevice;

// The cases have several tiles with a ragged end; every second one has many options at once.
std::vector<Case> cases() {
  constexpr conformance::Shape shapes[] = {{33, 40, 300}, {9, 70, 131}};
  std::vector<Case> all;
  for (const conformance::OpKind op : kOps) {
    for (const DType dtype : kDtypes) {
      Case c{.op = op, .shape = shapes[all.size() % 2], .dtype = dtype};
      c.seed = all.size() + 1;
      if (all.size() % 2 == 0) conformance::apply_everything(c);
      all.push_back(c);
    }
  }
  return all;
}

// Until destroyed, two threads compute, and one calls the library.
class Load {
 public:
  explicit Load(const TestDevice& device) {
    for (int i = 0; i < 2; ++i) {
      threads_.emplace_back([this] {
        for (volatile uint64_t x = 1; !stop_;) x = x * 3 + 1;
      });
    }
    threads_.emplace_back([this, &device] {
      const Case c{.op = conformance::OpKind::forward_backward, .shape = {20, 1, 400}};
      while (!stop_) conformance::run_case(device, c);
    });
  }
  ~Load() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

void add(const Fields& fields, Digest* digest, int64_t* bytes) {
  for (const auto& [name, field] : fields) {
    digest->add(name.data(), name.size());
    digest->add(field.bits.data(), field.bits.size());
    *bytes += static_cast<int64_t>(field.bits.size());
  }
}

int run(int64_t runs, const TestDevice& device) {
  const std::vector<Case> all = cases();
  std::vector<Fields> first;
  Digest digest;
  int64_t bytes = 0;
  for (int64_t r = 0; r < runs; ++r) {
    const int threads = logitless_set_num_threads(static_cast<int32_t>(1 + r % 8));
    const auto load = r % 2 == 1 ? std::make_unique<Load>(device) : nullptr;
    for (size_t i = 0; i < all.size(); ++i) {
      const std::byte fill{static_cast<unsigned char>(r % 3 == 0 ? 0xFF : r)};
      const Outcome got = conformance::run_case(device, all[i], {.fill = fill});
      const std::string name = describe(all[i]);
      if (!got.status.ok()) broken("%s: %s", name.c_str(), got.status.message());
      if (!got.violations.empty()) broken("%s: %s", name.c_str(), got.violations[0].c_str());
      Digest unused;
      add(got.fields, r == 0 ? &digest : &unused, &bytes);
      if (r == 0) {
        first.push_back(got.fields);
        continue;
      }
      const std::string differ = differing_bits(first[i], got.fields);
      if (!differ.empty()) {
        broken("%s: run %" PRId64 ", %d threads: %s differs", name.c_str(), r, threads,
               differ.c_str());
      }
    }
  }
  figure("cases", static_cast<int64_t>(all.size()));
  figure("runs", runs);
  figure("bytes", bytes);
  std::printf("digest: %016" PRIx64 "\n", digest.value());
  return 0;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  using namespace logitless;
  const bool cuda = reliability::option(argc, argv, "--device", 0) == 1;
  for (const conformance::Found& found : conformance::all_devices()) {
    if (found.name != (cuda ? "cuda" : "cpu")) continue;
    if (found.device == nullptr) reliability::broken("%s", found.reason.c_str());
    return reliability::run(reliability::option(argc, argv, "--runs", 1000), *found.device);
  }
  reliability::broken("this build has no CUDA backend");
}
