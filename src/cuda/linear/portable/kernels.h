// SPDX-License-Identifier: Apache-2.0
// These launch the kernels that this engine alone has.
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// block_exponentials.cu makes partial sums (where wanted) and E (where there is a panel). It may
// start early where the first function says so (early.cuh).
bool exponentials_start_early(const DeviceInfo& device, Stream* stream);
void exponentials(const LinearWork& work, const Block& block, bool partial_sums, const Panel& panel,
                  bool early);
// block_top.cu brings the block into the rows' lists of largest logits.
void list_block(const LinearWork& work, const Block& block);
// block_gradients.cu makes dz times the map's slope, from finished states.
void block_gradients(const LinearWork& work, const Block& block, const Panel& panel);

// extra_rows.cu writes behind the panel's rows the class weights for the smoothing's term of E, and
// zeros; behind its columns it writes zeros up to a multiple of 8.
void write_extra_rows(const LinearWork& work, const Panel& panel);

}  // namespace logitless::cuda
