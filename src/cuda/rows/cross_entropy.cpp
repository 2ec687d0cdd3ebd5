// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on given logits or probabilities [N, V]: tokens are compacted on the device, one
// launch (two for probabilities) reads the rows, and the rest is per token.
#include "src/cuda/ops.h"
#include "src/cuda/rows/logit_rows.h"

namespace logitless::cuda {
namespace {

struct Layout {
  Tokens tokens;
  float* losses = nullptr;  // [N]  if the loss is reduced, else null
  uint64_t bytes = 0;
};

Layout layout_of(const Call& call, void* memory) {
  Arena arena(memory);
  const int64_t tokens = call.logits.shape[0];
  Layout layout;
  const TokenInput in = token_input(call);
  layout.tokens = place_tokens(&arena, tokens, {in.screens_gradients(), in.makes_maps});
  if (call.forward) {
    if (call.loss && call.options.reduction != Reduction::none) {
      layout.losses = arena.take<float>(tokens);
    }
  }
  layout.bytes = arena.used();
  return layout;
}

void run_probabilities(const Call& call, const TokenInput& in, const Layout& layout,
                       Stream* stream) {
  if (call.forward) {
    if (call.loss) {
      launch_probability_losses(call.logits, in, layout.tokens, layout.losses, call.loss, stream);
      write_loss(in, layout.tokens, layout.losses, call.loss, stream);
    }
  }
  if (call.gradients) {
    launch_probability_gradient(call.logits, call.grad_logits, in, layout.tokens, stream);
    clear_other_rows(layout.tokens, call.grad_logits, stream);
  }
}

void run_logits(const Call& call, const TokenInput& in, const Layout& layout,
                const DeviceInfo& device, Stream* stream) {
  RowsCall rows;
  rows.logits = call.logits;
  rows.in = in;
  rows.scalars = layout.tokens.scalars;
  rows.inactive = layout.tokens.inactive;
  rows.map = layout.tokens.map;
  rows.losses = layout.losses;
  if (call.gradients) rows.output = call.grad_logits;
  if (!call.forward) {
    rows.row_reference = call.row_reference;
    rows.row_log_sum = call.row_log_sum;
    rows.entropy = call.entropy;
  }
  if (call.forward) {
    rows.outputs = token_outputs(call);
    rows.wants = call.sums();
  }
  const bool early = launch_rows(rows, device, stream);
  if (call.forward) {
    write_loss(in, layout.tokens, layout.losses, call.loss, stream, early);
  }
}

}  // namespace

Status logits_loss_workspace(const Call& call, const DeviceInfo&, WorkspaceSize* size) {
  *size = {};
  size->minimum = size->recommended = layout_of(call, nullptr).bytes;
  size->alignment = Arena::alignment;
  return check_row_extents(call.logits);
}

Status run_logits_loss(const Call& call, const Workspace& workspace, const DeviceInfo& device,
                       Stream* stream) {
  const Layout layout = layout_of(call, static_cast<char*>(workspace.data) + workspace.byte_offset);
  const TokenInput in = token_input(call);
  stream->prepare_and_run([&] {
    prepare_tokens(in, layout.tokens, token_outputs(call), stream);
    if (call.options.input_kind == InputKind::probabilities) {
      run_probabilities(call, in, layout, stream);
    } else {
      run_logits(call, in, layout, device, stream);
    }
  });
  return {};
}

}  // namespace logitless::cuda
