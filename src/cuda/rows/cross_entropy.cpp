// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on given logits or probabilities [N, V]: tokens are prepared on the device, one
// launch makes states and gradient rows, and the rest is per token.
#include "src/cuda/ops.h"
#include "src/cuda/rows/logit_rows.h"

namespace logitless::cuda {
namespace {

struct Layout {
  Tokens tokens;
  float* losses = nullptr;  // [N]  where the loss is reduced
  uint64_t bytes = 0;
};

template <class Op>
Layout layout_of(const Op& op, void* memory) {
  Arena arena(memory);
  const int64_t tokens = op.logits.shape[0];
  Layout layout;
  layout.tokens = place_tokens(&arena, tokens);
  if constexpr (ForwardOp<Op>) {
    if (op.loss && op.options.reduction != Reduction::none) {
      layout.losses = arena.take<float>(tokens);
    }
  }
  layout.bytes = arena.used();
  return layout;
}

template <class Op>
Status loss_workspace(const Op& op, WorkspaceSize* size) {
  *size = {};
  size->minimum = size->recommended = layout_of(op, nullptr).bytes;
  size->alignment = Arena::alignment;
  return check_row_extents(op.logits);
}

template <class Op>
void run_probabilities(const Op& op, const TokenInput& in, const Layout& layout, Stream* stream) {
  if constexpr (ForwardOp<Op>) {
    if (op.loss) {
      launch_probability_losses(op.logits, in, layout.tokens, layout.losses, op.loss, stream);
      write_loss(in, layout.tokens, layout.losses, op.loss, stream);
    }
  }
  if constexpr (GradientOp<Op>) {
    launch_probability_gradient(op.logits, op.grad_logits, in, layout.tokens, stream);
    clear_other_rows(layout.tokens, op.grad_logits, stream);
  }
}

template <class Op>
void run_logits(const Op& op, const TokenInput& in, const Layout& layout, const DeviceInfo& device,
                Stream* stream) {
  RowsCall call;
  call.logits = op.logits;
  call.in = in;
  call.scalars = layout.tokens.scalars;
  call.losses = layout.losses;
  if constexpr (GradientOp<Op>) call.output = op.grad_logits;
  if constexpr (BackwardOnlyOp<Op>) {
    call.row_reference = op.row_reference;
    call.row_log_sum = op.row_log_sum;
    call.entropy = op.entropy;
  }
  if constexpr (ForwardOp<Op>) {
    call.outputs = {op.loss, op.statistics};
    call.wants_weighted_sum = op.options.label_smoothing > 0 || op.statistics.weighted_logit_sum;
    call.wants_entropy = static_cast<bool>(op.statistics.entropy);
    call.wants_argmax = static_cast<bool>(op.statistics.argmax);
  }
  const bool early = launch_rows(call, device, stream);
  if constexpr (ForwardOp<Op>) {
    write_loss(in, layout.tokens, layout.losses, op.loss, stream, early);
  }
}

template <class Op>
Status loss_run(const Op& op, const Workspace& workspace, const DeviceInfo& device,
                Stream* stream) {
  const Layout layout = layout_of(op, static_cast<char*>(workspace.data) + workspace.byte_offset);
  const TokenInput in = token_input(op, op.logits.shape[1]);
  TokenOutputs outputs;
  if constexpr (ForwardOp<Op>) outputs = {op.loss, op.statistics};
  stream->prepare_and_run([&] {
    prepare_tokens(in, layout.tokens, outputs, stream);
    if (op.options.input_kind == InputKind::probabilities) {
      run_probabilities(op, in, layout, stream);
    } else {
      run_logits(op, in, layout, device, stream);
    }
  });
  return {};
}

}  // namespace

#define LOGITLESS_LOSS_OP(Op)                                                                 \
  Status workspace(const Op& op, const DeviceInfo&, WorkspaceSize* size) {                    \
    return loss_workspace(op, size);                                                          \
  }                                                                                           \
  Status run(const Op& op, const Workspace& workspace, const DeviceInfo& device, Stream* s) { \
    return loss_run(op, workspace, device, s);                                                \
  }
LOGITLESS_LOSS_OP(CrossEntropyForward)
LOGITLESS_LOSS_OP(CrossEntropyBackward)
LOGITLESS_LOSS_OP(CrossEntropyForwardBackward)
#undef LOGITLESS_LOSS_OP

}  // namespace logitless::cuda
