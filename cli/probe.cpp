// SPDX-License-Identifier: Apache-2.0
// Twelve independent chains of multiply-adds hide the latency on every instruction set, and fit 16
// vector registers, the least of any.
#include "cli/probe.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <string>

#include "cli/buffer.h"
#include "src/cpu/thread_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cli/probe.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cli {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#define LOGITLESS_CHAINS(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
constexpr double kChains = 12;

// Returns the FLOP executed. The sums go to `sink`, so that the compiler removes no chain.
double fma_loop(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, sink[0] * 0.5f), b = hn::Set(d, 0.25f);
#define LOGITLESS_START(i) auto sum##i = hn::Iota(d, i);
#define LOGITLESS_STEP(i) sum##i = hn::MulAdd(sum##i, a, b);
#define LOGITLESS_FINISH(i) total = hn::Add(total, sum##i);
  LOGITLESS_CHAINS(LOGITLESS_START)
  for (int64_t round = 0; round < rounds; ++round) {
    LOGITLESS_CHAINS(LOGITLESS_STEP)
  }
  auto total = hn::Zero(d);
  LOGITLESS_CHAINS(LOGITLESS_FINISH)
  sink[1] = hn::GetLane(hn::SumOfLanes(d, total));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

double dot_loop([[maybe_unused]] int64_t rounds, [[maybe_unused]] float* sink) {
#if HWY_NATIVE_DOT_BF16
  const hn::ScalableTag<float> d;
  const hn::Repartition<hwy::bfloat16_t, decltype(d)> d16;
  const auto a = hn::BitCast(d16, hn::Set(d, sink[0] * 0.5f));
  const auto b = hn::BitCast(d16, hn::Set(d, 0.25f));
  auto unused = hn::Zero(d);
#undef LOGITLESS_STEP
#define LOGITLESS_STEP(i) sum##i = hn::ReorderWidenMulAccumulate(d, a, b, sum##i, unused);
  LOGITLESS_CHAINS(LOGITLESS_START)
  for (int64_t round = 0; round < rounds; ++round) {
    LOGITLESS_CHAINS(LOGITLESS_STEP)
  }
  auto total = unused;
  LOGITLESS_CHAINS(LOGITLESS_FINISH)
  sink[1] = hn::GetLane(hn::SumOfLanes(d, total));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d16)) * static_cast<double>(rounds);
#else
  return 0;
#endif
}
#undef LOGITLESS_START
#undef LOGITLESS_STEP
#undef LOGITLESS_FINISH
#undef LOGITLESS_CHAINS

// `count` is a multiple of 4 vectors.
float read_loop(const float* from, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t step = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  for (size_t i = 0; i < count; i += 4 * step) {
    sum0 = hn::Add(sum0, hn::Load(d, from + i));
    sum1 = hn::Add(sum1, hn::Load(d, from + i + step));
    sum2 = hn::Add(sum2, hn::Load(d, from + i + 2 * step));
    sum3 = hn::Add(sum3, hn::Load(d, from + i + 3 * step));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
}

// Streaming stores, because a normal store would first read the destination.
void copy_loop(const float* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  const size_t step = hn::Lanes(d);
  for (size_t i = 0; i < count; i += step) hn::Stream(hn::Load(d, from + i), d, to + i);
  hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace logitless::cli
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitless::cli {
namespace {

HWY_EXPORT(fma_loop);
HWY_EXPORT(dot_loop);
HWY_EXPORT(read_loop);
HWY_EXPORT(copy_loop);

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs f(0) to f(threads - 1) on the pool at once and returns the seconds.
template <class F>
double time_on_all_threads(F&& f) {
  const Executor& executor = cpu::default_executor();
  const auto start = Clock::now();
  cpu::for_each_task(executor, executor.num_threads, executor.num_threads,
                     [&](int64_t task, int64_t) { f(task); });
  return seconds_since(start);
}

struct alignas(64) Sink {
  float values[16];
};

template <class Loop>
double probe_flops(int repeats, Loop loop) {
  constexpr int64_t kRounds = 1 << 16;
  constexpr double kLeastSeconds = 0.02;
  Sink sinks[cpu::kMaxThreads]{};
  for (Sink& sink : sinks) sink.values[0] = 1;
  const int64_t threads = cpu::default_executor().num_threads;
  const double flops = loop(1, sinks[0].values);
  if (flops == 0) return 0;
  int64_t rounds = kRounds;
  double best = 0;
  for (int repeat = 0; repeat < repeats;) {
    const double seconds =
        time_on_all_threads([&](int64_t thread) { loop(rounds, sinks[thread].values); });
    if (seconds < kLeastSeconds) {
      rounds *= 2;
      continue;
    }
    best = std::max(best, flops * static_cast<double>(rounds * threads) / seconds);
    ++repeat;
  }
  return best;
}

}  // namespace

uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key;) {
    uint64_t kibibytes;
    if (key == "MemAvailable:" && file >> kibibytes) return kibibytes << 10;
    file.ignore(256, '\n');
  }
  return uint64_t{1} << 30;
}

double probe_fma(int repeats) {
  return probe_flops(repeats, [](int64_t rounds, float* sink) {
    return HWY_DYNAMIC_DISPATCH(fma_loop)(rounds, sink);
  });
}

double probe_bf16_dot(int repeats) {
  return probe_flops(repeats, [](int64_t rounds, float* sink) {
    return HWY_DYNAMIC_DISPATCH(dot_loop)(rounds, sink);
  });
}

double probe_amx(int repeats) {
  return probe_flops(repeats, [](int64_t rounds, float*) { return amx_loop(rounds); });
}

Bandwidth probe_bandwidth() {
  constexpr uint64_t kBytes = uint64_t{256} << 20;
  constexpr size_t kBlock = 1 << 16;  // floats
  constexpr int kRepeats = 5;
  const uint64_t bytes = std::min(kBytes, available_memory() / 8);
  const int64_t threads = cpu::default_executor().num_threads;
  const size_t share = bytes / sizeof(float) / static_cast<size_t>(threads) / kBlock * kBlock;
  if (share == 0) return {};
  const Buffer from(share * sizeof(float) * threads), to(share * sizeof(float) * threads);
  // Touches every page, so that the measurements contain no page faults.
  time_on_all_threads([&](int64_t thread) {
    std::fill_n(from.as<float>() + thread * share, share, 1.0f);
    std::fill_n(to.as<float>() + thread * share, share, 0.0f);
  });
  Sink sinks[cpu::kMaxThreads]{};
  double read = 1e9, copy = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    read = std::min(read, time_on_all_threads([&](int64_t thread) {
                      sinks[thread].values[0] =
                          HWY_DYNAMIC_DISPATCH(read_loop)(from.as<float>() + thread * share, share);
                    }));
    copy = std::min(copy, time_on_all_threads([&](int64_t thread) {
                      HWY_DYNAMIC_DISPATCH(copy_loop)
                      (from.as<float>() + thread * share, share, to.as<float>() + thread * share);
                    }));
  }
  const auto total = static_cast<double>(from.bytes());
  return {.read = total / read, .copy = 2 * total / copy};
}

}  // namespace logitless::cli
#endif  // HWY_ONCE
