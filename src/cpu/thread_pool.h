// SPDX-License-Identifier: Apache-2.0
// The library's own blocking thread pool, created on first use and dropped in a forked child, and
// the one loop that the CPU backend uses: for_each_task.
#pragma once

#include <atomic>
#include <cstdint>

#include "logitless/logitless.h"

namespace logitless::cpu {

inline constexpr int32_t kMaxThreads = 1024;

// LOGITLESS_NUM_THREADS, else OMP_NUM_THREADS, else the affinity mask bounded by the cgroup's
// quota.
int32_t default_num_threads();
// Returns the CPU quota of the cgroups that the file `membership` (/proc/self/cgroup) names, below
// `mount` (/sys/fs/cgroup), in whole threads, rounded up; 0 without a limit.
int32_t cgroup_num_threads(const char* membership, const char* mount);
// 0 means the default. Returns the new number.
int32_t set_num_threads(int32_t num_threads);
int32_t num_threads();
const Executor& default_executor();

inline const Executor& executor_of(const Execution& execution) {
  return execution.executor != nullptr ? *execution.executor : default_executor();
}

// Calls f(task, lane) for every task in [0, tasks). At most `lanes` run at once, each with its own
// lane number and slice of the scratch. Tasks start in order, but on any lane: results must not
// depend on `lane`. No task may wait for another: an executor may run lanes one after the other.
template <class F>
void for_each_task(const Executor& executor, int64_t lanes, int64_t tasks, F&& f) {
  if (tasks <= 0) return;
  if (lanes > tasks) lanes = tasks;
  if (lanes <= 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task, int64_t{0});
    return;
  }
  struct State {
    F& f;
    std::atomic<int64_t> next;
    int64_t tasks;
  } state{f, 0, tasks};
  executor.parallel_for(
      executor.state, lanes,
      [](void* context, int64_t lane) {
        State& s = *static_cast<State*>(context);
        for (int64_t task; (task = s.next.fetch_add(1, std::memory_order_relaxed)) < s.tasks;)
          s.f(task, lane);
      },
      &state);
}

}  // namespace logitless::cpu
