// SPDX-License-Identifier: Apache-2.0
// The rules about memory where a tensor's address is a buffer's handle, as in WebGPU, checked
// without a device.
#include <gtest/gtest.h>

#include <string>

#include "src/validate.h"

namespace logitless::testing {
namespace {

constexpr int64_t rows = 3, columns = 5;

// Every tensor has a buffer of its own; the handles are never dereferenced.
struct InBuffers {
  int buffers[4];
  Workspace workspace{};
  CrossEntropyForwardBackward op;

  InBuffers() {
    op.logits = matrix_view(&buffers[0], DType::f32, rows, columns);
    op.target = vector_view(&buffers[1], DType::i32, rows);
    op.loss = vector_view(&buffers[2], DType::f32, rows);
    op.grad_logits = matrix_view(&buffers[3], DType::f32, rows, columns);
    for (TensorView* v : {&op.logits, &op.target, &op.loss, &op.grad_logits}) {
      v->device.type = DeviceType::webgpu;
    }
  }
  Status validated() const { return validate_data(op, workspace, {}); }
};

void expect_refused(const InBuffers& call, StatusCode code, const std::string& words) {
  const Status status = call.validated();
  EXPECT_EQ(status.code(), code);
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status.message();
}

TEST(RejectsBuffers, NoneOfTheirOwn) {
  EXPECT_TRUE(InBuffers().validated().ok()) << InBuffers().validated().message();
}

TEST(RejectsBuffers, AnOffsetOfPartOfAnElement) {
  for (const uint64_t offset : {1, 2, 6}) {
    InBuffers call;
    call.op.target.byte_offset = offset;
    expect_refused(call, StatusCode::misaligned, "target.byte_offset");
  }
  InBuffers call;
  call.op.target.byte_offset = 4;
  EXPECT_TRUE(call.validated().ok());
}

// One buffer for an input and an output is refused at any distance, except in place: WebGPU binds a
// buffer for reading or for writing.
TEST(RejectsBuffers, ReadAndWrittenInOne) {
  InBuffers call;
  call.op.grad_logits.data = call.op.logits.data;
  EXPECT_TRUE(call.validated().ok()) << "in place";
  call.op.grad_logits.byte_offset = 1024;
  expect_refused(call, StatusCode::invalid_argument, "grad_logits and logits are in one buffer");
}

TEST(RejectsBuffers, OutputsThatOverlapInOne) {
  InBuffers call;
  call.op.loss.data = call.op.grad_logits.data;
  for (const uint64_t offset : {0, 4, 56}) {
    call.op.loss.byte_offset = offset;
    expect_refused(call, StatusCode::invalid_argument, "grad_logits overlaps loss");
  }
  call.op.loss.byte_offset = rows * columns * 4;
  EXPECT_TRUE(call.validated().ok()) << "one behind the other";
}

TEST(RejectsBuffers, InputsMayShareOne) {
  InBuffers call;
  call.op.target.data = call.op.logits.data;
  EXPECT_TRUE(call.validated().ok());
}

}  // namespace
}  // namespace logitless::testing
