// SPDX-License-Identifier: Apache-2.0
// A subject is a call for tests to break: any op with most fields given, accepted as it is, that
// owns its memory. The tables of accepts and rejects change one thing in it.
//   N = 3, V = 5, D = 4, P = 2, f32, mean with a given normalizer
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "src/call.h"
#include "src/kept.h"
#include "src/validate.h"

namespace logitless::testing {

// The memory of one tensor or workspace: the bytes in use, and room on both sides.
struct Memory {
  static constexpr size_t room = 512, alignment = 128;
  explicit Memory(size_t bytes) : content(bytes + 3 * room, 0xA5) {}
  char* data() {
    char* middle = content.data() + room;
    return middle + (alignment - reinterpret_cast<uintptr_t>(middle) % alignment) % alignment;
  }
  std::vector<char> content;
};

struct Subject {
  static constexpr int64_t n = 3, v = 5, d = 4;

  int32_t kind = -1;
  std::map<std::string, TensorView*> views;  // every field of the op, by name
  std::map<std::string, Access> access;
  LossOptions* options = nullptr;                    // nullptr for Softmax
  bool* accumulate = nullptr;                        // of linear ops with gradients
  bool* consume = nullptr;                           // of a linear Backward
  std::map<std::string, TensorView*> of_whole_rows;  // rank and mass_above, which Combine lacks
  uint64_t key_error = 0;                            // makes kept_key wrong
  TensorView anchor{};                               // allowed only for a shard
  TensorView teacher_logits{};                       // in place of the teacher's head
  DivergenceOptions* divergence = nullptr;           // of divergences
  // Fields of a divergence's shard, which is given the states of the whole vocabulary.
  std::map<std::string, TensorView> of_sums;
  std::map<std::string, TensorView> of_choice;  // ids, logits_at and its gradient
  std::map<std::string, TensorView> of_lists;   // top_logits and top_ids
  TensorView id_offsets{};                      // for ids as lists
  bool* only_chosen = nullptr;                  // of a linear Backward of a loss
  Execution execution{};
  Workspace workspace{};
  WorkspaceSize size{};  // what `workspace` says of the unbroken op
  std::map<std::string, std::unique_ptr<Memory>> memory;

  std::function<Status(WorkspaceSize*)> ask_workspace;
  std::function<Status()> call_run;
  // Runs the call through a plan; empty where only the rules are tested.
  std::function<Status()> call_plan;

  bool has(const std::string& name) const { return views.contains(name); }
  TensorView& operator[](const std::string& name) { return *views.at(name); }
  bool linear() const { return has("input"); }
  bool combines() const { return has("shard_row_reference"); }
  bool by_the_rules_alone() const { return execution.device.type == DeviceType::cuda; }
  bool diverges() const { return divergence != nullptr; }
  bool forward() const { return has("loss"); }
  bool gradients() const { return has("grad_loss"); }
  bool written(const std::string& name) const { return access.at(name) != Access::read; }
  // Gives a workspace with some spare bytes, so that a slightly changed call fits too.
  void give_workspace(uint64_t recommended) {
    const uint64_t bytes = recommended + 4096;
    memory["workspace"] = std::make_unique<Memory>(bytes);
    workspace = {memory["workspace"]->data(), bytes, 0};
  }
  // Takes fields away where the op has them.
  void drop(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (has(name)) (*this)[name] = {};
    }
  }
  // Turns the op into the shard [4, 4 + V) of a vocabulary of 16, without the fields that a shard
  // may not have; returns false where the op has no shards.
  bool make_shard() {
    if (options == nullptr || (forward() && gradients()) || combines()) return false;
    options->vocab_start = 4;
    options->vocab_total = 16;
    drop({"loss", "rank", "mass_above", "kept", "kept_rows"});
    if (has("anchor")) (*this)["anchor"] = anchor;
    if (diverges()) return forward() ? drop({"logprob", "acceptance"}), true : make_sums();
    (*this)["vocab_weight"].shape[0] = 16;
    return true;
  }
  // Turns a divergence into that of a shard: Forward with its sums, Backward with states. Returns
  // false for other ops.
  bool make_sums() {
    if (of_sums.empty()) return false;
    drop({"loss", "entropy", "teacher_entropy", "logprob", "target_logit", "kept", "kept_rows"});
    for (const auto& [name, view] : of_sums) (*this)[name] = view;
    if (ask_workspace(&size).ok()) give_workspace(size.recommended);
    return true;
  }
  // Gives a divergence's Backward the rows' states in place of kept state; true for every other op.
  bool give_states() { return diverges() ? make_sums() : true; }
  // Takes fields away and remembers them, so that a test can give them back.
  void set_apart(std::map<std::string, TensorView>* apart,
                 std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (has(name)) std::swap((*apart)[name], (*this)[name]);
    }
  }
  // Gives ids and logits_at; returns false where the op has none.
  bool make_chosen() {
    for (const auto& [name, view] : of_choice) (*this)[name] = view;
    if (!of_choice.empty() && ask_workspace(&size).ok()) give_workspace(size.recommended);
    return !of_choice.empty();
  }
  // Turns the chosen columns into lists of four ids in all; returns false where the op has none.
  bool make_id_lists() {
    if (!make_chosen()) return false;
    for (const auto& [name, view] : of_choice) {
      (*this)[name].rank = 1, (*this)[name].shape = {4, 0}, (*this)[name].stride = {1, 0};
    }
    (*this)["id_offsets"] = id_offsets;
    const int64_t offsets[] = {0, 1, 1, 4};
    std::memcpy(id_offsets.data, offsets, sizeof(offsets));
    return true;
  }
  // Leaves a Backward no upstream gradient except that of chosen columns.
  bool make_only_chosen() {
    if (only_chosen == nullptr || !make_chosen()) return false;
    drop({"grad_loss", "grad_lse", "grad_target_logit", "grad_entropy", "entropy", "row_reference",
          "row_log_sum", "kept", "kept_rows", "token_weight", "vocab_weight", "normalizer"});
    *only_chosen = true;
    return true;
  }
  // Gives top_logits and top_ids, which exclude kept state; returns false where the op has none.
  bool make_lists() {
    if (of_lists.empty()) return false;
    drop({"kept", "kept_rows"});
    for (const auto& [name, view] : of_lists) (*this)[name] = view;
    if (ask_workspace(&size).ok()) give_workspace(size.recommended);
    return true;
  }
  // Gives a field that most calls leave out, with the fields that it needs.
  bool give(const std::string& name) {
    if (of_sums.contains(name)) return make_sums();
    if (of_choice.contains(name)) return make_chosen();
    if (of_lists.contains(name)) return make_lists();
    if (name == "id_offsets") return make_id_lists();
    return name == "teacher_logits" ? give_teacher_logits() : make_shard();
  }
  // Gives the teacher's logits in place of the teacher's head.
  bool give_teacher_logits() {
    if (!diverges()) return false;
    drop({"teacher_input", "teacher_weight", "teacher_bias"});
    (*this)["teacher_logits"] = teacher_logits;
    return true;
  }
  // Turns the op into one whose input is probabilities, without the fields that exclude them;
  // returns false where the op cannot have them.
  bool make_probabilities() {
    if (options == nullptr || linear() || combines()) return false;
    options->input_kind = InputKind::probabilities;
    drop_statistics();
    drop({"temperature"});
    return true;
  }
  // Drops the statistics, Backward's inputs made of them, and their gradients.
  void drop_statistics() {
    drop({"lse",
          "target_logit",
          "entropy",
          "argmax",
          "row_reference",
          "row_log_sum",
          "weighted_logit_sum",
          "logprob",
          "rank",
          "sum_p_squared",
          "mean_logit",
          "max_logprob",
          "mass_above",
          "teacher_entropy",
          "acceptance",
          "teacher_row_reference",
          "teacher_row_log_sum",
          "divergence_sum",
          "slope_sum",
          "slope_mean",
          "grad_lse",
          "grad_target_logit",
          "grad_entropy",
          "kept",
          "kept_rows"});
  }
  // Leaves a forward op no output except this one and the gradients; returns false where the op has
  // no forward or no such field.
  bool write_only(const std::string& name) {
    if (!forward() || !has(name)) return false;
    const TensorView left = (*this)[name];
    drop_statistics();
    drop({"loss"});
    (*this)[name] = left;
    return true;
  }
  // Cuts every field of N rows to N = 0.
  void make_empty() {
    for (auto& [name, view] : views) {
      if (view->rank >= 1 && view->shape[0] == n && name != "fault") view->shape[0] = 0;
      if (name.starts_with("shard_")) view->shape[1] = 0;
    }
  }
  std::map<std::string, std::vector<char>> snapshot() const {
    std::map<std::string, std::vector<char>> bytes;
    for (const auto& [name, block] : memory) bytes[name] = block->content;
    return bytes;
  }
};

inline TensorView subject_view(const std::string& name) {
  constexpr int64_t n = Subject::n, v = Subject::v, d = Subject::d;
  const auto is = [&](std::initializer_list<const char*> names) {
    for (const char* one : names) {
      if (name == one) return true;
    }
    return false;
  };
  if (is({"logits", "probabilities", "grad_logits", "teacher_logits"}))
    return matrix_view(nullptr, DType::f32, n, v);
  if (is({"input", "grad_input", "teacher_input"})) return matrix_view(nullptr, DType::f32, n, d);
  if (is({"weight", "grad_weight", "teacher_weight"}))
    return matrix_view(nullptr, DType::f32, v, d);
  if (is({"bias", "vocab_weight", "grad_bias", "teacher_bias"}))
    return vector_view(nullptr, DType::f32, v);
  if (is({"loss", "grad_loss", "normalizer"})) return scalar_view(nullptr, DType::f32);
  if (is({"target", "argmax", "rank"})) return vector_view(nullptr, DType::i64, n);
  if (is({"fault"})) return vector_view(nullptr, DType::i32, 1);
  if (is({"kept"})) return matrix_view(nullptr, DType::f32, 64, 64);
  if (is({"ids"})) return matrix_view(nullptr, DType::i64, n, 4);
  if (is({"id_offsets"})) return vector_view(nullptr, DType::i64, n + 1);
  if (is({"logits_at", "grad_logits_at"})) return matrix_view(nullptr, DType::f32, n, 4);
  if (is({"top_logits"})) return matrix_view(nullptr, DType::f32, n, 4);
  if (is({"top_ids"})) return matrix_view(nullptr, DType::i64, n, 4);
  if (is({"shard_top_logits"})) return matrix_view(nullptr, DType::f32, 2, n * 4);
  if (is({"shard_top_ids"})) return matrix_view(nullptr, DType::i64, 2, n * 4);
  if (is({"kept_rows"})) return matrix_view(nullptr, DType::f32, n, 8);
  if (is({"shard_argmax"})) return matrix_view(nullptr, DType::i64, 2, n);
  if (name.starts_with("shard_")) return matrix_view(nullptr, DType::f32, 2, n);
  return vector_view(nullptr, DType::f32, n);
}

// Fills inputs with 0.5 (integers with 1). Outputs keep the pattern of Memory.
inline void fill_subject(const TensorView& view, Access access, char* data) {
  if (access == Access::write) return;
  for (size_t i = 0; i < Memory::room / 8; ++i) {
    if (view.dtype == DType::i64) {
      const int64_t one = 1;
      std::memcpy(data + 8 * i, &one, 8);
    } else {
      const float half[2] = {0.5f, 0.5f};
      if (view.dtype == DType::f32) std::memcpy(data + 8 * i, half, 8);
    }
  }
}

// Sets Backward's key to that of its Forward. Called again after each change of the op.
template <class Op>
void set_kept_key(const Subject& s, Op& op) {
  if constexpr (KeepingOp<Op> && GradientOp<Op>) {
    op.kept_key = 0;
    if (!op.kept) return;
    const Call call(op, s.execution);
    if (call.tokens() > int64_t{1} << 56) return;  // refused before anything reads the key
    op.kept_key = kept_key(call, kept_columns(call)) + s.key_error;
  }
}

// Makes the subject run only the rules that `workspace` and `run` check before they need a device.
// The size of the workspace is invented.
template <class Op>
void ask_the_rules_alone(Subject* s, Op& op) {
  static constexpr WorkspaceSize made_up{1024, 2048, Memory::alignment};
  s->ask_workspace = [&op, s](WorkspaceSize* size) {
    if (size == nullptr) return Status(StatusCode::invalid_argument, "size is NULL");
    set_kept_key(*s, op);
    const Status status = validate(Call(op, s->execution));
    if (status.ok()) *size = made_up;
    return status;
  };
  s->call_run = [&op, s] {
    set_kept_key(*s, op);
    const Status status = validate(Call(op, s->execution));
    return status.ok() ? validate_data(op, s->workspace, made_up) : status;
  };
}

// Forward reads what is kept only beside the sums of a shard, which are set apart.
template <class Op>
Access apart_from_sums(const std::string& field, Access access) {
  return ForwardOp<Op> && field.starts_with("kept") ? Access::write : access;
}

// `device` is cpu or reference, or cuda for the rules alone. `op` must outlive the subject.
template <class Op>
std::unique_ptr<Subject> make_subject(Op& op, DeviceType device) {
  auto s = std::make_unique<Subject>();
  s->kind = kind_of<Op>;
  s->execution.device.type = device;
  if constexpr (LossOp<Op>) s->options = &op.options;
  if constexpr (LinearOp<Op> && GradientOp<Op>) s->accumulate = &op.accumulate_grad_weight;
  if constexpr (ConsumingOp<Op>) s->consume = &op.consume_kept;
  if constexpr (OnlyChoosingOp<Op>) s->only_chosen = &op.only_chosen;
  if constexpr (DivergenceOp<Op>) {
    s->divergence = &op.divergence;
    op.divergence.label_weight = 0.5f;  // so that the target is needed
  }
  if constexpr (CombiningOp<Op>) op.options.vocab_total = Subject::v;
  logitless_op unused{};
  for_each_tensor(op, unused,
                  [&](const char* name, Access access, TensorView& view, const logitless_tensor*) {
                    const std::string field = name;
                    if (CombiningOp<Op> && (field == "rank" || field == "mass_above")) {
                      s->of_whole_rows[field] = &view;
                      return;
                    }
                    if (DivergenceOp<Op> && field == "vocab_weight") return;  // the op has none
                    view = subject_view(name);
                    if (device == DeviceType::cuda) view.device.type = device;
                    s->views[name] = &view;
                    s->access[name] = apart_from_sums<Op>(field, access);
                    const size_t room = field == "kept" ? 64 * 64 * 4 : Memory::room;
                    s->memory[name] = std::make_unique<Memory>(room);
                    view.data = s->memory[name]->data();
                    fill_subject(view, access, static_cast<char*>(view.data));
                  });
  if (s->has("teacher_logits")) std::swap(s->teacher_logits, (*s)["teacher_logits"]);
  s->set_apart(&s->of_sums, {"divergence_sum", "slope_sum", "slope_mean"});
  if (s->has("slope_mean")) {
    s->set_apart(&s->of_sums,
                 {"row_reference", "row_log_sum", "teacher_row_reference", "teacher_row_log_sum"});
  }
  s->set_apart(&s->of_choice, {"ids", "logits_at", "grad_logits_at"});
  s->set_apart(&s->of_lists, {"shard_top_logits", "shard_top_ids", "top_logits", "top_ids"});
  if (s->has("id_offsets")) std::swap(s->id_offsets, (*s)["id_offsets"]);
  if (s->has("anchor")) std::swap(s->anchor, (*s)["anchor"]);
  Subject* raw = s.get();
  s->ask_workspace = [&op, raw](WorkspaceSize* size) {
    set_kept_key(*raw, op);
    return workspace(op, raw->execution, size);
  };
  s->call_run = [&op, raw] {
    set_kept_key(*raw, op);
    return run(op, raw->workspace, raw->execution);
  };
  s->call_plan = [&op, raw] {
    set_kept_key(*raw, op);
    Plan plan;
    const Status status = plan.create(op, raw->execution, raw->workspace.bytes);
    return status.ok() ? plan.run(Addresses(op), raw->workspace, raw->execution.stream) : status;
  };
  if (device == DeviceType::cuda) ask_the_rules_alone(raw, op);
  if (s->ask_workspace(&s->size).ok()) s->give_workspace(s->size.recommended);
  return s;
}

// Calls f(subject) with an unbroken call of this kind of op.
template <class F>
void with_subject(int32_t kind, DeviceType device, F&& f) {
  for_each_op([&](auto op, int32_t of) {
    if (of == kind) f(*make_subject(op, device));
  });
}

// Calls f for each op on the CPU and on the reference.
template <class F>
void for_each_subject(F&& f) {
  for (int32_t kind = LOGITLESS_SOFTMAX; kind < kinds; ++kind) {
    for (DeviceType device : {DeviceType::cpu, DeviceType::reference}) {
      with_subject(kind, device, f);
    }
  }
}

// Calls f as for_each_subject does, and for the rules alone as if they were called on CUDA.
template <class F>
void for_each_judged_subject(F&& f) {
  for_each_subject(f);
  for (int32_t kind = LOGITLESS_SOFTMAX; kind < kinds; ++kind) {
    with_subject(kind, DeviceType::cuda, f);
  }
}

inline std::string describe(const Subject& s) {
  constexpr const char* devices[] = {" on cpu", " by the rules of cuda", " on webgpu",
                                     " on reference"};
  return std::string(name_of_op(s.kind)) + devices[static_cast<int>(s.execution.device.type)];
}

}  // namespace logitless::testing
