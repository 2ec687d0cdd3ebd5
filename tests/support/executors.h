// SPDX-License-Identifier: Apache-2.0
// Executors for tests: real threads, started for every loop, and a single thread that claims to be
// several and takes the items in a chosen order.
#pragma once

#ifndef __wasi__
#include <atomic>
#include <thread>
#include <vector>
#endif

#include "logitless/logitless.h"

namespace logitless::conformance {

#ifndef __wasi__  // there are no threads
// `count` threads share the items.
class ThreadExecutor {
 public:
  explicit ThreadExecutor(int count)
      : executor_{sizeof(Executor), count, this,
                  [](void* state, int64_t items, auto fn, void* context) {
                    static_cast<ThreadExecutor*>(state)->loop(items, fn, context);
                  }} {}
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;
  const Executor* get() const { return &executor_; }

 private:
  void loop(int64_t items, void (*fn)(void*, int64_t), void* context) {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < executor_.num_threads && t < items; ++t) {
      threads.emplace_back([&] {
        for (int64_t i; (i = next.fetch_add(1)) < items;) fn(context, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  Executor executor_;
};

#endif

// One thread that claims to be `count` threads, and runs items in ascending or descending order.
class SerialExecutor {
 public:
  explicit SerialExecutor(int count, bool backwards = false)
      : executor_{sizeof(Executor), count, nullptr, backwards ? &last_to_first : &first_to_last} {}
  const Executor* get() const { return &executor_; }

 private:
  static void first_to_last(void*, int64_t items, void (*fn)(void*, int64_t), void* context) {
    for (int64_t i = 0; i < items; ++i) fn(context, i);
  }
  static void last_to_first(void*, int64_t items, void (*fn)(void*, int64_t), void* context) {
    for (int64_t i = items; i-- > 0;) fn(context, i);
  }
  Executor executor_;
};

}  // namespace logitless::conformance
