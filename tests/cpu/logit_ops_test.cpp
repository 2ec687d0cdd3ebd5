// SPDX-License-Identifier: Apache-2.0
// Random calls of the CPU's ops on given logits, over layouts, dtypes and options. Results are
// within the reference's bounds, and have the same bits in place, with any workspace and with any
// number of threads. Nothing outside an output or the workspace is written.
#include "logit_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "src/cpu/dispatch.h"
#include "src/cpu/thread_pool.h"
#include "src/reference/reference.h"

namespace logitless {
namespace {

// Runs `op` with the minimum or recommended workspace between guards.
template <class Op>
void run_guarded(const Op& op, bool least, int32_t threads) {
  cpu::set_num_threads(threads);
  WorkspaceSize size;
  Status status = workspace(op, {}, &size);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_LE(size.minimum, size.recommended);
  const uint64_t bytes = least ? size.minimum : size.recommended;
  std::vector<char> memory(bytes + 256, 0x3C);
  char* data = memory.data() + 64;
  data += (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64;
  status = run(op, {data, bytes}, {});
  ASSERT_TRUE(status.ok()) << status.message();
  for (char* p = memory.data(); p < memory.data() + memory.size(); ++p) {
    if (p < data || p >= data + bytes) {
      ASSERT_EQ(*p, 0x3C) << "workspace overrun";
    }
  }
  cpu::set_num_threads(0);
}

// The bytes of every output except `fault`, by name.
template <class Op>
std::map<std::string, std::vector<char>> outputs(const Op& op) {
  std::map<std::string, std::vector<char>> all;
  logitless_op c{};
  for_each_tensor(op, c, [&](const char* name, Access access, const TensorView& v, auto&) {
    if (!v || access == Access::read || std::string(name) == "fault") return;
    const int64_t rows = v.rank > 0 ? v.shape[0] : 1, columns = v.rank > 1 ? v.shape[1] : 1;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const char* at = v.as<char>() +
                         (i * v.stride[0] + (v.rank > 1 ? j * v.stride[1] : 0)) * size_of(v.dtype);
        all[name].insert(all[name].end(), at, at + size_of(v.dtype));
      }
    }
  });
  return all;
}

double number(const char* at, DType dtype) {
  if (dtype == DType::i64) {
    int64_t v;
    std::memcpy(&v, at, sizeof(v));
    return static_cast<double>(v);
  }
  float v;
  cpu::load_as_f32(at, dtype, 1, &v);
  return v;
}

template <class Op>
void compare(const Op& op, const reference::Result& expected,
             const std::map<std::string, std::vector<char>>& actual) {
  logitless_op c{};
  for_each_tensor(op, c, [&](const char* name, Access, const TensorView& v, auto&) {
    const auto found = actual.find(name);
    if (found == actual.end()) return;
    const reference::Output& e = expected.outputs.at(name);
    const int64_t size = size_of(v.dtype), count = found->second.size() / size;
    ASSERT_EQ(e.value.size(), static_cast<size_t>(count)) << name;
    for (int64_t i = 0; i < count; ++i) {
      const double a = number(found->second.data() + i * size, v.dtype);
      if (std::string(name) == "argmax") {
        const auto& ok = e.accepted[i];
        ASSERT_TRUE(std::find(ok.begin(), ok.end(), int64_t(a)) != ok.end()) << i << ": " << a;
      } else if (std::isnan(e.value[i])) {
        ASSERT_TRUE(std::isnan(a)) << name << "[" << i << "] is " << a << ", expected NaN";
      } else if (a != e.value[i]) {
        ASSERT_LE(std::fabs(a - e.value[i]), e.bound[i])
            << name << "[" << i << "] is " << a << ", expected " << e.value[i];
      }
    }
  });
}

// Checks one call, and that it has the same bits however it runs. `output` is the matrix output,
// tested in place too; null if the op has none.
template <class Op>
void check(Op op, Memory* logits, Memory* output, TensorView Op::* output_field) {
  const reference::Result expected = reference::evaluate(op);
  run_guarded(op, true, 1);
  const auto first = outputs(op);
  compare(op, expected, first);
  if (testing::Test::HasFatalFailure()) return;
  run_guarded(op, false, 3);
  EXPECT_EQ(first == outputs(op), true) << "3 threads, recommended workspace";
  run_guarded(op, true, 7);
  EXPECT_EQ(first == outputs(op), true) << "7 threads, minimum workspace";
  if (output == nullptr) return;
  EXPECT_TRUE(output->margins_intact());
  const TensorView& in = logits->view;
  if (in.dtype != output->view.dtype || (in.shape[0] > 1 && in.stride[0] == 0)) return;
  const std::vector<char> out = output->elements();
  op.*output_field = in;
  run_guarded(op, true, 2);
  EXPECT_EQ(out == logits->elements(), true) << "in place";
  EXPECT_TRUE(logits->margins_intact());
}

class LogitOps : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    calls_ = std::make_unique<Calls>(GetParam());
    shape_ = calls_->shape();
    logits_ = std::make_unique<Memory>(shape_.logits, shape_.rows, shape_.columns, shape_.in);
    output_ = std::make_unique<Memory>(shape_.output, shape_.rows, shape_.columns, shape_.out);
    calls_->fill(logits_.get());
    trace_ = std::make_unique<testing::ScopedTrace>(__FILE__, __LINE__, shape_.name());
  }
  template <class Op>
  void options(Op* op) {
    calls_->options(op, &pool_);
    trace_.reset();  // traces nest: the old one must end first
    trace_ = std::make_unique<testing::ScopedTrace>(__FILE__, __LINE__,
                                                    shape_.name() + " " + calls_->text);
  }
  template <class Op>
  void statistics(Op* op) {
    const int64_t rows = shape_.rows;
    if (calls_->below(4) != 0) {
      op->loss = pool_.vector(op->options.reduction == Reduction::none ? rows : 1, 7);
      if (op->options.reduction != Reduction::none) op->loss.rank = 0;
    }
    TokenStatistics& s = op->statistics;
    for (TensorView* v : {&s.lse, &s.target_logit, &s.entropy, &s.row_reference, &s.row_log_sum,
                          &s.weighted_logit_sum}) {
      if (calls_->flip()) *v = pool_.vector(rows, 7, 1 + calls_->below(2));
    }
    if (calls_->flip()) {
      pool_.integers.push_back(std::make_unique<std::vector<int64_t>>(rows));
      s.argmax = vector_view(pool_.integers.back()->data(), DType::i64, rows);
    }
  }
  template <class Op>
  void upstream(Op* op) {
    if (calls_->flip()) return;
    const bool none = op->options.reduction == Reduction::none;
    op->grad_loss = calls_->values(none ? shape_.rows : 1, 0, &pool_);
    if (!none) op->grad_loss.rank = 0;
  }
  std::unique_ptr<Calls> calls_;
  Shape shape_;
  Pool pool_;
  std::unique_ptr<Memory> logits_, output_;
  std::unique_ptr<testing::ScopedTrace> trace_;
};

INSTANTIATE_TEST_SUITE_P(Seeds, LogitOps, testing::Range(0, 300));

TEST_P(LogitOps, Softmax) {
  check(Softmax{logits_->view, output_->view}, logits_.get(), output_.get(),
        &Softmax::probabilities);
}

TEST_P(LogitOps, Forward) {
  CrossEntropyForward op{.logits = logits_->view};
  options(&op);
  statistics(&op);
  check(op, logits_.get(), nullptr, &CrossEntropyForward::logits);
}

TEST_P(LogitOps, ForwardBackward) {
  CrossEntropyForwardBackward op{.logits = logits_->view, .grad_logits = output_->view};
  options(&op);
  statistics(&op);
  upstream(&op);
  check(op, logits_.get(), output_.get(), &CrossEntropyForwardBackward::grad_logits);
}

TEST_P(LogitOps, Backward) {
  CrossEntropyBackward op{.logits = logits_->view, .grad_logits = output_->view};
  options(&op);
  upstream(&op);
  const int64_t rows = shape_.rows;
  CrossEntropyForward forward{.logits = op.logits, .target = op.target, .options = op.options};
  forward.weights = op.weights;
  forward.statistics = {.entropy = pool_.vector(rows, 0),
                        .row_reference = pool_.vector(rows, 0),
                        .row_log_sum = pool_.vector(rows, 0)};
  run_guarded(forward, true, 1);
  if (calls_->flip()) {
    op.row_reference = forward.statistics.row_reference;
    op.row_log_sum = forward.statistics.row_log_sum;
  }
  if (calls_->flip()) op.grad_lse = calls_->values(rows, 0, &pool_);
  if (calls_->flip()) op.grad_target_logit = calls_->values(rows, 0, &pool_);
  if (calls_->flip()) {
    op.grad_entropy = calls_->values(rows, 0, &pool_);
    op.entropy = forward.statistics.entropy;
  }
  check(op, logits_.get(), output_.get(), &CrossEntropyBackward::grad_logits);
}

TEST_P(LogitOps, Probabilities) {
  CrossEntropyForwardBackward op{.logits = logits_->view, .grad_logits = output_->view};
  for (int64_t i = 0; i < shape_.rows; ++i) {
    for (int64_t j = 0; j < shape_.columns; ++j) {
      logits_->set(i, j, std::fabs(calls_->normal(.1f)));
    }
  }
  options(&op);
  LossOptions plain;
  plain.input_kind = InputKind::probabilities;
  plain.reduction = op.options.reduction;
  plain.label_smoothing = op.options.label_smoothing;
  op.options = plain;
  upstream(&op);
  op.loss = pool_.vector(plain.reduction == Reduction::none ? shape_.rows : 1, 7);
  if (plain.reduction != Reduction::none) op.loss.rank = 0;
  check(op, logits_.get(), output_.get(), &CrossEntropyForwardBackward::grad_logits);
}

// A token alone has the loss and statistics that it has among others, at another position or in
// another layout.
TEST(LogitOps, ARowIsItsOwn) {
  constexpr int64_t n = 40, v = 5000;
  Calls calls(1);
  Memory many(DType::f32, n, v, Layout::dense), across(DType::f32, n, v, Layout::column_major);
  Memory alone(DType::f32, 1, v, Layout::spread);
  calls.fill(&many);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < v; ++j) across.set(i, j, many.get(i, j));
  }
  std::vector<int64_t> target(n);
  for (int64_t i = 0; i < n; ++i) target[i] = i * 17 % v;
  const auto losses = [&](const TensorView& logits, const int64_t* t, float* out) {
    const int64_t rows = logits.shape[0];
    CrossEntropyForward op{.logits = logits, .target = vector_view(t, DType::i64, rows)};
    op.options = {.reduction = Reduction::none, .label_smoothing = .1f};
    op.loss = vector_view(out, DType::f32, rows);
    op.statistics.entropy = vector_view(out + rows, DType::f32, rows);
    run_guarded(op, false, 2);
  };
  std::vector<float> a(2 * n), b(2 * n);
  losses(many.view, target.data(), a.data());
  losses(across.view, target.data(), b.data());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), 2 * n * sizeof(float)), 0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < v; ++j) alone.set(0, j, many.get(i, j));
    float single[2];
    losses(alone.view, &target[i], single);
    EXPECT_EQ(single[0], a[i]);
    EXPECT_EQ(single[1], a[n + i]);
  }
}

// Ignored rows are not read, so a NaN in one affects nothing.
TEST(LogitOps, IgnoredRowsAreZeroWhateverTheyHold) {
  for (const Layout layout : {Layout::dense, Layout::column_major, Layout::spread}) {
    constexpr int64_t n = 20, v = 33;
    Calls calls(1);
    Memory logits(DType::bf16, n, v, layout), gradient(DType::f16, n, v, layout);
    calls.fill(&logits);
    std::vector<int64_t> target(n, 3);
    for (int64_t i : {0, 7, 19}) {
      target[i] = -100;
      for (int64_t j = 0; j < v; ++j) logits.set(i, j, std::nanf(""));
    }
    float loss = 0;
    CrossEntropyForwardBackward op{.logits = logits.view,
                                   .target = vector_view(target.data(), DType::i64, n),
                                   .loss = scalar_view(&loss, DType::f32),
                                   .grad_logits = gradient.view};
    run_guarded(op, false, 2);
    EXPECT_TRUE(std::isfinite(loss));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < v; ++j) {
        ASSERT_TRUE(std::isfinite(gradient.get(i, j)));
        if (target[i] < 0) {
          ASSERT_EQ(gradient.get(i, j), 0);
        }
      }
    }
  }
}

TEST(LogitOps, EveryInstructionSetIsWithinTheBounds) {
  std::string names = cpu::target_names();
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(' ', begin), names.size());
    ASSERT_TRUE(cpu::force_target(names.substr(begin, end - begin).c_str()));
    begin = end + 1;
    for (const float softcap : {0.f, 20.f}) {
      Calls calls(5);
      Pool pool;
      Memory logits(DType::f32, 6, 3001, Layout::dense), out(DType::f32, 6, 3001, Layout::dense);
      calls.fill(&logits);
      CrossEntropyForwardBackward op{.logits = logits.view, .grad_logits = out.view};
      op.options = {.label_smoothing = .1f, .z_loss = .01f, .softcap = softcap};
      op.target = calls.targets(6, 3001, &pool);
      op.loss = pool.vector(1, 0);
      op.loss.rank = 0;
      check(op, &logits, &out, &CrossEntropyForwardBackward::grad_logits);
    }
  }
  cpu::force_target(nullptr);
}

}  // namespace
}  // namespace logitless
