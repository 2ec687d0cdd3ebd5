// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/prepared.cuh"
#include "src/cuda/linear/sm90/product.cuh"
#include "src/cuda/linear/sm90/whole_chip.cuh"
#include "src/cuda/linear/tiled/teams.h"

namespace logitless::cuda::sm90 {

using tiled::tiled_part;

// Both products of a chunk of tokens side by side: the first clusters compute grad_input, whose few
// tiles are deep, the others grad_weight, whose many tiles are short and each added to memory. Each
// product uses resources that the other leaves idle.
template <class T, class Out>
__global__ void __launch_bounds__(block_threads, 1)
    both_kernel(const __grid_constant__ Operands of_input,
                const __grid_constant__ ProductArguments input,
                const __grid_constant__ Operands of_weight,
                const __grid_constant__ ProductArguments weight) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  __shared__ Work work;
  __shared__ alignas(8) float lines[2 * tile_columns];
  const Pipeline pipeline = open_pipeline(dynamic);
  const int cluster = static_cast<int>(blockIdx.x / 2);
  if (cluster < input.teams) {
    run_product<T, Gradient::input, Out>(of_input, input, &work, lines, cluster, pipeline);
  } else {
    run_product<T, Gradient::weight, float>(of_weight, weight, &work, lines, cluster - input.teams,
                                            pipeline);
  }
  cluster_sync();
#endif
}

void HopperEngine::both_gradients(const LinearWork& work, const Panel& panel, const char* rows,
                                  bool of_e, bool add) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  Prepared input = whole_input(work, {panel}, of_e);
  Prepared weight = weight_product(work, panel, rows, of_e, add);
  const int clusters = device.multiprocessors / 2;
  use_teams<Gradient::input>(m, tiled_part(plan).input_teams, tiled_part(plan).slots, &input);
  // grad_weight gets no slots: both products run at once, and grad_input uses the slots.
  use_teams<Gradient::weight>(m, clusters - tiled_part(plan).input_teams, 0, &weight);
  with_types(call.shape.dtype, input.out, [&](auto element, auto out) {
    stream->launch_config("sm90 both gradients", both_kernel<decltype(element), decltype(out)>,
                          whole_chip(device), input.operands, input.a, weight.operands, weight.a);
  });
  if (tiled_part(plan).slots > 0) join<Gradient::input>(work, input);
}

}  // namespace logitless::cuda::sm90
