// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

const char* name_of(StepKind kind) {
  constexpr const char* names[] = {
      "tokens",         "copy weight", "column terms",     "class row",    "weight tail",
      "gather",         "logits",      "states",           "finish panel", "form dz",
      "scale input",    "remake",      "copy panel",       "grad_input",   "grad_weight",
      "both",           "grad_bias",   "write grad_input", "no tokens",    "write grad_weight",
      "write grad_bias"};
  return names[static_cast<int>(kind)];
}

}  // namespace logitless::cuda
