// SPDX-License-Identifier: Apache-2.0
// The thread pool: every index runs once, lanes are bounded, callers may run in parallel, nested or
// in a forked child, and the default size is right.
#include "src/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

// The fork test starts threads in a child, which ThreadSanitizer refuses by default.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace logitless::cpu {
namespace {

// Runs `count` indices on the pool; returns whether each ran exactly once.
bool each_index_once(int64_t count) {
  std::vector<std::atomic<int>> seen(count);
  const Executor& executor = default_executor();
  executor.parallel_for(
      executor.state, count,
      [](void* context, int64_t i) {
        (*static_cast<std::vector<std::atomic<int>>*>(context))[i]++;
      },
      &seen);
  for (auto& s : seen) {
    if (s != 1) return false;
  }
  return true;
}

class ThreadPool : public testing::Test {
 protected:
  void TearDown() override { set_num_threads(0); }
};

TEST_F(ThreadPool, RunsEveryIndexOnceAtEveryThreadCount) {
  for (int32_t threads : {1, 2, 3, 7, 64, 2}) {
    EXPECT_EQ(set_num_threads(threads), threads);
    EXPECT_EQ(num_threads(), threads);
    EXPECT_EQ(default_executor().num_threads, threads);
    for (int64_t count : {0, 1, 2, 63, 1000}) EXPECT_TRUE(each_index_once(count)) << threads;
  }
}

TEST_F(ThreadPool, UsesMoreThanOneThread) {
  set_num_threads(2);
  // Each index waits for the other to start, so this finishes only on two threads.
  struct Meeting {
    std::atomic<int> arrived{0};
    std::atomic<bool> met{true};
  } meeting;
  const Executor& executor = default_executor();
  executor.parallel_for(
      executor.state, 2,
      [](void* context, int64_t) {
        Meeting& m = *static_cast<Meeting*>(context);
        ++m.arrived;
        for (int i = 0; i < 10000 && m.arrived < 2; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (m.arrived < 2) m.met = false;
      },
      &meeting);
  EXPECT_TRUE(meeting.met);
}

TEST_F(ThreadPool, NeverRunsMoreAtOnceThanItHasThreads) {
  for (int32_t threads : {5, 3, 2}) {
    set_num_threads(threads);
    std::atomic<int> inside{0}, most{0};
    for_each_task(default_executor(), threads, 200, [&](int64_t, int64_t lane) {
      EXPECT_GE(lane, 0);
      EXPECT_LT(lane, threads);
      const int now = ++inside;
      for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
      }
      std::this_thread::yield();
      --inside;
    });
    EXPECT_LE(most, threads);
    EXPECT_GE(most, 1);
  }
}

// Signals that a thread's own instructions raise. A thread that blocks them ends the process before
// a handler of the host runs.
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};

TEST_F(ThreadPool, WorkersBlockTheHostsSignalsButNotTheirOwnFaults) {
  set_num_threads(2);
  // Each index waits for the other to start, so one of them runs on a worker.
  struct Masks {
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> arrived{0};
    sigset_t worker{};
    std::atomic<bool> seen{false};
  } masks;
  const Executor& executor = default_executor();
  executor.parallel_for(
      executor.state, 2,
      [](void* context, int64_t) {
        Masks& m = *static_cast<Masks*>(context);
        if (std::this_thread::get_id() != m.caller) {
          pthread_sigmask(SIG_SETMASK, nullptr, &m.worker);
          m.seen = true;
        }
        ++m.arrived;
        for (int i = 0; i < 10000 && m.arrived < 2; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      },
      &masks);
  ASSERT_TRUE(masks.seen);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGCHLD, SIGUSR1, SIGPROF}) {
    EXPECT_EQ(sigismember(&masks.worker, signal), 1) << strsignal(signal);
  }
  for (const int signal : kFaults) {
    EXPECT_EQ(sigismember(&masks.worker, signal), 0) << strsignal(signal);
  }
}

TEST_F(ThreadPool, AFaultOfAWorkerReachesTheHostsHandler) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends a hang
    signal(SIGSEGV, [](int) { _exit(42); });
    void* page = mmap(nullptr, 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    set_num_threads(2);
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<bool> never{false};
    // The caller waits in one index, so a worker takes the other.
    for_each_task(default_executor(), 2, 2, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() != caller) *static_cast<volatile char*>(page) = 1;
      while (!never) std::this_thread::yield();
    });
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 42) << status;
}

TEST_F(ThreadPool, LanesNeverOverlap) {
  set_num_threads(4);
  std::vector<std::atomic<int>> busy(3);
  std::atomic<int64_t> tasks{0};
  for_each_task(default_executor(), 3, 500, [&](int64_t, int64_t lane) {
    EXPECT_EQ(busy[lane]++, 0);
    ++tasks;
    busy[lane]--;
  });
  EXPECT_EQ(tasks, 500);
}

TEST_F(ThreadPool, ServesSeveralCallersAtOnce) {
  set_num_threads(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int k = 0; k < 50; ++k) wrong += !each_index_once(17);
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ThreadPool, NestedCallsEnd) {
  set_num_threads(3);
  std::atomic<int> wrong{0};
  for_each_task(default_executor(), 3, 20,
                [&](int64_t, int64_t) { wrong += !each_index_once(11); });
  EXPECT_EQ(wrong, 0);
}

TEST_F(ThreadPool, SizeMayChangeWhileOthersRun) {
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread caller([&] {
    while (!stop) wrong += !each_index_once(9);
  });
  for (int i = 0; i < 200; ++i) set_num_threads(1 + i % 5);
  stop = true;
  caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ThreadPool, WorksInAForkedChild) {
  set_num_threads(4);
  ASSERT_TRUE(each_index_once(100));
  for (int attempt = 0; attempt < 5; ++attempt) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // ends a hang
      const bool good = each_index_once(100) && num_threads() == 4 && each_index_once(1000);
      _exit(good ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(each_index_once(100));
  }
}

TEST_F(ThreadPool, ForkWhileAnotherThreadUsesThePool) {
  set_num_threads(3);
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) each_index_once(5);
  });
  int failed = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      const Executor& executor = default_executor();
      std::atomic<int> sum{0};
      executor.parallel_for(
          executor.state, 50, [](void* s, int64_t) { ++*static_cast<std::atomic<int>*>(s); }, &sum);
      _exit(sum == 50 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  stop = true;
  caller.join();
  EXPECT_EQ(failed, 0);
}

TEST_F(ThreadPool, ClampsAbsurdSizes) {
  EXPECT_EQ(set_num_threads(2000000000), kMaxThreads);
  EXPECT_EQ(set_num_threads(0), default_num_threads());
  EXPECT_EQ(set_num_threads(-3), default_num_threads());
  EXPECT_GE(default_num_threads(), 1);
}

// Returns default_num_threads() of a new process with these variables.
int default_with(const std::string& environment) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = "env -u LOGITLESS_NUM_THREADS -u OMP_NUM_THREADS " + environment +
                              " '" + self + "' --print_default_threads";
  std::FILE* pipe = popen(command.c_str(), "r");
  int threads = -1;
  const bool read = std::fscanf(pipe, "%d", &threads) == 1;
  pclose(pipe);
  return read ? threads : -1;
}

TEST_F(ThreadPool, DefaultSizeFollowsTheEnvironment) {
  const int automatic = default_with("");
  EXPECT_GE(automatic, 1);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=5 OMP_NUM_THREADS=3"), 5);
  EXPECT_EQ(default_with("OMP_NUM_THREADS=3,2"), 3);
  EXPECT_EQ(default_with("OMP_NUM_THREADS='4 '"), 4);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=99999999999"), kMaxThreads);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=nonsense"), automatic);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=4x"), automatic);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=0"), automatic);
  EXPECT_EQ(default_with("LOGITLESS_NUM_THREADS=-2"), automatic);
}

class Cgroup : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/logitless_cgroup_XXXXXX";
    root_ = mkdtemp(name);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::string write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root_ + "/" + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
    return whole.string();
  }
  std::string root_;
};

TEST_F(Cgroup, Version2QuotaOfAnyAncestorBinds) {
  const std::string membership = write("membership", "0::/a/b\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 0);
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 0);
  write("a/cpu.max", "250000 100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 3);
  write("a/b/cpu.max", "100000 100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 1);
  write("cpu.max", "10000 100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 1);
}

TEST_F(Cgroup, Version1QuotaOfTheCpuController) {
  const std::string membership = write("membership", "3:cpuset:/\n2:cpu,cpuacct:/a\n1:memory:/x\n");
  write("cpu/a/cpu.cfs_quota_us", "-1\n");
  write("cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 0);
  write("cpu/a/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 4);
}

TEST_F(Cgroup, MissingOrMalformedFilesSetNoLimit) {
  EXPECT_EQ(cgroup_num_threads("/nonexistent", root_.c_str()), 0);
  const std::string membership = write("membership", "nonsense\n0::/a\n::\n");
  write("a/cpu.max", "nonsense\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 0);
  write("a/cpu.max", "200000 0\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 0);
  const std::string old = write("old", "2:cpu,cpuacct:/b\n1:,cpu:/c\n");
  write("cpu/b/cpu.cfs_quota_us", "400000\n");  // ignored: the period is missing
  EXPECT_EQ(cgroup_num_threads(old.c_str(), root_.c_str()), 0);
  write("cpu/b/cpu.cfs_period_us", "nonsense\n");
  EXPECT_EQ(cgroup_num_threads(old.c_str(), root_.c_str()), 0);
  const std::string deep = write("deep", "0::/" + std::string(4050, 'x') + "\n");
  EXPECT_EQ(cgroup_num_threads(deep.c_str(), root_.c_str()), 0);
}

TEST_F(Cgroup, ASmallerQuotaOfAnotherControllerBinds) {
  const std::string membership = write("membership", "2:cpu:/a\n0::/b\n");
  write("cpu/a/cpu.cfs_quota_us", "400000\n");
  write("cpu/a/cpu.cfs_period_us", "100000\n");
  write("b/cpu.max", "200000 100000\n");
  EXPECT_EQ(cgroup_num_threads(membership.c_str(), root_.c_str()), 2);
}

}  // namespace
}  // namespace logitless::cpu

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--print_default_threads") {
    std::printf("%d\n", logitless::cpu::default_num_threads());
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
