// SPDX-License-Identifier: Apache-2.0
// Random calls of the ops on given logits: tensors in several layouts and dtypes, with margins
// around them, and random options.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "src/cpu/row_kernels.h"

namespace logitless {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

enum class Layout { dense, padded, column_major, spread, broadcast };

// A tensor's memory: its elements wherever the layout puts them, and 0xA5 everywhere else.
struct Memory {
  std::vector<char> bytes;
  TensorView view;

  Memory(DType dtype, int64_t rows, int64_t columns, Layout layout) {
    view = matrix_view(nullptr, dtype, rows, columns);
    if (layout == Layout::padded) view.stride = {columns + 3, 1};
    if (layout == Layout::column_major) view.stride = {1, rows + 5};
    if (layout == Layout::spread) view.stride = {columns * 3 + 1, 3};
    if (layout == Layout::broadcast) view.stride = {0, 1};
    const int64_t reach = (rows - 1) * view.stride[0] + (columns - 1) * view.stride[1] + 1;
    bytes.assign((reach + 64) * size_of(dtype), static_cast<char>(0xA5));
    view.data = bytes.data();
    view.byte_offset = 32 * size_of(dtype);
  }
  char* at(int64_t i, int64_t j) {
    return view.as<char>() + (i * view.stride[0] + j * view.stride[1]) * size_of(view.dtype);
  }
  void set(int64_t i, int64_t j, float value) {
    cpu::store_from_f32(&value, 1, view.dtype, at(i, j));
  }
  double get(int64_t i, int64_t j) {
    float value;
    cpu::load_as_f32(at(i, j), view.dtype, 1, &value);
    return value;
  }
  // Returns the elements. margins_intact() returns whether all other bytes are unchanged.
  std::vector<char> elements() {
    std::vector<char> out;
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      for (int64_t j = 0; j < view.shape[1]; ++j) {
        out.insert(out.end(), at(i, j), at(i, j) + size_of(view.dtype));
      }
    }
    return out;
  }
  bool margins_intact() {
    std::vector<char> rest = bytes;
    for (int64_t i = 0; i < view.shape[0]; ++i) {
      for (int64_t j = 0; j < view.shape[1]; ++j) {
        std::memset(rest.data() + (at(i, j) - bytes.data()), 0xA5, size_of(view.dtype));
      }
    }
    return rest == std::vector<char>(rest.size(), static_cast<char>(0xA5));
  }
};

struct Shape {
  int64_t rows, columns;
  DType logits, output;
  Layout in, out;
  std::string name() const {
    return std::to_string(rows) + "x" + std::to_string(columns) + " dtypes " +
           std::to_string(int(logits)) + std::to_string(int(output)) + " layouts " +
           std::to_string(int(in)) + std::to_string(int(out));
  }
};

// Owns the vectors of a call.
struct Pool {
  std::vector<std::unique_ptr<std::vector<float>>> floats;
  std::vector<std::unique_ptr<std::vector<int64_t>>> integers;
  TensorView vector(int64_t size, float value, int64_t stride = 1) {
    floats.push_back(std::make_unique<std::vector<float>>(size * stride, value));
    TensorView v = vector_view(floats.back()->data(), DType::f32, size);
    v.stride[0] = stride;
    return v;
  }
};

class Calls {
 public:
  explicit Calls(int seed) : random_(seed) {}
  int64_t below(int64_t n) { return random_() % n; }
  bool flip() { return random_() & 1; }
  float normal(float scale) { return std::normal_distribution<float>(0, scale)(random_); }

  Shape shape() {
    const int64_t rows[] = {1, 2, 5, 16, 17, 33, 70};
    const int64_t columns[] = {1, 2, 7, 16, 33, 100, 2047, 2048, 2049, 4100};
    const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
    Shape s{rows[below(7)],   columns[below(10)], dtypes[below(3)],
            dtypes[below(3)], Layout(below(5)),   Layout(below(4))};
    if (s.rows * s.columns > 20000) s.rows = 5;
    return s;
  }

  void fill(Memory* logits) {
    const float scale = flip() ? 4 : 30;
    const bool mask = below(4) == 0;
    for (int64_t i = 0; i < logits->view.shape[0]; ++i) {
      for (int64_t j = 0; j < logits->view.shape[1]; ++j) {
        logits->set(i, j, mask && below(5) == 0 ? -kInf : normal(scale));
      }
    }
  }

  TensorView targets(int64_t rows, int64_t columns, Pool* pool) {
    pool->integers.push_back(std::make_unique<std::vector<int64_t>>(rows));
    const bool ignores = flip();
    for (int64_t& t : *pool->integers.back()) t = ignores && below(3) == 0 ? -100 : below(columns);
    return vector_view(pool->integers.back()->data(), DType::i64, rows);
  }

  TensorView values(int64_t size, float mean, Pool* pool) {
    TensorView v = pool->vector(size, 0, 1 + below(2));
    for (int64_t i = 0; i < size; ++i) v.as<float>()[i * v.stride[0]] = mean + normal(.5f);
    return v;
  }

  template <class Op>
  void options(Op* op, Pool* pool) {
    LossOptions& o = op->options;
    const int64_t rows = op->logits.shape[0], columns = op->logits.shape[1];
    o.reduction = Reduction(below(3));
    if (flip()) o.label_smoothing = .1f;
    if (below(4) == 0) o.z_loss = .01f;
    if (below(4) == 0) o.logit_scale = -.4f;
    if (below(3) == 0) o.softcap = 5;
    if (below(4) == 0) o.temperature = 1.7f;
    if (below(3) == 0) op->weights.token = values(rows, 1, pool);
    if (below(3) == 0) {
      op->weights.vocab = values(columns, 2, pool);
      for (int64_t j = 0; j < columns; j += 3) {
        op->weights.vocab.template as<float>()[j * op->weights.vocab.stride[0]] = 0;
      }
    }
    op->target = targets(rows, columns, pool);
    text = "reduction " + std::to_string(int(o.reduction)) + " smoothing " +
           std::to_string(o.label_smoothing) + " z_loss " + std::to_string(o.z_loss) + " scale " +
           std::to_string(o.logit_scale) + " softcap " + std::to_string(o.softcap) +
           " temperature " + std::to_string(o.temperature);
  }
  std::string text;  // names the random options

 private:
  std::mt19937 random_;
};

}  // namespace logitless
