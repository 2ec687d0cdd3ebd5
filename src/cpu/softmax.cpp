// SPDX-License-Identifier: Apache-2.0
// The softmax: p_ij = exp((z_ij - m_i) - log s_i), [R, C] -> [R, C].
#include <algorithm>

#include "src/cpu/logit_rows.h"
#include "src/cpu/ops.h"
#include "src/cpu/thread_pool.h"

namespace logitless::cpu {

Status softmax_workspace(const Call& call, WorkspaceSize* size) {
  const LogitRows rows(call.logits, call.probabilities, {}, {});
  const int64_t tasks = tasks_of(rows, call.logits.shape[0]);
  *size = {};
  if (tasks == 0) return {};
  size->minimum = rows.lane_bytes();
  size->recommended =
      rows.lane_bytes() * std::min<int64_t>(executor_of(call.execution).num_threads, tasks);
  return {};
}

Status run_softmax(const Call& call, const Workspace& workspace) {
  const LogitRows rows(call.logits, call.probabilities, {}, {});
  const Executor& executor = executor_of(call.execution);
  const int64_t total = call.logits.shape[0];
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  const int64_t lanes = lanes_of(rows, executor, workspace.bytes);
  for_each_task(executor, lanes, tasks_of(rows, total), [&](int64_t task, int64_t lane) {
    float* scratch = reinterpret_cast<float*>(memory + lane * rows.lane_bytes());
    const int64_t end = std::min(total, (task + 1) * rows.task_rows());
    for (int64_t first = task * rows.task_rows(); first < end; first += rows.group()) {
      int64_t index[most_rows];
      RowGroup group{index, nullptr, std::min(rows.group(), end - first)};
      for (int64_t r = 0; r < group.count; ++r) index[r] = first + r;
      RowState states[most_rows];
      rows.forward(group, nullptr, {}, scratch, {states});
      RowGradient probabilities[most_rows];
      for (int64_t r = 0; r < group.count; ++r) {
        probabilities[r] = {
            .reference = states[r].reference, .log_sum = states[r].log_sum, .probability = 1};
      }
      rows.gradient(group, nullptr, probabilities, states, scratch);
    }
  });
  return {};
}

}  // namespace logitless::cpu
