// SPDX-License-Identifier: Apache-2.0
// This program splits a vocabulary over the ranks of MPI, on the CPU: it computes loss, grad_input
// and each rank's grad_weight. shards.h has the step; this file has the exchanges, by MPI. The
// result is checked: exit code 1 means that something differs, 2 that an argument is wrong.
//   mpirun -np 3 shards_mpi [--tokens N] [--hidden D] [--vocab V] [--dtype f32|bf16]
//                           [--steps K] [--judge yes|no]
// Each process has the library's own threads: set LOGITLESS_NUM_THREADS if ranks share a machine.
#include <mpi.h>

#include <chrono>

#include "shards_judge.h"

namespace {

float* floats(const Memory& memory) { return static_cast<float*>(memory.data()); }

struct MpiRanks {
  int rank, ranks;
  int64_t received = 0;  // bytes

  // Every rank gets the largest of all ranks' values; a maximum is exact, so the order does not
  // matter.
  void max(const Memory& values, int64_t count) {
    MPI_Allreduce(MPI_IN_PLACE, floats(values), static_cast<int>(count), MPI_FLOAT, MPI_MAX,
                  MPI_COMM_WORLD);
    received += ranks > 1 ? count * int64_t{sizeof(float)} : 0;
  }
  // Every rank gets all ranks' values, in their order.
  void gather(const Memory& own, const Memory& all, int64_t count) {
    MPI_Allgather(floats(own), static_cast<int>(count), MPI_FLOAT, floats(all),
                  static_cast<int>(count), MPI_FLOAT, MPI_COMM_WORLD);
    received += (ranks - 1) * count * int64_t{sizeof(float)};
  }
  // Part p of every rank goes to rank p.
  void all_to_all(const Memory& parts, const Memory& all, int64_t count) {
    MPI_Alltoall(floats(parts), static_cast<int>(count), MPI_FLOAT, floats(all),
                 static_cast<int>(count), MPI_FLOAT, MPI_COMM_WORLD);
    received += (ranks - 1) * count * int64_t{sizeof(float)};
  }
  // Adds the parts of all ranks, rank 0's first.
  void add(const Memory& parts, const Memory& sum, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      float total = floats(parts)[k];
      for (int p = 1; p < ranks; ++p) total += floats(parts)[p * count + k];
      floats(sum)[k] = total;
    }
  }
  [[noreturn]] void abort(const char* message) {
    std::fprintf(stderr, "rank %d: %s\n", rank, message);
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::abort();
  }
};

// Runs the step, then times further ones, and checks the results.
shards::Report report(const shards::Sizes& sizes, MpiRanks& ranks) {
  shards::Shard shard({}, sizes, ranks.rank, ranks.ranks);
  shards::step(shard, ranks);
  ranks.received = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t k = 0; k < sizes.steps; ++k) shards::step(shard, ranks);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;

  const shards::Outcome own = shards::read(shard);
  shards::Outcome first = own;
  for (std::vector<float>* values : {&first.loss, &first.target_logit, &first.grad_input}) {
    MPI_Bcast(values->data(), static_cast<int>(values->size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  }
  return {.first = shard.own.first,
          .count = shard.own.count,
          .received_bytes = ranks.received / sizes.steps,
          .kept_bytes = static_cast<int64_t>(shard.kept_size.bytes),
          .milliseconds = time.count() / static_cast<double>(sizes.steps),
          .worst = sizes.judge ? shards::Judge(sizes, false, ranks.ranks).worst(own, shard.own) : 0,
          .loss = own.loss[0],
          .agrees = shards::agree(own, first),
          .in_order = own.in_order};
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MpiRanks ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks.ranks);
  shards::Sizes sizes;
  std::string error;
  int code = 0;
  if (!shards::parse(argc, argv, ranks.ranks, &sizes, &error)) {
    if (ranks.rank == 0)
      std::fprintf(stderr, "%s\nusage: shards_mpi %s\n", error.c_str(), shards::kUsage);
    code = 2;
  } else {
    const shards::Report own = report(sizes, ranks);
    std::vector<shards::Report> all(static_cast<size_t>(ranks.ranks));
    MPI_Gather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (ranks.rank == 0) code = shards::print(sizes, all) ? 0 : 1;
    MPI_Bcast(&code, 1, MPI_INT, 0, MPI_COMM_WORLD);
  }
  MPI_Finalize();
  return code;
}
