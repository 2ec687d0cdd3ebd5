// SPDX-License-Identifier: Apache-2.0
// The library's own blocking thread pool. A job is a counter on its caller's stack, linked into the
// pool's list. The caller works on its job too, and returns when no worker is inside it: jobs of
// several callers, and nested jobs, can never wait for each other in a circle. The pool is never
// destroyed: its threads sleep until the process ends. A forked child has none of them and starts
// its own pool.
#include "src/cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

namespace logitless::cpu {
namespace {

using Function = void (*)(void* context, int64_t i);

// As set by set_num_threads; 0: the default.
std::atomic<int32_t> chosen_threads{0};

struct Job {
  const Function function;
  void* const context;
  const int64_t count;
  std::atomic<int64_t> next{0};
  int32_t workers_inside = 0;      // guarded by the pool's mutex
  std::condition_variable left{};  // signalled when workers_inside reaches 0
  Job* following = nullptr;

  bool has_work() const { return next.load(std::memory_order_relaxed) < count; }
  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      function(context, i);
    }
  }
};

// The host's signals must not be delivered to threads that it does not know. Signals that a
// thread's own instructions raise stay unblocked: if they are blocked, the kernel ends the process
// without calling the host's handler.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &old_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t old_;
};

class Pool {
 public:
  void run(int64_t count, Function function, void* context) {
    const int32_t threads = num_threads();
    Job job{.function = function, .context = context, .count = count};
    int64_t helpers = 0;
    if (threads > 1 && count > 1) {
      std::lock_guard lock(mutex_);
      resize(threads - 1);
      helpers = workers_ < count - 1 ? workers_ : count - 1;
      if (helpers > 0) append(&job);
    }
    for (int64_t i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    if (helpers == 0) return;
    std::unique_lock lock(mutex_);
    remove(&job);
    job.left.wait(lock, [&] { return job.workers_inside == 0; });
  }

 private:
  // Starts workers up to `limit`, or as many as the system allows; workers above it end when they
  // next wake.
  void resize(int32_t limit) {
    limit_ = limit;
    if (workers_ > limit_) wake_.notify_all();
    if (workers_ >= limit_) return;
    BlockSignals block;
    try {
      for (; workers_ < limit_; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (...) {
      // Fewer threads compute the same bits, only slower.
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return workers_ > limit_ || (job = find()) != nullptr; });
      if (job == nullptr) {
        --workers_;
        return;
      }
      ++job->workers_inside;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->workers_inside == 0) job->left.notify_one();
    }
  }

  Job* find() {
    for (Job* job = first_; job != nullptr; job = job->following) {
      if (job->has_work()) return job;
    }
    return nullptr;
  }
  void append(Job* job) {
    Job** end = &first_;
    while (*end != nullptr) end = &(*end)->following;
    *end = job;
  }
  void remove(Job* job) {
    Job** link = &first_;
    while (*link != job) link = &(*link)->following;
    *link = job->following;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Job* first_ = nullptr;
  int32_t workers_ = 0;
  int32_t limit_ = 0;
};

std::atomic<Pool*> current_pool{nullptr};

// A forked child lacks the pool's threads and the mutex's holder, so it starts a new pool.
void forget_pool() { current_pool.store(nullptr, std::memory_order_relaxed); }

// Returns nullptr if memory is exhausted.
Pool* pool() {
  Pool* known = current_pool.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  static std::atomic<bool> registered{false};
  if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, forget_pool);
  Pool* fresh = new (std::nothrow) Pool;
  if (fresh == nullptr || current_pool.compare_exchange_strong(known, fresh)) return fresh;
  delete fresh;
  return known;
}

void parallel_for(void*, int64_t count, Function function, void* context) {
  Pool* const shared = count > 1 && num_threads() > 1 ? pool() : nullptr;
  if (shared != nullptr) return shared->run(count, function, context);
  for (int64_t i = 0; i < count; ++i) function(context, i);
}

}  // namespace

int32_t set_num_threads(int32_t threads) {
  if (threads <= 0) threads = default_num_threads();
  if (threads > kMaxThreads) threads = kMaxThreads;
  chosen_threads.store(threads, std::memory_order_relaxed);
  return threads;
}

int32_t num_threads() {
  const int32_t threads = chosen_threads.load(std::memory_order_relaxed);
  return threads > 0 ? threads : default_num_threads();
}

const Executor& default_executor() {
  // One per thread: another thread may read its executor while num_threads changes.
  thread_local Executor executor;
  executor = {sizeof(Executor), num_threads(), nullptr, parallel_for};
  return executor;
}

}  // namespace logitless::cpu
