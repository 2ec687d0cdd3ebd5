// SPDX-License-Identifier: Apache-2.0
// Which of cuBLASLt's proposals a product takes, and which memory the call lends to cuBLASLt.
// RecordedCuda proposes what a test says, so no GPU is needed.
#include "src/cuda/runtime/blas.h"

#include <gtest/gtest.h>

#include "recorded.h"
#include "src/cuda/ops.h"

namespace logitless::cuda {
namespace {

using Proposals = RecordedCuda::Proposals;

constexpr size_t kParts = size_t{24} << 20, kLibrary = matrix_library_bytes;
constexpr int kTwoRounds = 4096, kThreeRounds = 6144;

// A product [rows, 2048] over a depth of 512 with 4096 rows has 256 tiles of 256 x 128: two rounds
// of 132 multiprocessors.
class CudaBlas : public testing::Test {
 protected:
  static void* at(int64_t number) { return reinterpret_cast<void*>(number << 40); }
  static Product product(int64_t rows = kTwoRounds) {
    return {.rows = rows,
            .columns = 2048,
            .depth = 512,
            .a = {at(1), 512, 1},
            .b = {at(2), 2048, 1},
            .c = at(3),
            .c_stride = 2048,
            .alpha = static_cast<const float*>(at(4)),
            .beta = static_cast<const float*>(at(5))};
  }
  static Product lending(size_t bytes = kParts) {
    Product p = product();
    p.parts = at(6);
    p.parts_bytes = static_cast<int64_t>(bytes);
    return p;
  }
  Status run(const Product& p) {
    const DeviceInfo* device = nullptr;
    Status status = find_device(0, &device);
    if (!status.ok()) return status;
    Stream stream(nullptr);
    multiply(p, *device, at(7), &stream);
    EXPECT_EQ(machine_.live(), 0) << "descriptions are left";
    return stream.status();
  }
  void expect(const Product& p, int tile, int parts) {
    const Status status = run(p);
    ASSERT_TRUE(status.ok()) << status.message();
    const RecordedCuda::Multiplied& last = machine_.multiplied();
    EXPECT_EQ(last.tile, tile);
    EXPECT_EQ(last.parts, parts);
    const bool lends = p.parts_bytes > 0;
    EXPECT_EQ(last.memory, lends ? p.parts : at(7));
    EXPECT_EQ(last.bytes, lends ? static_cast<size_t>(p.parts_bytes) : kLibrary);
  }

  RecordedCuda machine_{{{"H100", 9, 0}}};
};

TEST_F(CudaBlas, TakesTheFirstProposal) {
  machine_.unsplit = {{{11, 1}, {12, 1}}};
  expect(product(), 11, 1);
  EXPECT_EQ(machine_.heuristics(), 1) << "splits of the depth need memory of the caller";
  expect(product(), 11, 1);
  EXPECT_EQ(machine_.heuristics(), 1) << "the choice is remembered";
}

TEST_F(CudaBlas, PassesOverProposalsThatDoNotServe) {
  machine_.unsplit = {{{11, 1, 0, 7}, {12, 2}, {13, 1, kLibrary + 1}, {14, 1, kLibrary}, {15, 1}}};
  expect(product(), 14, 1);
}

TEST_F(CudaBlas, SplitsTheDepthWhereThePartsFit) {
  machine_.unsplit = {{{11, 1}}};
  machine_.split = {{{12, 8, kParts}}};
  expect(lending(), 12, 8);
  expect(lending(kParts - 1), 11, 1);
  expect(product(), 11, 1);
  expect(lending(), 12, 8);
}

TEST_F(CudaBlas, SplitsOnlyAsTheFirstChoice) {
  machine_.unsplit = {{{11, 1}}};
  for (const auto& first : {RecordedCuda::Proposal{12, 1}, RecordedCuda::Proposal{12, 0},
                            RecordedCuda::Proposal{12, 8, 64, 7}}) {
    machine_.split = {{first, {13, 8}}};
    forget_matrix_library();
    expect(lending(), 11, 1);
  }
}

TEST_F(CudaBlas, WhereNothingSplitsItAsksForTheWhole) {
  machine_.unsplit = {{{11, 1}}};
  machine_.split = {{}, lt::not_supported};
  expect(lending(), 11, 1);
  EXPECT_EQ(machine_.heuristics(), 2);
}

// The last, smaller product of a call uses the algorithm of the first ones, so that a batch cut in
// another way has the same bits. If that algorithm does not support it, it uses its own.
TEST_F(CudaBlas, TakesTheChoiceOfTheLargestProductOfTheCall) {
  machine_.unsplit = {{{lt::tile_256x128, 1}, {lt::tile_128x128, 1}}};
  Product last = product();
  last.most_rows = kThreeRounds;
  expect(last, lt::tile_256x128, 1);
  expect(product(), lt::tile_128x128, 1);
  machine_.serves_others = false;
  expect(last, lt::tile_128x128, 1);
}

// cuBLASLt is queried again if alignment may change its choice.
TEST_F(CudaBlas, AsksAnewForAnotherAlignment) {
  expect(product(), 0, 0);
  Product p = product();
  p.a.data = static_cast<char*>(at(1)) + 4;
  expect(p, 0, 0);
  EXPECT_EQ(machine_.heuristics(), 2);
  p.a.data = static_cast<char*>(at(1)) + 32;
  expect(p, 0, 0);
  EXPECT_EQ(machine_.heuristics(), 2) << "16 bytes are aligned as well as any";
}

TEST_F(CudaBlas, SaysWhichProductTheLibraryLacks) {
  const auto refused = [&](const Product& p) {
    const Status status = run(p);
    EXPECT_EQ(status.code(), StatusCode::device_error);
    EXPECT_STREQ(status.message(),
                 "cuda: cuBLASLt has no product [4096, 512] x [512, 2048] of these types");
  };
  for (const Proposals& none :
       {Proposals{{}, lt::not_supported}, Proposals{{{11, 1}}, 14}, Proposals{{{11, 8}}}}) {
    machine_.unsplit = none;
    refused(product());
  }
  machine_.unsplit = {{{11, 1}}};
  machine_.split = {{{12, 8}}, 14};
  refused(lending());
  EXPECT_EQ(machine_.launches(), 0);
  expect(product(), 11, 1);
}

TEST_F(CudaBlas, PrefersSmallTilesInF32WhileRoundsAreFew) {
  for (const int large : {lt::tile_256x128, lt::tile_128x256}) {
    machine_.unsplit = {{{large, 1}, {11, 1}, {lt::tile_128x128, 1, 1}, {lt::tile_128x128, 1}}};
    const auto takes = [&](const Product& p, int tile) {
      forget_matrix_library();
      expect(p, tile, 1);
    };
    takes(product(), lt::tile_128x128);
    takes(product(kThreeRounds), large);
    Product p = product();
    p.tf32 = true;
    takes(p, large);
    p = product();
    p.in = DType::bf16;
    takes(p, large);
    machine_.unsplit = {{{large, 1}, {11, 1}}};
    takes(product(), large);
    machine_.unsplit = {{{11, 1}, {lt::tile_128x128, 1}}};
    takes(product(), 11);
  }
}

}  // namespace
}  // namespace logitless::cuda
