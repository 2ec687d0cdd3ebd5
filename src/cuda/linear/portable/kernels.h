// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels that only this engine has.
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// Whether a call wants partial sums that few calls want.
inline bool asks_for_more(const Partials& p) {
  return p.weighted != nullptr || p.argmax != nullptr || p.logits != nullptr ||
         p.squared != nullptr || p.above != nullptr;
}

// block_exponentials.cu: partial sums (if wanted) and E (if there is a panel). May be launched
// early if exponentials_start_early (early.cuh).
bool exponentials_start_early(const DeviceInfo& device, Stream* stream);
void exponentials(const LinearWork& work, const Block& block, bool partial_sums, const Panel& panel,
                  bool early);
// fused_logits.cu: the same, with the product of the block's logits, for 16-bit inputs. A partial
// sum is of fused_columns columns. If the block has memory, raw logits are stored there. A panel
// starts at the block's first column.
constexpr int64_t fused_columns = 256;
void fused_logits(const LinearWork& work, const Block& block, bool partial_sums,
                  const Panel& panel);
// block_gradients.cu: dz times the map's slope, from finished states.
void block_gradients(const LinearWork& work, const Block& block, const Panel& panel);

// extra_rows.cu: after the panel's rows, the class weights for the smoothing's term of E, and
// zeros; after its columns, zeros up to a multiple of 8.
void write_extra_rows(const LinearWork& work, const Panel& panel);

}  // namespace logitless::cuda
