// SPDX-License-Identifier: Apache-2.0
// Makes a very large number of small calls through the C interface, from several threads at once;
// about an eighth of them are refused. Memory, threads and open files must stay as they were after
// the first tenth, and each call's outputs as they were the first time.
//   --calls 1000000   calls of logitless_run
//   --threads 2       callers; each tenth of the calls starts new ones
#include <dirent.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "tests/reliability/report.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::reliability {
namespace {

constexpr int kTenths = 10;
constexpr int64_t kMostHeapGrowth = 4 << 10, kMostResidentGrowth = 1 << 20;  // bytes

class Call {
 public:
  virtual ~Call() = default;
  virtual void run(Random& random) = 0;
};

// One op on its own memory. Its inputs do not change, so every run writes the same.
template <class Op>
class CallOf final : public Call {
 public:
  explicit CallOf(const conformance::Case& c)
      : problem_(conformance::build<Op>(c)), c_(problem_.op) {
    ask();
    scratch_ = conformance::Bytes(size_.recommended + 1);
  }

  void run(Random& random) override {
    if (random.below(16) == 0) ask();
    const bool refuse = random.below(8) == 0;
    const uint64_t bytes = refuse && size_.minimum > 0 ? size_.minimum - 1 : size_.recommended;
    const logitless_workspace_buffer workspace{sizeof(workspace), 0, scratch_.data(), bytes, 0};
    logitless_op op = c_.op;
    if (refuse && size_.minimum == 0) op.reserved = 1;
    logitless_status status = LOGITLESS_STATUS_INIT;
    logitless_run(&op, &workspace, nullptr, &status);
    if ((status.code == LOGITLESS_OK) == refuse) {
      broken("code %d, '%s', of a call that is %s", status.code, status.message,
             refuse ? "malformed" : "right");
    }
    if (refuse) return;
    const uint64_t digest = outputs();
    if (ran_ && digest != digest_) broken("other bits in a later call of kind %d", op.kind);
    digest_ = digest, ran_ = true;
  }

 private:
  void ask() {
    size_ = LOGITLESS_WORKSPACE_SIZE_INIT;
    logitless_status status = LOGITLESS_STATUS_INIT;
    logitless_workspace(&c_.op, nullptr, &size_, &status);
    if (status.code != LOGITLESS_OK) broken("workspace: %s", status.message);
  }

  uint64_t outputs() const {
    Digest digest;
    const logitless_op unused{};
    for_each_tensor(problem_.op, unused,
                    [&](const char*, Access access, const TensorView& view, const auto*) {
                      if (access == Access::read || !view) return;
                      const size_t bytes = conformance::element_count(view) * size_of(view.dtype);
                      digest.add(view.as<const char>(), bytes);
                    });
    return digest.value();
  }

  conformance::Problem<Op> problem_;
  detail::COp<Op> c_;
  logitless_workspace_size size_{};
  conformance::Bytes scratch_;
  uint64_t digest_ = 0;
  bool ran_ = false;
};

std::vector<std::unique_ptr<Call>> calls_of(uint64_t seed) {
  Random random(seed);
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 63; ++i) {
    conformance::Case c{.op = kOps[i % 7], .dtype = kDtypes[i % 3]};
    c.shape = {random.between(1, 12), random.between(1, 32), random.between(2, 150)};
    c.seed = random.bits() % 1000 + 1;
    c.statistics = random.below(2) == 0;
    c.bias = random.below(2) == 0;
    c.ignored = random.below(2) * 0.3;
    c.listed = c.seed % 3 == 0 ? 1 + static_cast<int64_t>(c.seed % 20) : 0;
    c.options.label_smoothing = random.below(2) == 0 ? 0.1f : 0;
    conformance::with_op(
        c.op, [&](auto op) { calls.push_back(std::make_unique<CallOf<decltype(op)>>(c)); });
  }
  return calls;
}

struct Usage {
  int64_t heap, resident, threads, files;
};

int64_t entries(const char* folder) {
  DIR* open = opendir(folder);
  if (open == nullptr) return 0;
  int64_t count = 0;
  while (readdir(open) != nullptr) ++count;
  closedir(open);
  return count;
}

Usage usage() {
  Usage u{};
  const struct mallinfo2 heap = mallinfo2();
  u.heap = static_cast<int64_t>(heap.uordblks + heap.hblkhd);
  long pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "re"); file != nullptr) {
    if (std::fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  u.resident = pages * sysconf(_SC_PAGESIZE);
  u.threads = entries("/proc/self/task");
  u.files = entries("/proc/self/fd");
  return u;
}

// A joined thread may remain in /proc for a moment.
Usage settled() {
  Usage u = usage();
  for (int tries = 0; tries < 50; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const Usage again = usage();
    if (again.threads == u.threads) return again;
    u = again;
  }
  return u;
}

int soak(int64_t calls, int64_t threads) {
  mallopt(M_ARENA_MAX, 1);  // mallinfo2 counts only one arena
  logitless_set_num_threads(2);
  std::vector<std::vector<std::unique_ptr<Call>>> own;
  for (int64_t t = 0; t < threads; ++t) own.push_back(calls_of(static_cast<uint64_t>(t) + 1));
  Usage first{}, last{};
  int64_t heap_growth = 0, resident_growth = 0;
  for (int tenth = 0; tenth < kTenths; ++tenth) {
    std::vector<std::thread> callers;
    for (int64_t t = 0; t < threads; ++t) {
      callers.emplace_back([&, t] {
        Random random(static_cast<uint64_t>(tenth * threads + t + 1));
        for (int64_t i = calls / kTenths / threads; i > 0; --i) {
          own[t][random.below(static_cast<int64_t>(own[t].size()))]->run(random);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    last = settled();
    if (tenth == 0) first = last;
    heap_growth = std::max(heap_growth, last.heap - first.heap);
    resident_growth = std::max(resident_growth, last.resident - first.resident);
  }
  figure("calls", calls / kTenths / threads * threads * kTenths);
  figure("callers", threads);
  figure("heap growth", heap_growth);
  figure("resident growth", resident_growth);
  figure("resident", last.resident);
  // A sanitizer's malloc keeps freed memory, so the heap's growth means nothing there.
  if (heap_growth > kMostHeapGrowth && !conformance::kSanitized)
    broken("the heap grew by %" PRId64 " bytes", heap_growth);
  if (resident_growth > kMostResidentGrowth && !conformance::kSanitized) {
    broken("resident memory grew by %" PRId64 " bytes", resident_growth);
  }
  if (last.threads != first.threads)
    broken("%" PRId64 " threads more", last.threads - first.threads);
  if (last.files != first.files) broken("%" PRId64 " open files more", last.files - first.files);
  return 0;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  using logitless::reliability::option;
  return logitless::reliability::soak(option(argc, argv, "--calls", 1000000),
                                      option(argc, argv, "--threads", 2));
}
