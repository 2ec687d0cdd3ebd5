/* SPDX-License-Identifier: Apache-2.0
 *
 * One step of gradient descent on a language model's head, in C. With zero weights every token
 * costs exactly log V; after the step the loss is lower. docs/cpp.md shows it whole. */
#include <logitless/c.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 64, D = 32, V = 1000 };                            /* tokens, hidden size, vocabulary */
static float input[N * D], weight[V * D], grad_weight[V * D]; /* [N, D] [V, D] [V, D] */
static int32_t target[N];                                     /* [N] */

static logitless_tensor view(void* data, int32_t dtype, int32_t rank, int64_t rows,
                             int64_t columns) {
  const logitless_tensor tensor = {.struct_size = sizeof(tensor),
                                   .dtype = dtype,
                                   .data = data,
                                   .rank = rank,
                                   .shape = {rows, columns},
                                   .stride = {rank == 2 ? columns : 1, 1}};
  return tensor;
}

static int loss_and_gradient(float* loss) {
  const logitless_tensor input_view = view(input, LOGITLESS_F32, 2, N, D);
  const logitless_tensor weight_view = view(weight, LOGITLESS_F32, 2, V, D);
  const logitless_tensor target_view = view(target, LOGITLESS_I32, 1, N, 0);
  const logitless_tensor loss_view = view(loss, LOGITLESS_F32, 0, 0, 0);
  const logitless_tensor grad_weight_view = view(grad_weight, LOGITLESS_F32, 2, V, D);
  const logitless_op op = {.struct_size = sizeof(op),
                           .kind = LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD,
                           .input = &input_view,
                           .weight = &weight_view,
                           .target = &target_view,
                           .loss = &loss_view,
                           .grad_weight = &grad_weight_view};
  logitless_workspace_size size = {.struct_size = sizeof(size)};
  logitless_status status = LOGITLESS_STATUS_INIT;
  logitless_workspace(&op, NULL, &size, &status);
  if (status.code == LOGITLESS_OK) {
    const size_t bytes = (size.recommended / size.alignment + 1) * size.alignment;
    logitless_workspace_buffer memory = {.struct_size = sizeof(memory), .bytes = bytes};
    memory.data = aligned_alloc(size.alignment, bytes);
    logitless_run(&op, &memory, NULL, &status);
    free(memory.data);
  }
  if (status.code != LOGITLESS_OK) fprintf(stderr, "%s\n", status.message);
  return status.code == LOGITLESS_OK;
}

int main(void) {
  srand(1);
  for (int k = 0; k < N * D; ++k) input[k] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  for (int i = 0; i < N; ++i) target[i] = rand() % V;

  float before = 0, after = 0;
  if (!loss_and_gradient(&before)) return 1;
  for (int k = 0; k < V * D; ++k) weight[k] -= grad_weight[k];
  if (!loss_and_gradient(&after)) return 1;
  printf("loss %.4f, log V %.4f, loss after the step %.4f\n", before, log(V), after);
  return fabs(before - log(V)) < 1e-5 && after < before - 0.1 ? 0 : 1;
}
