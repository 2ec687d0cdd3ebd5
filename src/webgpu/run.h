// SPDX-License-Identifier: Apache-2.0
// One call on a device: every dispatch of an op, in order.
#pragma once

#include "src/webgpu/recorder.h"
#include "src/webgpu/statistics.h"
#include "src/webgpu/workspace.h"

namespace logitless::webgpu {

// Records and submits the call without waiting, with the plan for `budget` bytes.
Status run(const Call& call, uint64_t budget, WorkspaceBuffers* workspace);

// The shaders repeat the flags and structs below; tests/webgpu/shared_names_test.py checks that
// both have the same names, order and types.

// As in common/token.wgsl.
enum Flag : uint32_t {
  kHasVocabWeight = 1,
  kHasTokenWeight = 2,
  kOutsideIsIgnored = 4,
  kIsSoftmax = 8,
  kHasFault = 16,
  kHasTokenGrad = 32,
  kHasState = 64,
  kHasEntropy = 128,
  kHasGradLse = 256,
  kHasGradTarget = 512,
  kHasGradEntropy = 1024,
  kWantsGradient = 2048,
  kHasLoss = 4096,
  kHasExtras = 8192,
  kIsBackward = 16384,
  kHasTeacherSoftcap = 32768,
  kHasTeacherTemperature = 65536,
  kHasGradChosen = 131072
};

// common/chunk.wgsl has the same struct.
struct TokenParams {
  uint32_t tokens = 0, base = 0, stride = 0, wide = 0, ignore_low = 0, ignore_high = 0,
           vocab_total = 0, vocab_start = 0, vocab = 0, flags = 0, nan = 0, fault = 0, sums = 0,
           word = 0, kind = 0, row_words = 0, chosen = 0, id_words = 0;
};

// common/window.wgsl has the same struct.
struct RowParams {
  uint32_t rows = 0, columns = 0, row_stride = 0, base = 0, first_column = 0, slots = 0, flags = 0,
           nan = 0;
  float slope = 1, cap_in = 0, cap_in_low = 0, cap_out = 0, cap_out_low = 0, smoothing = 0,
        smoothing_per_class = 0, z_loss = 0, floor = 0, classes = 0;
  uint32_t weight_base = 0;
  float teacher_slope = 1, teacher_cap_in = 0, teacher_cap_in_low = 0, teacher_cap_out = 0,
        teacher_cap_out_low = 0, beta = 0, rest = 1, label_weight = 0;
  uint32_t zero = 0, chosen = 0, id_words = 0, depth = 0, weight_first = 0, weight_stride = 0;
};

// plain.wgsl has the same struct.
struct PlainParams {
  uint32_t rows = 0, columns = 0, row_stride = 0, base = 0, target_base = 0, target_stride = 0,
           wide = 0, ignore_low = 0, ignore_high = 0, flags = 0, nan = 0;
  float slope = 1, z_loss = 0;
};

// sum.wgsl has the same struct.
struct SumParams {
  uint32_t count = 0, value_base = 0, result_base = 0, kind = 0;
  float number = 0;
  uint32_t empty_is_nan = 0, nan = 0, view = 0, has_grad = 0, grad = 0, loss = 0, row_stride = 0,
           adds = 0;
  int32_t exponent = 0;
};

// common/product.wgsl has the same struct.
struct ProductParams {
  uint32_t rows = 0, columns = 0, depth = 0, a_stride = 0, b_base = 0, b_stride = 0,
           result_base = 0, result_stride = 0, adds = 0, b_rows = 0, slice_depth = 0,
           slice_stride = 0, block_depth = 1u << 30;  // default: the depth is one block
};

// slices.wgsl has the same struct.
struct SliceParams {
  uint32_t row_length = 0, slices = 0, slice_stride = 0, adds = 0;
};

// temperature.wgsl has the same struct.
struct TemperatureParams {
  uint32_t tokens = 0, base = 0, stride = 0, logit_scale = 0, softcap = 0, of_all = 0,
           has_fault = 0, fault = 0, nan = 0;
};

// fold.wgsl has the same struct.
struct FoldParams {
  uint32_t argmax_base = 0, argmax_stride = 0, has_argmax = 0, is_first = 0, nan = 0, zero = 0;
};

// keep.wgsl has the same struct.
struct KeptParams {
  uint32_t tokens = 0, base = 0, engine = 0, columns = 0, consumes = 0, fault = 0, diverges = 0;
};

struct ProductKind {
  bool a_transposed = false, b_transposed = false, has_bias = false;
  uint32_t bounded = 0;
  int64_t slices = 1;
};

inline uint32_t u32(int64_t value) { return static_cast<uint32_t>(value); }
inline uint32_t blocks(int64_t count, int64_t of) { return u32((count + of - 1) / of); }
inline bool capped(const LossOptions& o) { return o.softcap > 0; }

// The factors of the map from raw logits to z, named as in RowParams.
struct MapFactors {
  float slope = 1, cap_in = 0, cap_in_low = 0, cap_out = 0, cap_out_low = 0;
};
MapFactors factors_of(const LossOptions& options);

// The inputs of a head's logits: the op's own, or the teacher's.
struct Head {
  const TensorView &input, &weight, &bias, &logits, &temperature;
  LossOptions options;
  MapFactors factors;
  bool is_head = false;  // else its logits are given
  int64_t hidden = 0;
  bool weight_bound = false, bias_bound = false;
  Role rows, extras, bias_copy, hidden_rows, block;

  bool is_scaled() const { return factors.slope != 1 || temperature; }
};

constexpr uint32_t kNan = 0x7fc00000u;
constexpr uint32_t kGroups = 65535;

// A rectangle of a view, or a range of a vector.
struct Part {
  int64_t first_row = 0, rows = 1, first_column = 0, columns = 1;
};

// Where dense f32 rows are in a buffer; `base` and the strides are in elements.
struct Dense {
  Buffer buffer = 0;
  uint64_t bytes = 0;  // of the whole buffer
  int64_t base = 0, row_stride = 1, column_stride = 1;
};

// The order of a call is in run.cpp; chunks are in chunk.cpp, divergences in divergence.cpp.
class Run {
 public:
  Run(const Call& call, const Problem& problem, const Plan& plan, WorkspaceBuffers* workspace);
  Status all();

 private:
  struct Chunk {
    int64_t first = 0, tokens = 0;
    bool is_first = false;
  };
  struct Window {
    int64_t index = 0, first = 0, columns = 0;
  };

  // copies.cpp
  void gather(const TensorView& source, Part part, const Dense& result, int64_t padded_columns,
              bool counted_rows);
  void gather_vector(const TensorView& source, int64_t first, int64_t count, const Dense& result);
  void scatter(const Dense& values, const TensorView& result, Part part, bool by_token,
               int64_t first_token = 0);
  Binding bound(const TensorView& view, Part part, int64_t* base) const;
  int64_t extent_of(const TensorView& view, Part part) const;
  bool fits(const TensorView& view, Part part) const;

  // kept.cpp
  template <class F>
  int64_t each_slab(const Chunk& chunk, const Window& window, F&& f) const;
  void keep_logits(const Chunk& chunk, const Window& window);
  Window take_logits(const Chunk& chunk, const Window& window);
  void keep_or_check_rows(const Chunk& chunk);

  // chosen.cpp
  void begin_chosen(const Chunk& chunk);
  void make_chosen_logits(const Chunk& chunk, const Window& window, Binding weight,
                          const ProductParams& operands, Binding bias);
  void make_chosen_gradients(const Chunk& chunk, const Window& window);
  void put_chosen_gradients(const Chunk& chunk, const Window& window);
  void emit_chosen(const Chunk& chunk);
  RowParams chosen_params(const Chunk& chunk, const Window& window) const;

  // run.cpp
  void prepare_vocabulary();
  void normalize();
  int64_t tree(int64_t count, int64_t most, Role* in);
  Binding count_tokens(uint32_t* few);
  void run_chunk(const Chunk& chunk);
  void finish_loss();
  void finish_gradients();
  Window window_of(int64_t index) const;
  Chunk chunk_of(int64_t index) const;

  // divergence.cpp
  Head student() const;
  Head teacher() const;
  void run_divergence(const Chunk& chunk);
  void make_states(const Chunk& chunk, const Head& head);
  void sum_slots(const Chunk& chunk, const Window& window);
  void finish_rows(const Chunk& chunk, bool summed);
  void make_difference(const Chunk& chunk, const Window& window);
  Constant divergence_kind() const;
  RowParams pair_params(const Chunk& chunk, const Window& window) const;

  // chunk.cpp
  void begin_chunk(const Chunk& chunk);
  void begin_head(const Chunk& chunk, const Head& head);
  void scale_chunk(const Chunk& chunk, const Head& head);
  void copy_logits(const Chunk& chunk);
  void make_logits(const Chunk& chunk, const Window& window, const Head& head);
  void make_partials(const Chunk& chunk, const Window& window, const Head& head);
  void make_rows(const Chunk& chunk);
  void make_plain(const Chunk& chunk);
  void fold_shards(const Chunk& chunk);
  void combine(const Chunk& chunk, const Head& head);
  void add_ranks(const Chunk& chunk, const Window& window);
  void make_gradients(const Chunk& chunk, const Window& window);
  void emit(const Chunk& chunk, const TensorView& view, Word word, Emit kind, int64_t first);
  void add_products(const Chunk& chunk, const Window& window);
  void add_to_grad_hidden(const ProductParams& params, Binding weight, const Window& window);
  void emit_outputs(const Chunk& chunk);
  void emit_grad_input(const Chunk& chunk);
  void sum_losses(const Chunk& chunk);
  Binding weight_window(const Window& window, const Head& head, uint32_t* base, uint32_t* stride);
  Binding vocab_weight_window(const Window& window, uint32_t* base) const;
  Binding whole_vocab_weight() const;
  Binding targets(const Chunk& chunk, TokenParams* params) const;
  Binding fault_of(TokenParams* params) const;
  Binding block(const Window& window, Role role = Role::block) const;
  // The memory in which the row kernels work: the block, or the caller's matrix.
  Binding block(const Chunk& chunk, const Window& window, RowParams* params) const;
  const TensorView& result() const;  // of an op on given logits
  RowParams row_params(const Chunk& chunk, const Window& window, const Head& head) const;
  RowParams row_params(const Chunk& chunk, const Window& window) const {
    return row_params(chunk, window, student_);
  }
  void product(const ProductParams& params, const ProductKind& kind, Binding a, Binding b,
               Binding result, Binding bias);

  static Constant is_capped(const Head& head) {
    return {"capped", capped(head.options) ? 1.0 : 0.0};
  }
  static Constant is_scaled(const Head& head) { return {"scaled", head.is_scaled() ? 1.0 : 0.0}; }
  static Constant own_temperature(const Head& head) {
    return {"own_temperature", head.temperature ? 1.0 : 0.0};
  }
  Constant is_capped() const { return is_capped(student_); }
  Constant is_scaled() const { return is_scaled(student_); }
  Constant own_temperature() const { return own_temperature(student_); }
  Constant direct() const { return {"direct", problem_.direct ? 1.0 : 0.0}; }
  Constant more_statistics() const {
    return {"more_statistics", problem_.more_statistics ? 1.0 : 0.0};
  }
  Binding role(Role role) const { return {workspace_[role], 0, workspace_.bytes(role)}; }
  Binding zeros() const { return role(Role::zeros); }
  // Without extras another buffer is bound instead, and not accessed.
  Binding extras() const { return problem_.extras() ? role(Role::extras) : zeros(); }
  Binding extras(const Head& head) const {
    return head.rows == Role::rows ? extras() : head.temperature ? role(head.extras) : zeros();
  }
  Binding written_extras() const {
    return role(problem_.extras() ? Role::extras : Role::more_sums);
  }
  // Without chosen columns other buffers are bound instead, and not accessed.
  Binding ids() const { return call_.ids ? role(Role::ids) : zeros(); }
  Binding chosen() const { return role(call_.ids ? Role::chosen : Role::spare); }
  // Whether this is a Backward of a divergence that reads what Forward kept.
  bool reads_kept() const { return problem_.reads_kept && plan_.kept_columns > 0; }
  Dense dense(Role role, int64_t base, int64_t row_stride, int64_t column_stride = 1) const {
    return {workspace_[role], workspace_.bytes(role), base, row_stride, column_stride};
  }
  uint32_t gradient_flags() const;
  TokenParams token_params(const Chunk& chunk) const;
  bool given(std::string_view name) const { return static_cast<bool>(call_[name]); }

  const Call& call_;
  const Problem& problem_;
  const Plan& plan_;
  const LossOptions options_;
  const Head student_, teacher_;  // the teacher only in divergences
  const WorkspaceBuffers& workspace_;
  Device* const device_;
  Recorder recorder_;
  int64_t sums_ = 0;  // the number of sums of losses written so far
};

}  // namespace logitless::webgpu
