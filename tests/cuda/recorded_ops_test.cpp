// SPDX-License-Identifier: Apache-2.0
// Every op but divergences on RecordedCuda, which runs nothing: a call allocates nothing and keeps
// CUDA's rules. If any one function of the runtime, the driver or cuBLASLt fails, the call says so,
// leaks nothing, and has launched nothing unless a launch itself failed.
#include <set>
#include <string_view>

#include "recorded.h"
#include "src/cuda/linear/search.h"
#include "tests/support/allocation_count.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using cuda::RecordedCuda;

constexpr RecordedCuda::Device kDevices[] = {{"A100", 8, 0, true, 108, 166912},
                                             {"H100", 9, 0, true, 132, 232448}};
constexpr Execution kExecution{.device = {DeviceType::cuda, 1}};

// A call whose tensors have addresses but no memory, and its share of the workspace.
template <class Op>
struct Call {
  Op op;
  double share;
  std::string name;
};

// Tensors get 2^40 bytes of address space each, and begin `offset` bytes into it.
class Nowhere {
 public:
  explicit Nowhere(int64_t offset = 0) : offset_(offset) {}
  void* next() { return reinterpret_cast<void*>((next_++ << 40) + offset_); }

 private:
  int64_t next_ = 1, offset_;
};
constexpr int64_t kWorkspace = int64_t{1} << 46;

template <class Op>
Status run_nowhere(const Call<Op>& call, const Execution& execution = kExecution) {
  WorkspaceSize size;
  const Status status = workspace(call.op, execution, &size);
  if (!status.ok()) return status;
  const auto range = static_cast<double>(size.recommended - size.minimum);
  const uint64_t bytes = size.minimum + static_cast<uint64_t>(call.share * range);
  return run(call.op, {reinterpret_cast<void*>(kWorkspace), bytes}, execution);
}

template <class Op>
Op nowhere(Op op, int64_t offset = 0) {
  Nowhere addresses(offset);
  const logitless_op unused{};
  for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (!view) return;
    view.data = addresses.next();
    view.byte_offset = 0;
    view.device = kExecution.device;
  });
  return op;
}

// Gives the op sizes of a real head, so that several plans exist.
template <class Op>
void grow(Op* op, int64_t tokens = 4096, int64_t hidden = 256, int64_t vocab = 60000) {
  const auto dense = [](TensorView* v, int64_t rows, int64_t columns) {
    if (!*v) return;
    v->shape = {rows, columns};
    v->stride = {columns, 1};
  };
  const auto long_as = [](TensorView* v, int64_t size) {
    if (!*v || v->rank != 1) return;
    v->shape = {size};
    v->stride = {1};
  };
  dense(&op->input, tokens, hidden);
  dense(&op->weight, vocab, hidden);
  long_as(&op->bias, vocab);
  long_as(&op->target, tokens);
  long_as(&op->weights.token, tokens);
  long_as(&op->weights.vocab, vocab);
  if constexpr (ForwardOp<Op>) {
    if (op->options.reduction == Reduction::none) long_as(&op->loss, tokens);
    TokenStatistics& s = op->statistics;
    for (TensorView* v : {&s.lse, &s.target_logit, &s.entropy, &s.argmax, &s.row_reference,
                          &s.row_log_sum, &s.weighted_logit_sum}) {
      long_as(v, tokens);
    }
  }
  if constexpr (GradientOp<Op>) {
    if (op->options.reduction == Reduction::none) long_as(&op->grad_loss, tokens);
    dense(&op->grad_input, tokens, hidden);
    dense(&op->grad_weight, vocab, hidden);
    long_as(&op->grad_bias, vocab);
  }
  if constexpr (BackwardOnlyOp<Op>) {
    for (TensorView* v : {&op->row_reference, &op->row_log_sum, &op->entropy, &op->grad_lse,
                          &op->grad_target_logit, &op->grad_entropy}) {
      long_as(v, tokens);
    }
  }
}

class CudaRecorded : public testing::TestWithParam<std::tuple<OpKind, DType>> {
 protected:
  const OpKind op_ = std::get<0>(GetParam());
  const DType dtype_ = std::get<1>(GetParam());

  // Calls f(call) with calls that together take many paths through an op. Calls of a head run with
  // workspaces of these shares.
  template <class F>
  void for_calls(const std::vector<double>& shares, F&& f) const {
    with_op(op_, [&](auto kind) {
      using Op = decltype(kind);
      const auto use = [&](const Case& c, const char* name) {
        f(Call<Op>{nowhere(build<Op>(c).op), 1, name});
      };
      const Case plain{.op = op_, .shape = {33, 64, 300}, .dtype = dtype_};
      Case c = plain;
      c.grad_input = c.grad_weight = dtype_;
      use(c, "plain");
      c = plain;
      c.shape = {33, 61, 301};
      if (op_ != OpKind::softmax) apply_options(&c);
      use(c, "every option");
      c.placement = Placement::strided;
      use(c, "every option, strided");
      if constexpr (!LinearOp<Op>) {
        c = plain;
        c.shape = {2, 1, 50257};
        use(c, "long rows");
        if constexpr (LossOp<Op>) {
          c = plain;
          c.options.input_kind = InputKind::probabilities;
          if (op_ != OpKind::backward) use(c, "probabilities");
        }
      } else {
        for (const bool options : {false, true}) {
          c = plain;
          c.grad_input = c.grad_weight = dtype_;
          if (options) apply_options(&c);
          Call<Op> call{build<Op>(c).op, 0, options ? "a head with every option" : "a head"};
          grow(&call.op);
          call.op = nowhere(call.op);
          for (const double share : shares) {
            call.share = share;
            f(call);
          }
        }
      }
    });
  }

 private:
  static void apply_options(Case* c) {
    c->options.label_smoothing = 0.1f;
    c->options.softcap = 20;
    c->ignored = 0.1;
    c->token_weight = c->vocab_weight = c->statistics = c->bias = true;
    c->bias_dtype = c->dtype;
    if (has_gradient(c->op)) c->grad_loss = true;
    if (c->op == OpKind::backward || c->op == OpKind::linear_backward) {
      c->grad_lse = c->grad_target_logit = c->grad_entropy = c->saved_state = true;
    }
  }
};

TEST_P(CudaRecorded, KeepsTheRulesAndAllocatesNothing) {
  for (const auto& device : kDevices) {
    RecordedCuda machine({kDevices[0], device});
    for_calls({0, 0.3, 1, 3, 100}, [&](const auto& call) {
      WorkspaceSize size;
      Status status = workspace(call.op, kExecution, &size);
      ASSERT_TRUE(status.ok()) << status.message();
      const int before = machine.launches();
      const int64_t allocated = allocations();
      status = run_nowhere(call);
      EXPECT_EQ(allocations(), allocated) << call.name << " on " << device.name;
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_STREQ(machine.fault(), "") << call.name << " on " << device.name;
      EXPECT_GT(machine.launches(), before);
      EXPECT_EQ(machine.live(), 0);
      EXPECT_EQ(machine.current(), 0);
    });
  }
}

// In a new thread the device may be current without a context.
TEST_P(CudaRecorded, AThreadThatHasNotCalledCudaYet) {
  for_calls({1}, [&](auto call) {
    RecordedCuda machine({kDevices[1]});
    const Execution first{.device = {DeviceType::cuda, 0}};
    const logitless_op unused{};
    for_each_tensor(call.op, unused, [&](const char*, Access, TensorView& view, auto&&) {
      if (view) view.device = first.device;
    });
    const Status status = run_nowhere(call, first);
    EXPECT_TRUE(status.ok()) << call.name << ": " << status.message();
  });
}

// Functions called for each launch: the launches, and those that describe a product.
const std::set<std::string>& launch_questions() {
  static const std::set<std::string> all{
      "cudaLaunchKernelExC",        "cudaMemcpyAsync",          "cublasLtMatmul",
      "cublasLtMatrixLayoutCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"};
  return all;
}
// Functions whose failure the call survives.
bool may_fail(const std::string& question) {
  static const std::set<std::string> all{"cudaGetDevice",
                                         "cudaSetDevice",
                                         "cuCtxGetId",
                                         "dlsym",
                                         "dlopen",
                                         "cublasLtMatmulAlgoCheck",
                                         "cublasLtMatmulAlgoConfigGetAttribute"};
  return all.contains(question);
}

// Every function used after the first launch, except those of launches, was also called before it,
// so that no refusal can come after a launch.
TEST_P(CudaRecorded, NothingIsAskedForTheFirstTimeAfterALaunch) {
  for (const auto& device : kDevices) {
    for_calls({0, 0.3, 1}, [&](const auto& call) {
      RecordedCuda machine({kDevices[0], device});
      EXPECT_TRUE(run_nowhere(call).ok());
      EXPECT_EQ(machine.first_asked_late(launch_questions()), "")
          << call.name << " on " << device.name;
    });
  }
}

TEST_P(CudaRecorded, AnyQuestionThatFailsIsSaidBeforeAnythingIsLaunched) {
  for (const auto& device : kDevices) {
    for_calls({0, 1}, [&](const auto& call) {
      // A head makes thousands of calls, mostly alike: each of the first 48 fails in turn, then
      // every 499th.
      for (int n = 1;; n += n < 48 ? 1 : 499) {
        RecordedCuda machine({kDevices[0], device});
        machine.fail_question(n);
        const Status status = run_nowhere(call);
        if (machine.failed() == nullptr) {
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_GT(n, 8) << "questions";
          break;
        }
        const std::string what = std::string(machine.failed()) + ", question " + std::to_string(n) +
                                 " of " + call.name + " on " + device.name;
        EXPECT_EQ(machine.live(), 0) << what;
        EXPECT_EQ(machine.last_error(), cudaSuccess) << what;
        EXPECT_STREQ(machine.fault(), "") << what;
        if (!may_fail(machine.failed())) {
          EXPECT_FALSE(status.ok()) << what;
        }
        if (!status.ok()) {
          EXPECT_EQ(machine.launches(), machine.launches_before_failure())
              << what << ": " << status.message();
        }
        if (HasFailure()) return;
        // After a failure, the next call starts afresh and succeeds.
        machine.fail_question(0);
        const Status again = run_nowhere(call);
        EXPECT_TRUE(again.ok()) << what << ", then: " << again.message();
      }
    });
  }
}

// Other addresses, aligned to 16 bytes alike, take the same algorithms.
TEST_P(CudaRecorded, AddressesOfSixteenBytesAreAllTheSame) {
  if (!is_linear(op_)) return;
  for_calls({0, 1}, [&](auto call) {
    RecordedCuda machine({kDevices[0], kDevices[0]});
    EXPECT_TRUE(run_nowhere(call).ok());
    const int asked = machine.heuristics();
    EXPECT_GT(asked, 0);
    call.op = nowhere(call.op, 48);
    EXPECT_TRUE(run_nowhere(call).ok());
    EXPECT_EQ(machine.heuristics(), asked) << call.name;
  });
}

// Records the streams of launches.
struct Streams final : RecordedCuda::Listener {
  std::set<void*> seen;
  void launch(const cudaLaunchConfig_t& config, const void*, void**, const cuda::Parameter*,
              int) override {
    seen.insert(config.stream);
  }
  void copy(void*, const void*, size_t) override {}
  void encode(const Map&, CUtensorMap*) override {}
  void* layout(int, uint64_t, uint64_t, int64_t) override { return &seen; }
  void* description(int, int) override { return &seen; }
  void* preference() override { return &seen; }
  void set(void*, int, const void*, size_t) override {}
  void choose(const Operands&, void*, cuda::lt::Algorithm*) override {}
  void multiply(const Operands&, std::array<const void*, 6>, const cuda::lt::Algorithm&, void*,
                size_t) override {}
};

// A plan's launches go to the stream given to run, not that given to create.
TEST_P(CudaRecorded, APlanRunsWhereItIsTold) {
  for_calls({1}, [&](const auto& call) {
    RecordedCuda machine({kDevices[0], kDevices[1]});
    Plan plan;
    WorkspaceSize size;
    ASSERT_TRUE(plan.create(call.op, kExecution).ok());
    ASSERT_TRUE(plan.size(&size).ok());
    Streams streams;
    machine.listener = &streams;
    void* const stream = &size;
    const Addresses addresses(call.op);
    const Status status =
        plan.run(addresses, {reinterpret_cast<void*>(kWorkspace), size.minimum}, stream);
    machine.listener = nullptr;
    EXPECT_TRUE(status.ok()) << call.name << ": " << status.message();
    EXPECT_EQ(streams.seen, std::set<void*>{stream}) << call.name;
    EXPECT_EQ(machine.live(), 0) << call.name;
  });
}

// Two passes over the vocabulary consist of two plans, found without an allocation.
TEST(CudaRecordedPasses, AllocateNothing) {
  constexpr uint64_t bytes = 100 << 20;
  Case c{.op = OpKind::linear_forward_backward, .shape = {33, 64, 300}, .dtype = DType::bf16};
  c.grad_input = c.grad_weight = DType::bf16;
  auto op = build<LinearCrossEntropyForwardBackward>(c).op;
  grow(&op, 8192, 768, 50257);
  op = nowhere(op);
  RecordedCuda machine({kDevices[1], kDevices[1]});
  const cuda::DeviceInfo* device;
  ASSERT_TRUE(cuda::find_device(kExecution.device.index, &device).ok());
  ASSERT_EQ(cuda::passes(cuda::asked_of(op, *device), bytes).size(), 2u);
  const Workspace scratch{reinterpret_cast<void*>(kWorkspace), bytes};
  const int64_t allocated = allocations();
  const Status status = run(op, scratch, kExecution);
  EXPECT_EQ(allocations(), allocated);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_STREQ(machine.fault(), "");
}

// Combine takes at most three launches, and two more for top-k lists.
TEST(CudaRecordedCombine, TakesThreeLaunches) {
  constexpr int64_t shards = 4, tokens = 8192, listed = 20;
  for (const auto& [reduction, lists] :
       {std::pair{Reduction::none, false}, {Reduction::mean, false}, {Reduction::mean, true}}) {
    Combine op;
    const logitless_op unused{};
    for_each_tensor(op, unused, [&](std::string_view name, Access, TensorView& view, auto&&) {
      const bool index = name == "target" || name == "argmax" || name == "shard_argmax";
      const DType dtype = index ? DType::i64 : DType::f32;
      if (name.find("top_") != name.npos) {
        const bool of_shards = name.starts_with("shard_");
        const DType of_list = name.ends_with("ids") ? DType::i64 : DType::f32;
        const int64_t rows = of_shards ? shards : tokens, each = of_shards ? tokens : 1;
        if (lists) view = matrix_view(nullptr, of_list, rows, each * listed);
        return;
      }
      if (name.starts_with("shard_")) view = matrix_view(nullptr, dtype, shards, tokens);
      if (!view) view = vector_view(nullptr, dtype, tokens);
      if (name == "vocab_weight") view.shape[0] = 50257;
      if (name == "fault") view = vector_view(nullptr, DType::i32, 1);
      if (name == "rank" || name == "mass_above" || name == "normalizer") view = {};
    });
    if (reduction != Reduction::none) op.loss = scalar_view(nullptr, DType::f32);
    op.options = {.reduction = reduction, .label_smoothing = 0.1f, .vocab_total = 50257};
    for (const auto& device : kDevices) {
      RecordedCuda machine({kDevices[0], device});
      const Call<Combine> call{nowhere(op), 1, "combine"};
      WorkspaceSize size;
      EXPECT_TRUE(workspace(call.op, kExecution, &size).ok());
      const int64_t allocated = allocations();
      const Status status = run_nowhere(call);
      EXPECT_EQ(allocations(), allocated);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_STREQ(machine.fault(), "");
      EXPECT_EQ(machine.launches(), (reduction == Reduction::none ? 2 : 3) + (lists ? 2 : 0));
      EXPECT_EQ(machine.first_asked_late(launch_questions()), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaRecorded,
                         testing::Combine(testing::ValuesIn(kOps),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  name_of(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace logitless::conformance
