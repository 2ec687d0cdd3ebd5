// SPDX-License-Identifier: Apache-2.0
// logitless_probe measures this machine's peak rates, to which the comparison's results are
// relative. Every thread runs the same loop at once; a figure is work / (last end - first start),
// the best and the median of several repetitions. Prints JSON on standard output. The peaks of f32
// FMA, bf16 dot and AMX bf16 use registers only; read and copy use one slice of memory per thread.
// On a CPU without the instruction of a peak this peak is null.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// Keeps a value from being optimized away.
template <class T>
void keep(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

struct Figure {
  double best = 0, median = 0;  // seconds of one repetition
};

// Times `work(thread)` on all threads at once, `repetitions` times after a warm-up.
Figure time_all(int threads, int repetitions, const std::function<void(int)>& work) {
  std::vector<std::vector<Clock::time_point>> begin(threads), end(threads);
  std::barrier start(threads);
  const auto body = [&](int thread) {
    for (int r = 0; r <= repetitions; ++r) {
      start.arrive_and_wait();
      begin[thread].push_back(Clock::now());
      work(thread);
      end[thread].push_back(Clock::now());
    }
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(body, t);
  body(0);
  for (std::thread& t : pool) t.join();
  std::vector<double> seconds;
  for (int r = 1; r <= repetitions; ++r) {
    Clock::time_point first = begin[0][r], last = end[0][r];
    for (int t = 1; t < threads; ++t) {
      first = std::min(first, begin[t][r]);
      last = std::max(last, end[t][r]);
    }
    seconds.push_back(std::chrono::duration<double>(last - first).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2]};
}

// A loop of independent multiply-adds, and the FLOP of one of its rounds.
struct Peak {
  const char* instruction = nullptr;
  void (*loop)(int64_t steps) = nullptr;
  double flop_per_step = 0;
};

// 16 chains: twice as many as hide a latency of 4 cycles at two FMAs per cycle.
constexpr int kChains = 16;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void fma_avx512(int64_t steps) {
  __m512 sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  __m512 a = _mm512_set1_ps(0.5f);
  const __m512 b = _mm512_set1_ps(0.25f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ps(sum[i], a, b);
    asm volatile("" : "+v"(a));
  }
  for (__m512& s : sum) keep(s);
}

__attribute__((target("avx2,fma"))) void fma_avx2(int64_t steps) {
  constexpr int chains = 12;  // in 12 of 16 registers
  __m256 sum[chains];
  for (int i = 0; i < chains; ++i) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  __m256 a = _mm256_set1_ps(0.5f);
  const __m256 b = _mm256_set1_ps(0.25f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < chains; ++i) sum[i] = _mm256_fmadd_ps(sum[i], a, b);
    asm volatile("" : "+x"(a));
  }
  for (__m256& s : sum) keep(s);
}

__attribute__((target("avx512f,avx512bf16"))) void dot_bf16(int64_t steps) {
  __m512 sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  __m512i a = _mm512_set1_epi16(0x3f00);        // 0.5 in bf16
  const __m512i b = _mm512_set1_epi16(0x3e80);  // 0.25 in bf16
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)b);
    asm volatile("" : "+v"(a));
  }
  for (__m512& s : sum) keep(s);
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14]{};
  uint16_t bytes_per_row[16]{};
  uint8_t rows[16]{};
};

// Tiles 0-3 are accumulators, 4-5 the left operand, 6-7 the right one: [16, 32] x [32, 16] each.
__attribute__((target("amx-tile,amx-bf16,avx512f"))) void amx_bf16(int64_t steps) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.bytes_per_row[t] = 64;
    config.rows[t] = 16;
  }
  alignas(64) static const uint16_t zeros[16 * 32] = {};
  // g++'s intrinsic declares that it reads 8 bytes, so the other stores might be removed
  keep(config);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

bool has_amx() {
#if defined(__linux__)
  __builtin_cpu_init();
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  // AMX-BF16 (bit 22) and AMX-TILE (bit 24).
  if ((d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif  // __x86_64__

typedef float Vector16 __attribute__((vector_size(16)));

// Plain multiply and add, compiled for the target's baseline instruction set.
void fma_generic(int64_t steps) {
  constexpr int chains = 12;
  Vector16 sum[chains];
  for (int i = 0; i < chains; ++i) sum[i] = Vector16{} + static_cast<float>(i);
  Vector16 a = Vector16{} + 0.5f;
  const Vector16 b = Vector16{} + 0.25f;
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < chains; ++i) sum[i] = sum[i] * a + b;
    keep(a);
  }
  for (Vector16& s : sum) keep(s);
}

Peak f32_peak() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {"AVX-512 FMA", fma_avx512, kChains * 16 * 2};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"AVX2 FMA", fma_avx2, 12 * 8 * 2};
#endif
  return {"128-bit multiply and add", fma_generic, 12 * 4 * 2};
}

Peak bf16_dot_peak() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16"))
    return {"AVX-512 VDPBF16PS", dot_bf16, kChains * 32 * 2};
#endif
  return {};
}

Peak amx_peak() {
#if defined(__x86_64__)
  if (has_amx()) return {"AMX TDPBF16PS", amx_bf16, 4 * 16 * 16 * 32 * 2};
#endif
  return {};
}

json measure(const Peak& peak, int threads, int repetitions, double seconds) {
  if (peak.loop == nullptr) return nullptr;
  int64_t steps = 1000;
  for (double took = 0; took < seconds / 4;) {  // until the loop lasts long enough
    steps *= 2;
    const auto start = Clock::now();
    peak.loop(steps);
    took = std::chrono::duration<double>(Clock::now() - start).count();
    if (took >= seconds / 4) steps = static_cast<int64_t>(steps * seconds / took);
  }
  const Figure f = time_all(threads, repetitions, [&](int) { peak.loop(steps); });
  const double gflop = peak.flop_per_step * static_cast<double>(steps) * threads * 1e-9;
  return {{"instruction", peak.instruction},
          {"gflops_best", gflop / f.best},
          {"gflops_median", gflop / f.median}};
}

// Memory that is first touched by one thread per slice, as it is used.
struct Buffer {
  Buffer(int64_t size, int threads)
      : bytes(size), slice(size / threads / 4096 * 4096), data(new char[size + 64]) {
    start = data.get() + (64 - reinterpret_cast<uintptr_t>(data.get()) % 64);
    time_all(threads, 1,
             [&](int t) { std::memset(start + t * slice, t + 1, size_of(t, threads)); });
  }
  int64_t size_of(int thread, int threads) const {
    return thread == threads - 1 ? bytes - slice * thread : slice;
  }
  int64_t bytes, slice;
  std::unique_ptr<char[]> data;
  char* start = nullptr;
};

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
xor_all(const uint64_t* words, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum ^= words[i];
  return sum;
}

json measure_read(int64_t bytes, int threads, int repetitions) {
  const Buffer source(bytes, threads);
  const Figure f = time_all(threads, repetitions, [&](int t) {
    uint64_t sum = xor_all(reinterpret_cast<const uint64_t*>(source.start + t * source.slice),
                           source.size_of(t, threads) / 8);
    keep(sum);
  });
  return {{"bytes", bytes},
          {"gb_per_s_best", bytes / f.best * 1e-9},
          {"gb_per_s_median", bytes / f.median * 1e-9}};
}

// Copies with non-temporal stores, which bypass the caches.
void copy_streaming(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    for (int k = 0; k < 64; k += 16) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + k));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + k), v);
    }
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

// Measures a copy of `bytes` between two buffers, by the faster of memcpy and streaming stores.
json measure_copy(int64_t bytes, int threads, int repetitions) {
  const Buffer from(bytes, threads), to(bytes, threads);
  const auto each = [&](auto copy) {
    return time_all(threads, repetitions, [&](int t) {
      copy(to.start + t * to.slice, from.start + t * from.slice, from.size_of(t, threads));
    });
  };
  const Figure plain = each([](char* a, const char* b, int64_t n) { std::memcpy(a, b, n); });
  const Figure streaming = each(copy_streaming);
  const bool stream = streaming.median < plain.median;
  const Figure& f = stream ? streaming : plain;
  return {{"bytes", bytes},
          {"how", stream ? "streaming stores" : "memcpy"},
          {"ms_best", f.best * 1e3},
          {"ms_median", f.median * 1e3},
          {"gb_per_s_best", 2 * bytes / f.best * 1e-9},  // bytes read and written
          {"gb_per_s_median", 2 * bytes / f.median * 1e-9}};
}

}  // namespace

int main(int argc, char** argv) {
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  int repetitions = 7;
  double seconds = 0.05;
  int64_t read_bytes = int64_t{1} << 30;
  std::vector<int64_t> copy_bytes{int64_t{1} << 28};
  CLI::App app{"Peaks of this machine, as JSON"};
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--repetitions", repetitions)->check(CLI::PositiveNumber);
  app.add_option("--seconds", seconds, "of one repetition of a peak")->check(CLI::PositiveNumber);
  app.add_option("--read-bytes", read_bytes)->check(CLI::PositiveNumber);
  app.add_option("--copy-bytes", copy_bytes)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  json out = {{"threads", threads}};
  out["f32_fma"] = measure(f32_peak(), threads, repetitions, seconds);
  out["bf16_dot"] = measure(bf16_dot_peak(), threads, repetitions, seconds);
  out["amx_bf16"] = measure(amx_peak(), threads, repetitions, seconds);
  out["read"] = measure_read(read_bytes, threads, repetitions);
  for (const int64_t bytes : copy_bytes)
    out["copy"].push_back(measure_copy(bytes, threads, repetitions));
  std::printf("%s\n", out.dump().c_str());
}
