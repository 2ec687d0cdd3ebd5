// SPDX-License-Identifier: Apache-2.0
// One C call described by bytes, on the CPU and on the reference. It must not crash, read or write
// outside what the views say, or trip a sanitizer; both backends must return the same status; a
// failed call must change no tensor; and the CPU's results must be within the reference's bounds.
#include <algorithm>
#include <cstdio>

#include "fuzz/judge.h"
#include "fuzz/scenario.h"
#include "src/reference/reference.h"

namespace logitless::fuzz {
namespace {

// An executor that runs items last to first, on one thread that claims to be several.
void run_backwards(void*, int64_t count, void (*fn)(void*, int64_t), void* context) {
  while (count-- > 0) fn(context, count);
}

template <class Op>
class Scenario {
 public:
  explicit Scenario(Input& in) { describe(in); }

  void run() {
    Status reference, cpu;
    WorkspaceSize size, reference_size;
    ask(DeviceType::reference, &reference, &reference_size);
    ask(DeviceType::cpu, &cpu, &size);
    if (cpu.code() != reference.code()) {
      fail("the backends plan differently", text(*cpu.c()) + ", " + text(*reference.c()));
    }
    if (!cpu.ok() || size.recommended > (64u << 20)) return;
    if (size.minimum > size.recommended) fail("minimum above recommended", "");
    give_workspace(size);
    initial_ = contents();
    call(DeviceType::reference, &reference);
    check_bytes(reference.ok());
    restore();
    reference::Result expected;
    if (reference.ok()) expected = reference::evaluate(op_, {.structured = broadcasts()});
    call(DeviceType::cpu, &cpu);
    check_bytes(cpu.ok());
    if (workspace_.bytes < size.minimum) {
      if (cpu.ok()) fail("ran in too small a workspace", "");
      return;
    }
    if (cpu.code() != reference.code()) {
      fail("the backends run differently", text(*cpu.c()) + ", " + text(*reference.c()));
    }
    // With mutated structs the call may be valid but differs from op_.
    if (cpu.ok() && !extreme_ && !mutate_struct_) compare(expected);
  }

 private:
  template <class F>
  void for_each_view(F&& f) {
    const logitless_op unused{};
    for_each_tensor(op_, unused,
                    [&](const char* name, Access access, TensorView& view,
                        const logitless_tensor*) { f(name, access, view); });
  }

  // With repeated numbers rounding errors add up in one direction, for which docs/semantics.md has
  // a larger bound.
  bool broadcasts() {
    bool any = false;
    for_each_view([&](const char*, Access, const TensorView& view) {
      for (int d = 0; d < view.rank; ++d) any |= view.shape[d] > 1 && view.stride[d] == 0;
    });
    return any;
  }

  static Sizes sizes_from(Input& in) {
    Sizes s;
    // Mostly small; sometimes above 2048 columns (a row block) or several token tiles.
    const int64_t extent = in.between(0, 7);
    s.tokens = in.between(0, extent == 6 ? 80 : extent == 7 ? 3 : 9);
    s.vocab = in.between(0, extent == 6 ? 60 : extent == 7 ? 5000 : extent < 3 ? 12 : 700);
    s.hidden = in.between(1, 70);
    s.dtype = in.pick({DType::f32, DType::bf16, DType::f16});
    s.vocab_total = s.vocab;
    s.chosen = 1 + s.hidden % 6;
    s.lists = s.hidden % 4 == 3;
    return s;
  }

  void describe(Input& in) {
    threads_ = in.between(1, 5);
    Sizes s = sizes_from(in);
    Reduction reduction = Reduction::mean;
    if constexpr (LossOp<Op>) {
      op_.options = options_from(in, &extreme_);
      reduction = op_.options.reduction;
      if (in.between(0, 7) == 7) {
        op_.options.vocab_start = in.between(-1, 9);
        op_.options.vocab_total = s.vocab + in.between(-1, 12);
        s.vocab_total = std::max(s.vocab, op_.options.vocab_total);
      }
    }
    if constexpr (CombiningOp<Op>) {
      s.shards = in.between(2, 6);
      if (!in.rarely()) op_.options.vocab_total = s.vocab_total = std::max<int64_t>(s.vocab, 1);
    }
    if constexpr (LinearOp<Op> && GradientOp<Op>) op_.accumulate_grad_weight = in.coin();
    uint64_t present = in.any<uint64_t>();
    if constexpr (OnlyChoosingOp<Op>) {
      op_.only_chosen = in.between(0, 3) == 3;
      if (op_.only_chosen) present = 0;  // only its required fields: nearly nothing else is allowed
    }
    uint32_t field = 0;
    bool chooses = false, lists = false, keeps = false;
    for_each_view([&](std::string_view name, Access access, TensorView& view) {
      const bool required = name == "input" || name == "weight" || name == "logits" ||
                            name == "target" || name == "probabilities" || name == "grad_logits" ||
                            name == "loss" || name == "grad_input" || name.starts_with("shard_");
      bool given = ((present >> field++) & 1) || (required && !in.rarely());
      // logits_at comes with ids, and the parts of a list come together.
      if constexpr (OnlyChoosingOp<Op>) {
        if (name == "ids" && op_.only_chosen) given = true;
      }
      if (name == "ids") chooses = given;
      if (name.ends_with("logits_at") && !in.rarely()) given = chooses;
      if (name == "id_offsets" && !in.rarely()) given = chooses && s.lists;
      if (name.find("top_") != name.npos) {
        if (name == (CombiningOp<Op> ? "shard_top_logits" : "top_logits")) lists = given && !keeps;
        if (!in.rarely()) given = lists;
      }
      if (name == "kept") keeps = given;
      if (!given) return;
      view = plain_view(name, s, reduction);
      vary_view(in, name, access != Access::read, &view);
      if (op_accumulates() && (name == "grad_weight" || name == "grad_bias") && !in.rarely()) {
        view.dtype = DType::f32;
      }
      give_memory(&view, &blocks_);
    });
    if constexpr (LossOp<Op>) {
      if (op_.weights.temperature && !in.rarely()) op_.options.temperature = 1;
    }
    overlay(in);
    fill(in, s);
    if constexpr (BackwardOnlyOp<Op>) save_forward(in);
    mutate_struct_ = in.rarely();
    foreign_ = in.any<uint32_t>();
    workspace_choice_ = in.between(0, 9);
  }

  bool op_accumulates() const {
    if constexpr (LinearOp<Op> && GradientOp<Op>) return op_.accumulate_grad_weight;
    return false;
  }

  // Makes the op work in place, or puts one field over another.
  void overlay(Input& in) {
    const int choice = in.between(0, 7);
    if (choice == 1) {
      if constexpr (requires { op_.grad_logits; }) op_.grad_logits = op_.logits;
      if constexpr (requires { op_.probabilities; }) op_.probabilities = op_.logits;
    }
    if (choice != 2) return;
    std::vector<TensorView*> views;
    for_each_view([&](const char*, Access, TensorView& view) { views.push_back(&view); });
    TensorView* first = views[in.between(0, views.size() - 1)];
    alias(first, *views[in.between(0, views.size() - 1)]);
  }

  void fill(Input& in, const Sizes& s) {
    const bool wild = in.between(0, 3) == 3;
    int64_t ignore_index = -100;
    bool probabilities = false;
    if constexpr (LossOp<Op>) {
      ignore_index = op_.options.ignore_index;
      probabilities = op_.options.input_kind == InputKind::probabilities;
    }
    for_each_view([&](const char* name, Access access, TensorView& view) {
      if (access == Access::write || !has_memory(view) || elements(view) == 0) return;
      std::vector<double> values(static_cast<size_t>(elements(view)));
      for (double& value : values) {
        value = value_of(name, s, ignore_index, wild, probabilities, BackwardOnlyOp<Op>, in.random);
        if (std::string_view(name) == "id_offsets" && (!wild || in.random.below(8) > 0)) {
          value = static_cast<double>((&value - values.data()) * s.chosen);
        }
        if (size_of(view.dtype) == 8 || view.dtype == DType::i32) {
          value = std::isfinite(value) ? std::clamp(value, -1e6, 1e6) : 0;
        }
      }
      if (view.as<char>() != nullptr && reinterpret_cast<uintptr_t>(view.as<char>()) %
                                                static_cast<uintptr_t>(size_of(view.dtype)) ==
                                            0) {
        reference::write(values, view);
      }
    });
  }

  // Backward reads what Forward wrote; on a shard the other shards' sums are added. If Forward
  // cannot write it, Backward runs without.
  void save_forward(Input& in) {
    std::conditional_t<LinearOp<Op>, LinearCrossEntropyForward, CrossEntropyForward> forward;
    if constexpr (LinearOp<Op>) {
      forward.input = op_.input, forward.weight = op_.weight, forward.bias = op_.bias;
    } else {
      forward.logits = op_.logits;
    }
    forward.target = op_.target;
    forward.options = op_.options;
    forward.weights = op_.weights;
    forward.statistics.row_reference = op_.row_reference;
    forward.statistics.row_log_sum = op_.row_log_sum;
    forward.statistics.entropy = op_.entropy;
    if (logitless::run(forward, {}, {.device = {DeviceType::reference, 0}}).ok()) {
      if (op_.options.vocab_total <= 0 || !op_.row_log_sum) return;
      std::vector<double> log_sum = reference::read(op_.row_log_sum);
      for (double& value : log_sum) value += in.random.uniform();
      reference::write(log_sum, op_.row_log_sum);
      return;
    }
    Status status;
    WorkspaceSize size;
    ask(DeviceType::reference, &status, &size);
    if (status.ok()) op_.row_reference = op_.row_log_sum = op_.entropy = op_.grad_entropy = {};
  }

  // Calls f with the C op, with a mistake in its structs if the bytes ask for one.
  template <class F>
  void with_c_op(F&& f) {
    detail::COp<Op> c(op_);
    const logitless_tensor foreign{};
    if (mutate_struct_) {
      switch (foreign_ % 8) {
        case 0:
          c.op.struct_size = foreign_ >> 24;
          break;
        case 1:
          c.op.grad_lse = &foreign;
          break;
        case 2:
          c.op.probabilities = &foreign;
          break;
        case 3:
          c.op.reserved = 1;
          break;
        case 4:
          c.op.kind = static_cast<int32_t>(foreign_) >> 8;
          break;
        case 5:
          c.tensors[foreign_ / 8 % c.tensors.size()].struct_size = foreign_ >> 24;
          break;
        case 6:
          c.tensors[foreign_ / 8 % c.tensors.size()].reserved = 1;
          break;
        default:
          c.op.accumulate_grad_weight ^= 1;
      }
    }
    f(&c.op);
  }

  logitless_execution execution(DeviceType device) const {
    return {sizeof(logitless_execution), static_cast<int32_t>(device), 0, 0, nullptr, &executor_};
  }

  void ask(DeviceType device, Status* status, WorkspaceSize* size) {
    executor_ = {sizeof(executor_), threads_, nullptr, run_backwards};
    const logitless_execution e = execution(device);
    logitless_workspace_size s = LOGITLESS_WORKSPACE_SIZE_INIT;
    with_c_op([&](const logitless_op* op) {
      check_status(*status->c(), logitless_workspace(op, &e, &s, status->c()));
    });
    *size = {s.minimum, s.recommended, s.alignment};
  }

  void call(DeviceType device, Status* status) {
    const logitless_execution e = execution(device);
    const logitless_workspace_buffer w = {sizeof(w), 0, workspace_.data, workspace_.bytes, 0};
    with_c_op([&](const logitless_op* op) {
      check_status(*status->c(), logitless_run(op, &w, &e, status->c()));
    });
  }

  void give_workspace(const WorkspaceSize& size) {
    uint64_t bytes = size.minimum;
    if (workspace_choice_ > 3) bytes = size.recommended;
    if (workspace_choice_ == 2) bytes += (size.recommended - size.minimum) / 2 + 1;
    if (workspace_choice_ == 3 && bytes > 0) --bytes;
    scratch_ = std::make_unique<Block>(bytes, std::max<uint64_t>(size.alignment, 16));
    workspace_ = {scratch_->data.get(), bytes, 0};
  }

  using Contents = std::vector<std::vector<char>>;
  Contents contents() const {
    Contents all;
    for (const Block& block : blocks_) {
      all.emplace_back(block.data.get(), block.data.get() + block.bytes);
    }
    return all;
  }

  void restore() {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      std::copy(initial_[b].begin(), initial_[b].end(), blocks_[b].data.get());
    }
  }

  // Only elements of outputs may change, and after an error nothing may.
  void check_bytes(bool ran) {
    Contents allowed = initial_;
    for_each_view([&](const char*, Access access, TensorView& view) {
      if (!ran || access == Access::read || !has_memory(view) || elements(view) == 0) return;
      for (size_t b = 0; b < blocks_.size(); ++b) {
        if (blocks_[b].data.get() == view.data) copy_elements(view, b, &allowed[b]);
      }
    });
    if (allowed != contents()) fail("bytes written", ran ? "beside the outputs" : "on an error");
  }

  void copy_elements(const TensorView& view, size_t block, std::vector<char>* to) {
    const int64_t columns = view.rank == 2 ? view.shape[1] : 1;
    const size_t size = static_cast<size_t>(size_of(view.dtype));
    for (int64_t k = 0; k < elements(view); ++k) {
      int64_t index = view.rank >= 1 ? k / columns * view.stride[0] : 0;
      if (view.rank == 2) index += k % columns * view.stride[1];
      const size_t at = view.byte_offset + static_cast<size_t>(index) * size;
      std::memcpy(to->data() + at, blocks_[block].data.get() + at, size);
    }
  }

  void compare(const reference::Result& expected) {
    for_each_view([&](std::string name, Access access, TensorView& view) {
      const auto found = expected.outputs.find(name);
      if (access == Access::read || !view || found == expected.outputs.end()) return;
      const reference::Output& want = found->second;
      const std::vector<double> got = reference::read(view);
      for (size_t i = 0; i < got.size(); ++i) {
        const bool ok = !want.accepted.empty()
                            ? std::count(want.accepted[i].begin(), want.accepted[i].end(),
                                         static_cast<int64_t>(got[i])) > 0
                            : within(got[i], want.value[i], want.bound[i], view.dtype);
        if (ok) continue;
        char detail[160];
        std::snprintf(detail, sizeof(detail), "%s[%zu] is %.9g; reference %.9g, bound %.3g",
                      name.c_str(), i, got[i], want.value[i], want.bound[i]);
        print();
        fail("outside the bound", detail);
      }
    });
  }

  // Prints the call, to explain a failure.
  void print() {
    std::fprintf(stderr, "%s, %d threads, workspace %llu bytes\n", name_of_op(kind_of<Op>),
                 threads_, static_cast<unsigned long long>(workspace_.bytes));
    if constexpr (LossOp<Op>) {
      const LossOptions& o = op_.options;
      std::fprintf(stderr,
                   "reduction %d ignore_index %lld label_smoothing %g z_loss %g logit_scale %g "
                   "softcap %g temperature %g input_kind %d normalizer %g shard %lld of %lld\n",
                   static_cast<int>(o.reduction), static_cast<long long>(o.ignore_index),
                   o.label_smoothing, o.z_loss, o.logit_scale, o.softcap, o.temperature,
                   static_cast<int>(o.input_kind), o.normalizer,
                   static_cast<long long>(o.vocab_start), static_cast<long long>(o.vocab_total));
    }
    for_each_view([](const char* name, Access, const TensorView& v) {
      if (!v) return;
      std::fprintf(stderr, "  %s %s %s strides %lld, %lld\n", name, name_of(v.dtype),
                   shape_text(v).text, static_cast<long long>(v.stride[0]),
                   static_cast<long long>(v.stride[1]));
      if (elements(v) > 64) return;
      for (const double value : reference::read(v)) std::fprintf(stderr, "    %.9g", value);
      std::fprintf(stderr, "\n");
    });
  }

  Op op_{};
  std::vector<Block> blocks_;
  std::unique_ptr<Block> scratch_;
  int threads_ = 1, workspace_choice_ = 0;
  bool extreme_ = false, mutate_struct_ = false;
  uint32_t foreign_ = 0;
  Executor executor_{};
  Workspace workspace_{};
  Contents initial_;
};

}  // namespace
}  // namespace logitless::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace logitless;
  fuzz::Input in(data, size);
  switch (in.between(0, 7)) {
    case 0:
      fuzz::Scenario<Softmax>(in).run();
      break;
    case 1:
      fuzz::Scenario<CrossEntropyForward>(in).run();
      break;
    case 2:
      fuzz::Scenario<CrossEntropyBackward>(in).run();
      break;
    case 3:
      fuzz::Scenario<CrossEntropyForwardBackward>(in).run();
      break;
    case 4:
      fuzz::Scenario<LinearCrossEntropyForward>(in).run();
      break;
    case 5:
      fuzz::Scenario<LinearCrossEntropyBackward>(in).run();
      break;
    case 6:
      fuzz::Scenario<LinearCrossEntropyForwardBackward>(in).run();
      break;
    default:
      fuzz::Scenario<Combine>(in).run();
  }
  return 0;
}
