// SPDX-License-Identifier: Apache-2.0
// This program splits a vocabulary over this machine's GPUs, in one process with a thread and a
// stream for each: it computes loss, grad_input and each rank's grad_weight. shards.h has the step;
// this file has the exchanges, by NCCL. The result is checked: exit code 1 means that something
// differs, 2 that an argument is wrong, 77 that there is no GPU.
//   shards_nccl [--tokens N] [--hidden D] [--vocab V] [--dtype f32|bf16]
//               [--steps K] [--judge yes|no]
// CUDA_VISIBLE_DEVICES selects the GPUs; use --judge no for large sizes.
#include <cuda_runtime.h>
#include <nccl.h>

#include <barrier>
#include <chrono>
#include <thread>

#include "shards_judge.h"

namespace {

float* floats(const Memory& memory) { return static_cast<float*>(memory.data()); }

// Adds the parts of all ranks, rank 0's first. parts [P, count], sum [count]
__global__ void add_parts(const float* parts, float* sum, int64_t count, int ranks) {
  const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (k >= count) return;
  float total = parts[k];
  for (int p = 1; p < ranks; ++p) total += parts[p * count + k];
  sum[k] = total;
}

struct NcclRanks {
  int rank, ranks;
  ncclComm_t communicator;
  cudaStream_t stream;
  // Whether check() waits for the stream. It does in the first step, in which the driver loads
  // kernels and may wait for the device: during an exchange that would be a deadlock.
  bool waits = true;
  int64_t received = 0;  // bytes

  // Every rank gets the largest of all ranks' values; a maximum is exact, so the order does not
  // matter.
  void max(const Memory& values, int64_t count) {
    check(ncclAllReduce(floats(values), floats(values), static_cast<size_t>(count), ncclFloat,
                        ncclMax, communicator, stream));
    received += ranks > 1 ? count * int64_t{sizeof(float)} : 0;
  }
  // Every rank gets all ranks' values, in their order.
  void gather(const Memory& own, const Memory& all, int64_t count) {
    check(ncclAllGather(floats(own), floats(all), static_cast<size_t>(count), ncclFloat,
                        communicator, stream));
    received += (ranks - 1) * count * int64_t{sizeof(float)};
  }
  // Part p of every rank goes to rank p.
  void all_to_all(const Memory& parts, const Memory& all, int64_t count) {
    const auto size = static_cast<size_t>(count);
    ncclResult_t result = ncclGroupStart();
    for (int p = 0; p < ranks && result == ncclSuccess; ++p) {
      result = ncclSend(floats(parts) + p * count, size, ncclFloat, p, communicator, stream);
      if (result != ncclSuccess) break;
      result = ncclRecv(floats(all) + p * count, size, ncclFloat, p, communicator, stream);
    }
    check(result);
    check(ncclGroupEnd());
    received += (ranks - 1) * count * int64_t{sizeof(float)};
  }
  void add(const Memory& parts, const Memory& sum, int64_t count) {
    constexpr int threads = 256;
    const auto blocks = static_cast<unsigned>((count + threads - 1) / threads);
    add_parts<<<blocks, threads, 0, stream>>>(floats(parts), floats(sum), count, ranks);
    check(cudaGetLastError());
  }
  // Ends the process: threads that wait for this rank in an exchange cannot be woken.
  [[noreturn]] void abort(const char* message) {
    std::fprintf(stderr, "rank %d: %s\n", rank, message);
    std::_Exit(1);
  }
  void check(cudaError_t error) {
    if (error != cudaSuccess) abort(cudaGetErrorString(error));
  }
  void check(ncclResult_t result) {
    if (result != ncclSuccess) abort(ncclGetErrorString(result));
    if (waits) check(cudaStreamSynchronize(stream));
  }
};

// Selects the rank's device, creates its stream, and lets its memory pool keep freed memory.
void open(NcclRanks& ranks) {
  ranks.check(cudaSetDevice(ranks.rank));
  ranks.check(cudaStreamCreateWithFlags(&ranks.stream, cudaStreamNonBlocking));
  cudaMemPool_t pool;
  uint64_t all = UINT64_MAX;
  ranks.check(cudaDeviceGetDefaultMemPool(&pool, ranks.rank));
  ranks.check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
}

// Runs the step, then times further ones. Sets *outcome to the rank's results.
shards::Report run_rank(const shards::Sizes& sizes, NcclRanks& ranks, std::barrier<>& all,
                        shards::Outcome* outcome) {
  open(ranks);
  const Place place{{logitless::DeviceType::cuda, ranks.rank}, ranks.stream};
  shards::Report report;
  {
    shards::Shard shard(place, sizes, ranks.rank, ranks.ranks);
    shards::step(shard, ranks);
    ranks.check(cudaStreamSynchronize(ranks.stream));
    ranks.waits = false;
    ranks.received = 0;
    all.arrive_and_wait();
    const auto start = std::chrono::steady_clock::now();
    for (int64_t k = 0; k < sizes.steps; ++k) shards::step(shard, ranks);
    ranks.check(cudaStreamSynchronize(ranks.stream));
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    *outcome = shards::read(shard);
    report = {.first = shard.own.first,
              .count = shard.own.count,
              .received_bytes = ranks.received / sizes.steps,
              .kept_bytes = static_cast<int64_t>(shard.kept_size.bytes),
              .milliseconds = time.count() / static_cast<double>(sizes.steps),
              .loss = outcome->loss[0],
              .in_order = outcome->in_order};
  }
  ranks.check(cudaStreamDestroy(ranks.stream));  // the shard's memory was freed on it
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("skipped: there is no GPU\n");
    return 77;
  }
  shards::Sizes sizes;
  std::string error;
  if (!shards::parse(argc, argv, count, &sizes, &error)) {
    std::fprintf(stderr, "%s\nusage: shards_nccl %s\n", error.c_str(), shards::kUsage);
    return 2;
  }
  std::vector<ncclComm_t> communicators(static_cast<size_t>(count));
  if (const ncclResult_t result = ncclCommInitAll(communicators.data(), count, nullptr);
      result != ncclSuccess) {
    std::fprintf(stderr, "NCCL: %s\n", ncclGetErrorString(result));
    return 1;
  }
  std::vector<shards::Outcome> outcomes(static_cast<size_t>(count));
  std::vector<shards::Report> reports(static_cast<size_t>(count));
  std::barrier<> all(count);
  std::vector<std::thread> threads;
  for (int r = 0; r < count; ++r) {
    threads.emplace_back([&, r] {
      NcclRanks ranks{
          .rank = r, .ranks = count, .communicator = communicators[r], .stream = nullptr};
      reports[r] = run_rank(sizes, ranks, all, &outcomes[r]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const ncclComm_t communicator : communicators) ncclCommDestroy(communicator);
  for (shards::Report& report : reports) {
    report.agrees = shards::agree(outcomes[&report - reports.data()], outcomes[0]);
  }
  if (sizes.judge) {
    const shards::Judge judge(sizes, true, count);
    for (int r = 0; r < count; ++r) {
      reports[r].worst = judge.worst(outcomes[r], {reports[r].first, reports[r].count});
    }
  }
  return shards::print(sizes, reports) ? 0 : 1;
}
