// SPDX-License-Identifier: Apache-2.0
// Compares the rules about overlap with sets of bytes, on random strided views of one buffer.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "logitless/logitless.h"
#include "src/validate.h"

namespace logitless {
namespace {

constexpr int kDraws = 50000;

struct Random {
  std::mt19937 generator{12345};
  int64_t below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }
  bool half() { return below(2) == 0; }
};

std::set<int64_t> bytes_of(const TensorView& v, const char* buffer, bool* repeated = nullptr) {
  std::set<int64_t> bytes;
  int64_t count = 0;
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    for (int64_t j = 0; j < v.shape[1]; ++j) {
      const int64_t at = (i * v.stride[0] + j * v.stride[1]) * size_of(v.dtype);
      for (int64_t b = 0; b < size_of(v.dtype); ++b) {
        bytes.insert(static_cast<const char*>(v.data) - buffer +
                     static_cast<int64_t>(v.byte_offset) + at + b);
        ++count;
      }
    }
  }
  if (repeated != nullptr) *repeated = static_cast<int64_t>(bytes.size()) != count;
  return bytes;
}

bool intersect(const std::set<int64_t>& a, const std::set<int64_t>& b) {
  for (int64_t byte : a) {
    if (b.contains(byte)) return true;
  }
  return false;
}

TensorView random_view(Random& random, char* buffer, int64_t rows, int64_t columns) {
  constexpr DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
  TensorView v = matrix_view(buffer, dtypes[random.below(3)], rows, columns);
  v.stride = {random.below(14), random.below(14)};
  v.byte_offset = static_cast<uint64_t>(random.below(40) * size_of(v.dtype));
  return v;
}

TEST(Overlap, OutputsWithRepeatedElementsAreExactlyTheOnesRefused) {
  Random random;
  std::vector<char> buffer(4096);
  int refused = 0, taken = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    const int64_t rows = random.below(7), columns = 1 + random.below(7);
    Softmax op{.logits = matrix_view(nullptr, DType::f32, rows, columns),
               .probabilities = random_view(random, buffer.data(), rows, columns)};
    bool repeated;
    bytes_of(op.probabilities, buffer.data(), &repeated);
    ASSERT_EQ(validate(Call(op, {})).ok(), !repeated)
        << rows << " x " << columns << ", strides " << op.probabilities.stride[0] << ", "
        << op.probabilities.stride[1];
    ++(repeated ? refused : taken);
  }
  EXPECT_GT(refused, kDraws / 10);
  EXPECT_GT(taken, kDraws / 10);
}

// A call is refused exactly where two tensors share a byte, except in place on the same elements.
TEST(Overlap, SharedBytesAreExactlyTheOnesRefused) {
  Random random;
  std::vector<char> buffer(4096);
  int shared = 0, taken = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    const int64_t rows = 1 + random.below(4), columns = 1 + random.below(4);
    Softmax op{.logits = random_view(random, buffer.data(), rows, columns),
               .probabilities = random_view(random, buffer.data(), rows, columns)};
    if (random.half()) op.probabilities.stride = op.logits.stride;
    if (!validate(Call(op, {})).ok()) continue;
    const bool ok = validate_data(op, {}, {}).ok();
    const auto in = bytes_of(op.logits, buffer.data()),
               out = bytes_of(op.probabilities, buffer.data());
    const auto at = [](const TensorView& v) { return v.as<char>(); };
    bool in_place =
        at(op.logits) == at(op.probabilities) && op.logits.dtype == op.probabilities.dtype;
    for (int d = 0; d < 2; ++d) {
      in_place &= op.logits.shape[d] == 1 || op.logits.stride[d] == op.probabilities.stride[d];
    }
    const bool share = intersect(in, out);
    ASSERT_EQ(ok, !share || in_place)
        << rows << " x " << columns << ", strides " << op.logits.stride[0] << ", "
        << op.logits.stride[1] << " and " << op.probabilities.stride[0] << ", "
        << op.probabilities.stride[1];
    shared += share, taken += ok;
  }
  EXPECT_GT(shared, kDraws / 10);
  EXPECT_GT(taken, kDraws / 10);
}

// The columns of one view lie at multiples of 6 elements, of the other at 1 + multiples of 4; every
// stride is divisible by 2, so the views never meet. Where strides have no common divisor, large
// views are assumed to meet.
TEST(Overlap, LargeViewsAreKeptApartByADivisor) {
  constexpr int64_t rows = 300, columns = 300;
  std::vector<float> buffer(rows * 2000);
  Softmax op{.logits = matrix_view(buffer.data(), DType::f32, rows, columns),
             .probabilities = matrix_view(buffer.data() + 1, DType::f32, rows, columns)};
  op.logits.stride = {1800, 6};
  op.probabilities.stride = {1200, 4};
  EXPECT_TRUE(validate_data(op, {}, {}).ok());
  op.probabilities.stride = {1203, 4};
  EXPECT_FALSE(validate_data(op, {}, {}).ok());
}

// A broadcast input takes the memory of the elements that it repeats, however large its shape.
TEST(Overlap, BroadcastInputsTakeOnlyWhatTheyRepeat) {
  std::vector<float> buffer(64);
  Softmax op{.logits = matrix_view(buffer.data() + 16, DType::f32, int64_t{1} << 40, 1 << 20),
             .probabilities = matrix_view(buffer.data(), DType::f32, 4, 4)};
  op.logits.stride = {0, 0};
  op.probabilities.stride = {12, 4};
  EXPECT_FALSE(validate_data(op, {}, {}).ok());
  op.probabilities.stride = {10, 4};  // 14 and 18 lie on both sides of element 16
  EXPECT_TRUE(validate_data(op, {}, {}).ok());
}

// Strides without a common divisor. The rule multiplies them, and the product must not overflow.
TEST(Overlap, VectorsOfUnrelatedStridesMeetWhereTheyDo) {
  // Two primes: vectors with these strides meet once in every s t elements.
  constexpr int64_t s = 46337, t = 46349, n = 10000;
  std::vector<char> none(16);
  const auto vector = [&](int64_t first, int64_t stride, int64_t count) {
    TensorView v = vector_view(none.data(), DType::f32, count);
    v.stride[0] = stride;
    v.byte_offset = static_cast<uint64_t>(first) * 4;
    return v;
  };
  // 3 s + 36 = 3 t: element 3 of one vector is element 3 of the other, the first shared one.
  CrossEntropyForward op{.logits = matrix_view(none.data(), DType::f32, 3, 3)};
  op.logits.byte_offset = uint64_t{1} << 40;
  op.target = vector(int64_t{1} << 41, 1, n);
  for (const int64_t count : {3, 4}) {
    op.statistics.lse = vector(36, s, count);
    op.statistics.entropy = vector(0, t, count);
    EXPECT_EQ(validate_data(op, {}, {}).ok(), count == 3);
    std::swap(op.statistics.lse, op.statistics.entropy);
    EXPECT_EQ(validate_data(op, {}, {}).ok(), count == 3);
  }
}

// Rectangles of one row-major buffer overlap exactly where they intersect.
TEST(Overlap, SlicesOfOneBufferAreJudgedExactly) {
  Random random;
  std::vector<char> buffer(1 << 14);
  constexpr int64_t pitch = 12;
  int shared = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    const int64_t rows = 2 + random.below(4), columns = 1 + random.below(6);
    const bool transposed = random.half();
    const auto slice = [&](int64_t row, int64_t column) {
      TensorView v =
          matrix_view(buffer.data() + 4 * (row * pitch + column), DType::f32, rows, columns);
      v.stride = {pitch, 1};
      if (transposed) std::swap(v.shape[0], v.shape[1]), std::swap(v.stride[0], v.stride[1]);
      return v;
    };
    const int64_t row[2] = {random.below(8), random.below(8)};
    const int64_t column[2] = {random.below(pitch - columns + 1),
                               random.below(pitch - columns + 1)};
    if (row[0] == row[1] && column[0] == column[1]) continue;
    const Softmax op{.logits = slice(row[0], column[0]), .probabilities = slice(row[1], column[1])};
    ASSERT_TRUE(validate(Call(op, {})).ok());
    const bool apart_columns = std::abs(column[0] - column[1]) >= columns;
    const bool apart = apart_columns || std::abs(row[0] - row[1]) >= rows;
    ASSERT_EQ(apart, !intersect(bytes_of(op.logits, buffer.data()),
                                bytes_of(op.probabilities, buffer.data())));
    ASSERT_EQ(validate_data(op, {}, {}).ok(), apart)
        << rows << " x " << columns << " at (" << row[0] << ", " << column[0] << ") and (" << row[1]
        << ", " << column[1] << ")";
    shared += !apart;
  }
  EXPECT_GT(shared, kDraws / 100);
}

}  // namespace
}  // namespace logitless
