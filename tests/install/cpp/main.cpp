// SPDX-License-Identifier: Apache-2.0
// A program outside the library: V equal logits cost log V nats.
#include <cmath>
#include <cstdio>

#include "logitless/logitless.h"

int main() {
  using namespace logitless;
  const float logits[2 * 10] = {};   // [2, 10]
  const int32_t target[2] = {3, 9};  // [2]
  float loss = 0;                    // []
  alignas(64) static char memory[1 << 16];
  const CrossEntropyForward op{.logits = matrix_view(logits, DType::f32, 2, 10),
                               .target = vector_view(target, DType::i32, 2),
                               .loss = scalar_view(&loss, DType::f32)};
  WorkspaceSize size;
  Status status = workspace(op, {}, &size);
  if (status.ok()) status = run(op, {memory, sizeof(memory)}, {});
  std::printf("loss %.6f %s\n", loss, status.message());
  return status.ok() && std::abs(loss - std::log(10.0f)) < 1e-6f ? 0 : 1;
}
