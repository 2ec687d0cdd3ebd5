// SPDX-License-Identifier: Apache-2.0
// Dense matrices of more than 2^31 and 2^32 elements on CUDA. Their rows repeat with prime periods,
// so the expected results of a few tokens and columns need little host memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Values = std::vector<double>;

class CudaOffsets : public testing::TestWithParam<std::string> {
 protected:
  ~CudaOffsets() override {
    (void)cudaDeviceSynchronize();
    for (void* data : memory_) (void)cudaFree(data);
  }
  void* allocate(size_t bytes) {
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
      throw std::runtime_error(std::to_string(bytes >> 20) + " MiB of device memory are needed");
    }
    memory_.push_back(data);
    return data;
  }
  TensorView place(TensorView view, size_t bytes) {
    view.data = allocate(bytes);
    view.device = device_.tensors();
    return view;
  }
  // Makes a tensor [rows, columns] whose row i is row i % period of `values`.
  TensorView periodic(DType dtype, int64_t rows, int64_t columns, int64_t period,
                      const Values& values) {
    const auto size = static_cast<size_t>(size_of(dtype));
    std::vector<std::byte> table(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) store(dtype, values[i], &table[i * size]);
    const size_t row = columns * size;
    const TensorView view = place(matrix_view(nullptr, dtype, rows, columns), rows * row);
    auto* first = static_cast<std::byte*>(view.data);
    check(cudaMemcpy(first, table.data(), table.size(), cudaMemcpyHostToDevice));
    for (int64_t filled = period; filled < rows; filled *= 2) {
      check(cudaMemcpy(first + filled * row, first, std::min(filled, rows - filled) * row,
                       cudaMemcpyDeviceToDevice));
    }
    return view;
  }
  template <class T>
  TensorView vector(DType dtype, const std::vector<T>& values) {
    const auto count = static_cast<int64_t>(values.size());
    const TensorView view = place(vector_view(nullptr, dtype, count), count * sizeof(T));
    check(cudaMemcpy(view.data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    return view;
  }
  TensorView output(DType dtype, int64_t rows, int64_t columns) {
    const size_t bytes = rows * columns * size_of(dtype);
    const TensorView view = place(matrix_view(nullptr, dtype, rows, columns), bytes);
    check(cudaMemset(view.data, 0xFF, bytes));
    return view;
  }
  Values row(const TensorView& view, int64_t i) {
    const auto size = static_cast<size_t>(size_of(view.dtype));
    const int64_t columns = view.rank == 2 ? view.shape[1] : 1;
    std::vector<std::byte> bytes(columns * size);
    check(cudaMemcpy(bytes.data(), static_cast<std::byte*>(view.data) + i * columns * size,
                     bytes.size(), cudaMemcpyDeviceToHost));
    Values values(columns);
    for (int64_t j = 0; j < columns; ++j) values[j] = load(view.dtype, &bytes[j * size]);
    return values;
  }
  template <class Op>
  void run(const Op& op, uint64_t more) {
    check(cudaDeviceSynchronize());
    WorkspaceSize size;
    Status status = workspace(op, device_.execution(), &size);
    ASSERT_TRUE(status.ok()) << status.message();
    const uint64_t bytes = std::max(size.recommended, more);
    status = logitless::run(op, {allocate(bytes), bytes}, device_.execution());
    ASSERT_TRUE(status.ok()) << status.message();
    check(cudaDeviceSynchronize());
  }
  static void check(cudaError_t code) {
    if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
  }

  const TestDevice& device_ = device(GetParam());
  std::vector<void*> memory_;
};

Values rounded(DType dtype, Values values) {
  for (double& x : values) x = round_to(dtype, x);
  return values;
}

// Rows where offsets pass 2^31 and 2^32 elements, and a few others.
std::vector<int64_t> spots(int64_t rows, int64_t columns) {
  std::vector<int64_t> all{0, 1, rows / 3, rows - 1};
  for (const int64_t edge : {int64_t{1} << 31, int64_t{1} << 32}) {
    for (int64_t i = edge / columns - 1; i <= edge / columns + 1; ++i) {
      if (i >= 0 && i < rows) all.push_back(i);
    }
  }
  return all;
}

TEST_P(CudaOffsets, LogitsOfMoreThan2To32Elements) {
  constexpr int64_t tokens = 65600, vocab = 65543, period = 61;
  static_assert(tokens * vocab > int64_t{1} << 32);
  const Values values = rounded(DType::bf16, normals(period * vocab, 5, 3));
  std::vector<int64_t> target(tokens);
  for (int64_t i = 0; i < tokens; ++i) target[i] = i * 7919 % vocab;
  CrossEntropyForwardBackward op;
  op.logits = op.grad_logits = periodic(DType::bf16, tokens, vocab, period, values);
  op.target = vector(DType::i64, target);
  op.loss = output(DType::f32, tokens, 1);
  op.loss.rank = 1;
  op.options.reduction = Reduction::none;
  run(op, 0);
  for (const int64_t i : spots(tokens, vocab)) {
    Pool pool;
    const auto first = values.begin() + i % period * vocab;
    CrossEntropyForwardBackward one;
    one.logits = pool.add(DType::bf16, {1, vocab}, Values(first, first + vocab));
    one.grad_logits = pool.reserve(DType::bf16, {1, vocab});
    one.target = pool.add(DType::i64, {1}, {static_cast<double>(target[i])});
    one.loss = pool.reserve(DType::f32, {1});
    one.options.reduction = Reduction::none;
    Fields got;
    got["loss"] = {.dtype = DType::f32, .shape = {1}, .value = row(op.loss, i), .bits = {}};
    got["grad_logits"] = {
        .dtype = DType::bf16, .shape = {1, vocab}, .value = row(op.grad_logits, i), .bits = {}};
    const Comparison result = compare(expected(device_, one, {}), got);
    EXPECT_TRUE(result.ok()) << "row " << i << "\n" << result.report;
  }
}

// Input row i is row i % kinds of x, weight row j is row j % period of w. Either every column has
// its own bias, or there is no bias: then the call is plain and takes Hopper's plain kernels.
struct Head {
  int64_t tokens, hidden, vocab, kinds, period;
  Values x, w, bias, lse{};  // [kinds, hidden] [period, hidden] [vocab] [kinds]
  std::vector<int64_t> target{};

  bool biased;

  Head(int64_t tokens, int64_t hidden, int64_t vocab, int64_t kinds, int64_t period, bool biased)
      : tokens(tokens), hidden(hidden), vocab(vocab), kinds(kinds), period(period), biased(biased) {
    x = rounded(DType::bf16, normals(kinds * hidden, 21));
    w = rounded(DType::bf16, normals(period * hidden, 22, 1 / std::sqrt(hidden)));
    bias = biased ? rounded(DType::f32, normals(vocab, 23)) : Values(vocab, 0);
    for (int64_t i = 0; i < tokens; ++i) target.push_back((i * 104729 + 17) % vocab);
    target[0] = vocab - 1;
    for (int64_t k = 0; k < kinds; ++k) {
      const Values products = products_of(k);
      double sum = 0;
      for (int64_t j = 0; j < vocab; ++j) sum += std::exp(products[j % period] + bias[j]);
      lse.push_back(std::log(sum));
    }
  }
  Values products_of(int64_t kind) const {
    Values products(period, 0);
    for (int64_t r = 0; r < period; ++r) {
      for (int64_t d = 0; d < hidden; ++d) products[r] += x[kind * hidden + d] * w[r * hidden + d];
    }
    return products;
  }
  double logit(int64_t kind, int64_t column) const {
    double z = bias[column];
    for (int64_t d = 0; d < hidden; ++d) {
      z += x[kind * hidden + d] * w[column % period * hidden + d];
    }
    return z;
  }
  // Sums of terms, and of the terms' magnitudes.
  struct Sums {
    Values value, magnitude;
    void add(double factor, const double* row) {
      for (size_t d = 0; d < value.size(); ++d) {
        value[d] += factor * row[d];
        magnitude[d] += std::fabs(factor * row[d]);
      }
    }
  };
  Sums zeros() const { return {Values(hidden, 0), Values(hidden, 0)}; }
  // grad_input for a loss without reduction.
  Sums grad_input(int64_t token) const {
    const int64_t kind = token % kinds;
    const Values products = products_of(kind);
    Values share(period, 0);
    for (int64_t j = 0; j < vocab; ++j) {
      share[j % period] += std::exp(products[j % period] + bias[j] - lse[kind]);
    }
    Sums sums = zeros();
    for (int64_t r = 0; r < period; ++r) sums.add(share[r], &w[r * hidden]);
    sums.add(-1, &w[target[token] % period * hidden]);
    return sums;
  }
  Sums grad_weight(int64_t column) const {
    Values factor(kinds, 0);
    for (int64_t k = 0; k < kinds; ++k) factor[k] = std::exp(logit(k, column) - lse[k]);
    Sums sums = zeros();
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t k = i % kinds;
      sums.add(factor[k], &x[k * hidden]);
      if (target[i] == column) sums.add(-1, &x[k * hidden]);
    }
    return sums;
  }
};

// Allows twice the error of two bf16 roundings per term and one of the sum, which is far less than
// the distance to a wrong row's result.
void expect_near(const Values& got, const Head::Sums& want, const std::string& what) {
  for (size_t d = 0; d < got.size(); ++d) {
    ASSERT_LE(std::fabs(got[d] - want.value[d]), 0.016 * want.magnitude[d])
        << what << ", " << d << ": " << got[d] << ", not " << want.value[d];
  }
}

class CudaHeads : public CudaOffsets {
 protected:
  LinearCrossEntropyForwardBackward op_of(const Head& head) {
    LinearCrossEntropyForwardBackward op;
    op.input = periodic(DType::bf16, head.tokens, head.hidden, head.kinds, head.x);
    op.weight = periodic(DType::bf16, head.vocab, head.hidden, head.period, head.w);
    if (head.biased) {
      op.bias = vector(DType::f32, std::vector<float>(head.bias.begin(), head.bias.end()));
    }
    op.target = vector(DType::i64, head.target);
    op.loss = output(DType::f32, head.tokens, 1);
    op.loss.rank = 1;
    op.grad_input = output(DType::bf16, head.tokens, head.hidden);
    op.grad_weight = output(DType::bf16, head.vocab, head.hidden);
    op.options.reduction = Reduction::none;
    return op;
  }
  void expect_right(const Head& head, uint64_t memory) {
    const LinearCrossEntropyForwardBackward op = op_of(head);
    ASSERT_NO_FATAL_FAILURE(run(op, memory));
    expect_right(head, op);
  }
  // Runs a call twelve times, with all of E in its workspace, and expects the same bits.
  void expect_same_bits(const Head& head) {
    const LinearCrossEntropyForwardBackward op = op_of(head);
    const uint64_t bytes = uint64_t{3} << 30;
    const Workspace scratch{allocate(bytes), bytes};
    check(cudaDeviceSynchronize());  // another stream filled the tensors
    const auto bits = [&](const TensorView& view) {
      std::vector<std::byte> host(view.shape[0] * view.shape[1] * size_of(view.dtype));
      check(cudaMemcpy(host.data(), view.data, host.size(), cudaMemcpyDeviceToHost));
      return host;
    };
    std::vector<std::byte> input, weight;
    for (int time = 0; time < 12; ++time) {
      const Status status = logitless::run(op, scratch, device_.execution());
      ASSERT_TRUE(status.ok()) << status.message();
      check(cudaDeviceSynchronize());
      if (time == 0) {
        expect_right(head, op);
        input = bits(op.grad_input), weight = bits(op.grad_weight);
      }
      ASSERT_EQ(bits(op.grad_input), input) << "run " << time;
      ASSERT_EQ(bits(op.grad_weight), weight) << "run " << time;
    }
  }
  // Compares the outputs of a run with their expected values.
  void expect_right(const Head& head, const LinearCrossEntropyForwardBackward& op) {
    std::vector<int64_t> tokens = spots(head.tokens, head.vocab);
    std::vector<int64_t> columns = spots(head.vocab, head.hidden);
    for (const int64_t i : tokens) {
      const int64_t t = head.target[i], kind = i % head.kinds;
      EXPECT_NEAR(row(op.loss, i)[0], head.lse[kind] - head.logit(kind, t), 2e-4) << "token " << i;
      expect_near(row(op.grad_input, i), head.grad_input(i), "token " + std::to_string(i));
      columns.push_back(t);
    }
    for (const int64_t j : columns) {
      expect_near(row(op.grad_weight, j), head.grad_weight(j), "column " + std::to_string(j));
    }
  }
};

// The sums of Head agree with the reference, at a size that the reference can compute.
TEST_P(CudaHeads, TheyAreTheReferences) {
  const Head head(23, 5, 40, 7, 11, true);
  const auto tiled = [](const Values& rows, int64_t count) {
    Values all(count);
    for (int64_t i = 0; i < count; ++i) all[i] = rows[i % rows.size()];
    return all;
  };
  Pool pool;
  LinearCrossEntropyForwardBackward op;
  op.input = pool.add(DType::bf16, {23, 5}, tiled(head.x, 23 * 5));
  op.weight = pool.add(DType::bf16, {40, 5}, tiled(head.w, 40 * 5));
  op.bias = pool.add(DType::f32, {40}, head.bias);
  op.target = pool.add(DType::i64, {23}, Values(head.target.begin(), head.target.end()));
  op.loss = pool.reserve(DType::f32, {23});
  op.grad_input = pool.reserve(DType::f32, {23, 5});
  op.grad_weight = pool.reserve(DType::f32, {40, 5});
  op.options.reduction = Reduction::none;
  const reference::Result want = reference::evaluate(op);
  const auto near = [&](const char* name, int64_t row, const Values& got) {
    for (size_t d = 0; d < got.size(); ++d) {
      EXPECT_NEAR(got[d], want.outputs.at(name).value[row * got.size() + d], 1e-9) << name << row;
    }
  };
  for (int64_t i = 0; i < 23; ++i) {
    near("loss", i, {head.lse[i % 7] - head.logit(i % 7, head.target[i])});
    near("grad_input", i, head.grad_input(i).value);
  }
  for (int64_t j = 0; j < 40; ++j) near("grad_weight", j, head.grad_weight(j).value);
}

TEST_P(CudaHeads, WeightsOfMoreThan2To31Elements) {
  for (const bool biased : {true, false}) {
    const Head head(16, 4096, 530003, 7, 61, biased);
    ASSERT_GT(head.vocab * head.hidden, int64_t{1} << 31);
    expect_right(head, 0);
  }
}

// Memory 0 leads to chunks of exponentials, 6 GiB to all at once.
TEST_P(CudaHeads, LogitsOfMoreThan2To31ElementsNeverHeldByTheCaller) {
  for (const bool biased : {true, false}) {
    const Head head(16500, 64, 131101, 61, 127, biased);
    ASSERT_GT(head.tokens * head.vocab, int64_t{1} << 31);
    for (const uint64_t memory : {uint64_t{0}, uint64_t{6} << 30}) expect_right(head, memory);
  }
}

// With one step of depth the kernel computes E faster than memory can store it, so copies out of
// shared memory fall behind. If a buffer were overwritten too early, bits would differ between
// runs.
TEST_P(CudaHeads, ExponentialsFasterThanMemoryTakesThem) {
  expect_same_bits(Head(8192, 64, 131101, 61, 127, false));
}

// With few tokens, grad_weight's tiles too are computed faster than memory can store them.
TEST_P(CudaHeads, GradientsOfFewTokensFasterThanMemoryTakesThem) {
  for (const int64_t tokens : {64, 200}) {
    expect_same_bits(Head(tokens, 1024, 131101, 61, 127, false));
  }
}

// grad_weight's rows overwrite E in the same memory, more rows than all multiprocessors write at a
// time. Anything read too late would no longer be E.
TEST_P(CudaHeads, RowsThatAreWrittenWhereEWas) {
  for (const auto& [tokens, hidden] :
       {std::pair{1032, 512}, {1024, 1536}, {1600, 1600}, {200, 1536}, {500, 512}}) {
    const Head head(tokens, hidden, 64064, 61, 127, false);
    const LinearCrossEntropyForwardBackward op = op_of(head);
    WorkspaceSize size;
    ASSERT_TRUE(workspace(op, device_.execution(), &size).ok());
    const uint64_t bytes = size.minimum + (uint64_t{40} << 20);
    ASSERT_LT(bytes, size.recommended);
    const Workspace scratch{allocate(bytes), bytes};
    check(cudaDeviceSynchronize());
    const Status status = logitless::run(op, scratch, device_.execution());
    ASSERT_TRUE(status.ok()) << status.message();
    check(cudaDeviceSynchronize());
    expect_right(head, op);
    for (int64_t j = 5; j < head.vocab; j += 331) {
      expect_near(row(op.grad_weight, j), head.grad_weight(j), "column " + std::to_string(j));
    }
  }
}

// The hidden axis has more blocks than a grid's second axis allows.
TEST_P(CudaHeads, RowsOfMoreThan2To23Elements) {
  Case c{.op = OpKind::linear_forward_backward, .shape = {3, (int64_t{1} << 23) + 77, 5}};
  c.options.label_smoothing = 0.1;
  c.vocab_weight = true;
  const Comparison result = judge(device_, c);
  EXPECT_TRUE(result.ok()) << result.report;
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaOffsets);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaHeads);
INSTANTIATE_TEST_SUITE_P(All, CudaOffsets, testing::ValuesIn(cuda_alone()));
INSTANTIATE_TEST_SUITE_P(All, CudaHeads, testing::ValuesIn(cuda_alone()));

}  // namespace
}  // namespace logitless::conformance
