// SPDX-License-Identifier: Apache-2.0
// Compares packing and products of every engine and instruction set with plain loops, exactly, on
// small integers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "src/cpu/dispatch.h"
#include "src/cpu/gemm.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cpu {
namespace {

struct Free {
  void operator()(char* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;
Buffer aligned(int64_t bytes) {
  char* p = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  std::memset(p, 0xff, (bytes + 63) / 64 * 64);  // NaN shows elements that were not written
  return Buffer(p);
}

uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);  // exact for the small integers used here
}
uint16_t f16_of(float value) {
  uint16_t bits;
  store_from_f32(&value, 1, DType::f16, &bits);
  return bits;
}

// A matrix of small integers in any dtype and stride.
struct Matrix {
  int64_t rows, columns;
  std::vector<float> value;  // [rows, columns]
  std::vector<char> memory;
  Source source;

  Matrix(int64_t r, int64_t c, DType dtype, bool transposed, uint32_t seed) : rows(r), columns(c) {
    std::mt19937 random(seed);
    value.resize(r * c);
    for (float& x : value) x = static_cast<float>(static_cast<int>(random() % 9) - 4);
    const int64_t size = size_of(dtype), pad = 3;
    const int64_t row_stride = transposed ? 1 : c + pad, column_stride = transposed ? r + pad : 1;
    memory.assign((r * row_stride + c * column_stride + pad) * size, 0);
    for (int64_t i = 0; i < r; ++i) {
      for (int64_t j = 0; j < c; ++j) {
        char* to = memory.data() + (i * row_stride + j * column_stride) * size;
        const float x = value[i * c + j];
        const uint16_t half = dtype == DType::bf16 ? bf16_of(x) : f16_of(x);
        if (size == 4) {
          std::memcpy(to, &x, 4);
        } else {
          std::memcpy(to, &half, 2);
        }
      }
    }
    source = {memory.data(), dtype, row_stride, column_stride, nullptr};
  }
  float at(int64_t i, int64_t j) const { return value[i * columns + j]; }
};

std::vector<std::string> targets() {
  std::istringstream names(target_names());
  std::vector<std::string> list;
  for (std::string name; names >> name;) list.push_back(name);
  return list;
}

// An instruction set and arithmetic that this machine runs, named like "AVX3_SPR_amx".
struct Kernel {
  std::string target;
  Arithmetic arithmetic;
};
std::vector<Kernel> kernels() {
  std::vector<Kernel> list;
  for (const std::string& target : targets()) {
    force_target(target.c_str());
    for (const Arithmetic a : {Arithmetic::f32, Arithmetic::bf16_dot, Arithmetic::amx}) {
      if (force_bf16_arithmetic(&a)) list.push_back({target, a});
    }
  }
  force_bf16_arithmetic(nullptr);
  force_target(nullptr);
  return list;
}

class GemmTest : public testing::TestWithParam<Kernel> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(force_target(GetParam().target.c_str()));
    ASSERT_TRUE(force_bf16_arithmetic(&GetParam().arithmetic));
  }
  void TearDown() override {
    force_bf16_arithmetic(nullptr);
    force_target(nullptr);
  }
};

TEST_P(GemmTest, LogitsProductIsExactForEveryShapeDtypeAndStride) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Engine engine = choose_engine(dtype);
    for (const auto [rows, columns, depth] :
         {std::array<int64_t, 3>{1, 1, 1}, {7, 33, 65}, {40, 192, 130}, {33, 100, 1030}}) {
      for (const bool transposed : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(engine.arithmetic) << " dtype " << int(dtype) << " " << rows << "x"
                     << columns << "x" << depth << " transposed " << transposed);
        const Matrix x(rows + 5, depth, dtype, transposed, 1),
            w(columns, depth, dtype, transposed, 2);
        std::vector<int64_t> index(rows);
        for (int64_t i = 0; i < rows; ++i) index[i] = (i * 3 + 2) % (rows + 5);
        Source picked = x.source;
        picked.row_index = index.data();
        const int64_t padded = engine.padded_k(depth),
                      stride = engine.b_panels(columns) * engine.b_columns;
        Buffer a = aligned(engine.a_bytes(rows, depth)),
               b = aligned(engine.b_bytes(columns, depth));
        Buffer c = aligned(engine.a_panels(rows) * engine.a_rows * stride * 4);
        pack_a_along_columns(engine, picked, 0, rows, 0, depth, a.get());
        pack_b_along_columns(engine, w.source, 0, columns, 0, depth, b.get());
        float* out = reinterpret_cast<float*>(c.get());
        multiply(engine, {a.get(), engine.a_rows * padded * engine.element, engine.a_panels(rows),
                          b.get(), engine.b_columns * padded * engine.element,
                          engine.b_panels(columns), padded, out, stride});
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            float want = 0;
            for (int64_t k = 0; k < depth; ++k) want += x.at(index[i], k) * w.at(j, k);
            ASSERT_EQ(out[i * stride + j], want) << i << "," << j;
          }
        }
      }
    }
  }
}

// Panels are padded with zeros beyond the matrix, not with what was packed before.
TEST_P(GemmTest, PanelsAreFilledUpWithZeros) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Engine engine = choose_engine(dtype);
    for (const auto [rows, depth] :
         {std::array<int64_t, 2>{1, 1}, {13, 33}, {45, 65}, {100, 130}}) {
      Matrix x(rows, depth, dtype, true, 1);
      const uint16_t half = bf16_of(1);
      const float one = 1;
      for (size_t i = 0; i < x.memory.size(); i += size_of(dtype)) {
        std::memcpy(&x.memory[i], dtype == DType::f32 ? static_cast<const void*>(&one) : &half,
                    size_of(dtype));
      }
      const auto ones = [&](int64_t bytes, const auto& pack) {
        const Buffer panels = aligned(bytes);
        pack(panels.get());
        int64_t count = 0;
        for (int64_t i = 0; i < bytes; i += engine.element) {
          const char zero[4] = {};
          count += std::memcmp(panels.get() + i, zero, engine.element) != 0;
        }
        return count;
      };
      SCOPED_TRACE(testing::Message() << name_of(engine.arithmetic) << " " << rows << "x" << depth);
      EXPECT_EQ(rows * depth, ones(engine.a_bytes(rows, depth), [&](void* to) {
                  pack_a_along_columns(engine, x.source, 0, rows, 0, depth, to);
                }));
      EXPECT_EQ(rows * depth, ones(engine.b_bytes(rows, depth), [&](void* to) {
                  pack_b_along_columns(engine, x.source, 0, rows, 0, depth, to);
                }));
      EXPECT_EQ(rows * depth, ones(engine.b_bytes(depth, rows), [&](void* to) {
                  pack_b_along_rows(engine, x.source, 0, rows, 0, depth, to);
                }));
    }
  }
}

TEST_P(GemmTest, ElementsDoNotDependOnTheirPanelOrOnTheBlocking) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Engine engine = choose_engine(dtype);
    const int64_t depth = 1400, columns = engine.b_columns;
    Matrix x(64, depth, dtype, false, 3), w(columns, depth, dtype, false, 4);
    const auto product = [&](int64_t row0, int64_t rows, int64_t split) {
      Buffer c = aligned(engine.a_panels(rows) * engine.a_rows * columns * 4);
      float* out = reinterpret_cast<float*>(c.get());
      for (int64_t k = 0; k < depth; k += split) {
        const int64_t part = std::min(split, depth - k), padded = engine.padded_k(part);
        Buffer a = aligned(engine.a_bytes(rows, part)), b = aligned(engine.b_bytes(columns, part));
        pack_a_along_columns(engine, x.source, row0, rows, k, part, a.get());
        pack_b_along_columns(engine, w.source, 0, columns, k, part, b.get());
        multiply(engine,
                 {a.get(), engine.a_rows * padded * engine.element, engine.a_panels(rows), b.get(),
                  0, 1, padded, out, columns, k > 0 ? Onto::chain : Onto::nothing});
      }
      return std::vector<float>(out, out + rows * columns);
    };
    // Scaled by odd fractions, so that sums are not exact and their order shows.
    for (size_t i = 0; dtype == DType::f32 && i < x.memory.size(); i += 4) {
      float v;
      std::memcpy(&v, &x.memory[i], 4);
      v *= 0.3137f + 0.001f * static_cast<float>(i % 97);
      std::memcpy(&x.memory[i], &v, 4);
    }
    const std::vector<float> whole = product(0, 64, depth), split = product(0, 64, 512),
                             one = product(13, 1, 512);
    EXPECT_EQ(0, std::memcmp(whole.data(), split.data(), whole.size() * 4));
    EXPECT_EQ(0, std::memcmp(whole.data() + 13 * columns, one.data(), columns * 4));
  }
}

// A product that is added has chains of its own, so that small terms do not meet a large sum one by
// one.
TEST_P(GemmTest, ASumOfProductsHasTheirOwnChains) {
  const Engine engine = choose_engine(DType::f32);
  const int64_t depth = 192, rows = engine.a_rows, columns = engine.b_columns;
  const Matrix x(rows, depth, DType::f32, false, 3), w(columns, depth, DType::f32, false, 4);
  Buffer a = aligned(engine.a_bytes(rows, depth)), b = aligned(engine.b_bytes(columns, depth));
  pack_a_along_columns(engine, x.source, 0, rows, 0, depth, a.get());
  pack_b_along_columns(engine, w.source, 0, columns, 0, depth, b.get());
  const auto onto = [&](float start, Onto how) {
    std::vector<float> c(static_cast<size_t>(rows * columns), start);
    multiply(engine, {a.get(), 0, 1, b.get(), 0, 1, depth, c.data(), columns, how});
    return c;
  };
  constexpr float large = 0x1p27f;  // whose neighbours are 8 and 16 away
  const std::vector<float> alone = onto(0, Onto::nothing), sum = onto(large, Onto::sum),
                           chain = onto(large, Onto::chain);
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_EQ(sum[i], large + alone[i]);
  EXPECT_NE(sum, chain);
}

// An input and a weight whose rows start at multiples of 32 bits. In f32 their sums are not exact.
struct FewRows {
  Matrix x, w;
  FewRows(DType dtype, int64_t rows, int64_t columns, int64_t depth)
      : x(rows, depth, dtype, false, 5), w(columns, depth, dtype, false, 6) {
    w.source.row_stride = depth;
    for (Matrix* m : {&x, &w}) {
      for (size_t i = 0; dtype == DType::f32 && i + 4 <= m->memory.size(); i += 4) {
        const float v = static_cast<float>(i % 89) * 0.3137f - 13;
        std::memcpy(&m->memory[i], &v, 4);
      }
    }
  }
};

// For few rows the product may read the weight without packing it, with the same bits.
TEST_P(GemmTest, FewRowsNeedNoPackedWeight) {
  constexpr int64_t columns = 96, row0 = 5;
  const std::string& target = GetParam().target;
  const bool turns = target.starts_with("AVX3") || target.starts_with("AVX10");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Engine engine = choose_engine(dtype);
    const bool direct = dtype == (engine.element == 4 ? DType::f32 : DType::bf16);
    for (const int64_t depth : {2, 30, 64, 94, 1402}) {
      const FewRows m(dtype, 33, columns + row0, depth);
      const int64_t padded = engine.padded_k(depth);
      Buffer b = aligned(engine.b_bytes(columns, depth));
      pack_b_along_columns(engine, m.w.source, row0, columns, 0, depth, b.get());
      for (const int64_t rows : {1, 8, 9, 32, 33}) {
        SCOPED_TRACE(testing::Message() << "dtype " << int(dtype) << " " << rows << "x" << depth);
        const int64_t size = engine.a_panels(rows) * engine.a_rows * columns * 4;
        Buffer a = aligned(engine.a_bytes(rows, depth)), c = aligned(size), turned = aligned(size);
        pack_a_along_columns(engine, m.x.source, 0, rows, 0, depth, a.get());
        Product p{a.get(), engine.a_rows * padded * engine.element,    engine.a_panels(rows),
                  b.get(), engine.b_columns * padded * engine.element, engine.b_panels(columns),
                  padded,  reinterpret_cast<float*>(c.get()),          columns};
        multiply(engine, p);
        p.c = reinterpret_cast<float*>(turned.get());
        const bool serves = turns && direct && engine.arithmetic != Arithmetic::amx && rows <= 32;
        ASSERT_EQ(multiply_unpacked(engine, m.w.source, row0, columns, depth, p), serves);
        if (!serves) continue;
        EXPECT_EQ(0, std::memcmp(c.get(), turned.get(), size));
      }
    }
  }
}

// multiply_unpacked refuses weights whose first or second row starts in the middle of 32 bits,
// whose columns are strided or whose rows are indexed, a part of a panel, and a row that ends in
// the middle of 32 bits.
TEST_P(GemmTest, OtherWeightsArePackedForFewRowsToo) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Engine engine = choose_engine(dtype);
    const FewRows m(dtype, 1, 96, 64);
    Buffer a = aligned(engine.a_bytes(1, 64)), c = aligned(engine.a_rows * 96 * 4);
    const Product p{a.get(), 0, 1, nullptr, 0, 0, 64, reinterpret_cast<float*>(c.get()), 96};
    const std::vector<int64_t> index(96);
    Source odd = m.w.source, apart = odd, picked = odd, uneven = odd;
    odd.data += 2, apart.column_stride = 2, picked.row_index = index.data();
    uneven.row_stride = 65;
    if (engine.element == 4) uneven = odd;  // f32 rows always start at 32 bits
    for (const Source& s : {odd, apart, picked, uneven}) {
      EXPECT_FALSE(multiply_unpacked(engine, s, 0, 96, 64, p));
    }
    EXPECT_FALSE(multiply_unpacked(engine, m.w.source, 0, engine.b_columns + 1, 64, p));
    EXPECT_FALSE(multiply_unpacked(engine, m.w.source, 0, 96, 63, p));
  }
}

TEST_P(GemmTest, GradientTileServesBothProducts) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Engine engine = choose_engine(dtype);
    const int64_t multiple = engine.token_multiple(), hidden = 70;
    for (const int64_t tokens : {multiple, 3 * multiple, int64_t{96}}) {
      SCOPED_TRACE(testing::Message() << name_of(engine.arithmetic) << " tokens " << tokens);
      const Matrix g(tokens, vocab_tile, DType::f32, false, 5),
          w(vocab_tile, hidden, dtype, false, 6), x(tokens, hidden, dtype, true, 7);
      Buffer along_vocab = aligned(engine.a_bytes(tokens, vocab_tile)),
             along_tokens = aligned(engine.a_bytes(vocab_tile, tokens));
      for (int64_t n = 0; n < tokens; n += gradient_group) {
        const int64_t count = std::min(gradient_group, tokens - n);
        pack_gradient(engine, g.value.data() + n * vocab_tile, n, count, tokens, along_vocab.get(),
                      along_tokens.get());
      }
      const int64_t stride = engine.b_panels(hidden) * engine.b_columns;
      Buffer wp = aligned(engine.b_bytes(hidden, vocab_tile)),
             xp = aligned(engine.b_bytes(hidden, tokens));
      pack_b_along_rows(engine, w.source, 0, vocab_tile, 0, hidden, wp.get());
      pack_b_along_rows(engine, x.source, 0, tokens, 0, hidden, xp.get());
      Buffer cx = aligned(tokens * stride * 4), cw = aligned(vocab_tile * stride * 4);
      float* grad_input = reinterpret_cast<float*>(cx.get());
      float* grad_weight = reinterpret_cast<float*>(cw.get());
      multiply(engine,
               {along_vocab.get(), engine.a_rows * vocab_tile * engine.element,
                tokens / engine.a_rows, wp.get(), engine.b_columns * vocab_tile * engine.element,
                engine.b_panels(hidden), vocab_tile, grad_input, stride});
      multiply(engine,
               {along_tokens.get(), engine.a_rows * tokens * engine.element,
                vocab_tile / engine.a_rows, xp.get(), engine.b_columns * tokens * engine.element,
                engine.b_panels(hidden), tokens, grad_weight, stride});
      for (int64_t j = 0; j < hidden; ++j) {
        for (int64_t n = 0; n < tokens; ++n) {
          float want = 0;
          for (int64_t v = 0; v < vocab_tile; ++v) want += g.at(n, v) * w.at(v, j);
          ASSERT_EQ(grad_input[n * stride + j], want) << n << "," << j;
        }
        for (int64_t v = 0; v < vocab_tile; ++v) {
          float want = 0;
          for (int64_t n = 0; n < tokens; ++n) want += g.at(n, v) * x.at(n, j);
          ASSERT_EQ(grad_weight[v * stride + j], want) << v << "," << j;
        }
      }
    }
  }
}

std::string name_of_kernel(const testing::TestParamInfo<Kernel>& info) {
  const char* names[] = {"f32", "dot", "amx"};
  return info.param.target + "_" + names[static_cast<int>(info.param.arithmetic)];
}

INSTANTIATE_TEST_SUITE_P(Kernels, GemmTest, testing::ValuesIn(kernels()), name_of_kernel);

}  // namespace
}  // namespace logitless::cpu
