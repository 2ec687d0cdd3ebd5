/* SPDX-License-Identifier: Apache-2.0
 * A C program outside the library: V equal logits cost log V nats. */
#include <logitless/c.h>
#include <math.h>
#include <stdio.h>

int main(void) {
  static _Alignas(64) char memory[1 << 16];
  float logits[2 * 10] = {0}; /* [2, 10] */
  int32_t target[2] = {3, 9}; /* [2] */
  float loss = 0;             /* [] */
  const logitless_tensor logits_view = {.struct_size = sizeof(logits_view),
                                        .data = logits,
                                        .rank = 2,
                                        .shape = {2, 10},
                                        .stride = {10, 1}};
  const logitless_tensor target_view = {.struct_size = sizeof(target_view),
                                        .dtype = LOGITLESS_I32,
                                        .data = target,
                                        .rank = 1,
                                        .shape = {2},
                                        .stride = {1}};
  const logitless_tensor loss_view = {.struct_size = sizeof(loss_view), .data = &loss};
  const logitless_op op = {.struct_size = sizeof(op),
                           .kind = LOGITLESS_CROSS_ENTROPY_FORWARD,
                           .logits = &logits_view,
                           .target = &target_view,
                           .loss = &loss_view};
  const logitless_workspace_buffer workspace = {
      .struct_size = sizeof(workspace), .data = memory, .bytes = sizeof(memory)};
  logitless_status status = LOGITLESS_STATUS_INIT;
  logitless_run(&op, &workspace, NULL, &status);
  printf("loss %.6f %s\n", loss, status.message);
  return status.code == LOGITLESS_OK && fabsf(loss - logf(10)) < 1e-6f ? 0 : 1;
}
