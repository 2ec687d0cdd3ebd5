// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/sm90/forward.h"

#include <dlfcn.h>

#include "src/cuda/sm90/forward.cuh"

namespace logitless::cuda::sm90 {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver itself, which the runtime has loaded. Not by cudaGetDriverEntryPoint: it takes
// away an error that the caller has yet to ask for.
EncodeTiled find_encode() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr
                           : reinterpret_cast<EncodeTiled>(dlsym(driver, "cuTensorMapEncodeTiled"));
}

// [rows, columns] of 16-bit elements in boxes of box_rows x 64; outside: zeros.
CUtensorMap make_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                     int box_rows, Stream* stream) {
  static const EncodeTiled encode = find_encode();
  CUtensorMap map{};
  if (encode == nullptr) {
    stream->fail(
        error(StatusCode::backend_unavailable, "cuda: the driver has no cuTensorMapEncodeTiled"));
    return map;
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {tile_depth, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult code = encode(
      &map,
      dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    stream->fail(error(StatusCode::device_error, "cuda: cuTensorMapEncodeTiled returned %d",
                       static_cast<int>(code)));
  }
  return map;
}

struct Operands {
  CUtensorMap input, weight;
};

Operands make_operands(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                       const Chunk& chunk, Stream* stream) {
  const LinearShape& s = call.shape;
  const int64_t hidden = s.copies_weight ? plan.hidden_pitch : s.hidden;
  const void* weight = s.copies_weight
                           ? m.weight
                           : static_cast<const char*>(call.weight.data) + call.weight.byte_offset;
  const int64_t stride = s.copies_weight ? plan.hidden_pitch : call.weight.stride[0];
  return {make_map(m.input, s.dtype, chunk.rows, plan.hidden_pitch, plan.hidden_pitch, tile_rows,
                   stream),
          make_map(weight, s.dtype, s.vocab, hidden, stride, half_weight_rows, stream)};
}

template <class T, Mode kMode>
void launch(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
            const Arguments& arguments, const DeviceInfo& device, Stream* stream) {
  const Operands operands = make_operands(call, plan, m, arguments.chunk, stream);
  const unsigned blocks = static_cast<unsigned>(device.multiprocessors / 2 * 2);
  stream->launch_config("sm90 forward", forward_kernel<T, kMode>, blocks, block_threads,
                        shared_bytes, 2, operands.input, operands.weight, arguments);
  if (kMode == Mode::sums) return;
  stream->launch("zero_tail", zero_tail_kernel<T>, blocks, 256, arguments.chunk, arguments.panel);
}

Arguments make_arguments(const LinearCall& call, const LinearMemory& m, const Chunk& chunk,
                         int64_t first, int64_t columns, const Panel& panel) {
  const auto depth = static_cast<int32_t>((call.shape.hidden + tile_depth - 1) / tile_depth);
  return {chunk, m.partials, m.target_logit, m.gradients, panel, first, columns, depth};
}

}  // namespace

bool serves(const LinearCall& call, const DeviceInfo& device) {
  const LinearShape& s = call.shape;
  const TensorView& w = call.weight;
  const bool rows = s.copies_weight || (w.stride[1] == 1 || s.hidden == 1);
  const bool aligned =
      s.copies_weight || (reinterpret_cast<uintptr_t>(w.data) + w.byte_offset) % 16 == 0;
  return device.major == 9 && !device.portable && s.dtype != DType::f32 && call.plain() &&
         !s.smoothing && !s.entropy && !s.weighted_sum && !s.argmax && !call.in.grad_entropy &&
         rows && aligned;
}

void forward(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
             const Chunk& chunk, int64_t first, int64_t columns, bool sums, const Panel& panel,
             const DeviceInfo& device, Stream* stream) {
  const Arguments arguments = make_arguments(call, m, chunk, first, columns, panel);
  if (panel.data == nullptr) {
    if (call.shape.dtype == DType::f16) {
      launch<__half, Mode::sums>(call, plan, m, arguments, device, stream);
    } else {
      launch<__nv_bfloat16, Mode::sums>(call, plan, m, arguments, device, stream);
    }
  } else if (sums) {
    launch<__nv_bfloat16, Mode::sums_e>(call, plan, m, arguments, device, stream);
  } else {
    launch<__nv_bfloat16, Mode::e>(call, plan, m, arguments, device, stream);
  }
}

void gradients(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const Chunk& chunk, const Panel& panel, const DeviceInfo& device, Stream* stream) {
  const Arguments arguments = make_arguments(call, m, chunk, panel.first, panel.columns, panel);
  if (call.shape.dtype == DType::f16) {
    launch<__half, Mode::dz>(call, plan, m, arguments, device, stream);
  } else {
    launch<__nv_bfloat16, Mode::dz>(call, plan, m, arguments, device, stream);
  }
}

}  // namespace logitless::cuda::sm90
