// SPDX-License-Identifier: Apache-2.0
// Runs cases of the table and compares them with the reference.
#include "judge.h"

namespace logitless::conformance {
namespace {

constexpr Memory kMemories[] = {Memory::minimum, Memory::recommended};

Comparison judge_rows(const TestDevice& device, const std::vector<Row>& rows) {
  Comparison all;
  for (const Row& row : rows) all.merge(judge(device, row.c, {.memory = row.memory}), row.name);
  return all;
}

}  // namespace

Outcome run_case(const TestDevice& device, const Case& c, const RunPlan& plan) {
  return with_any_op(c.op, [&](auto op) {
    const auto problem = build<decltype(op)>(c);
    return execute(device, problem.op, problem.pool, plan);
  });
}

WorkspaceSize workspace_of(const TestDevice& device, const Case& c, const Executor* executor) {
  return with_any_op(c.op, [&](auto op) {
    auto problem = build<decltype(op)>(c);
    place(problem.op, device.tensors());
    Execution execution = device.execution();
    execution.executor = executor;
    WorkspaceSize size;
    const Status status = workspace(problem.op, execution, &size);
    if (!status.ok()) throw std::logic_error(status.message());
    return size;
  });
}

Comparison judge_sizes(const TestDevice& device, const Case& c,
                       const std::vector<uint64_t>& sizes) {
  return with_any_op(c.op, [&](auto op) {
    using Op = decltype(op);
    const Problem<Op> problem = build<Op>(c);
    const reference::Result want = expected(device, problem.op, problem.model);
    Comparison all;
    for (const uint64_t bytes : sizes) {
      const Outcome got =
          execute(device, problem.op, problem.pool, {.memory = Memory::exact, .bytes = bytes});
      all.merge(compare(want, got), describe(c) + ", workspace " + std::to_string(bytes));
    }
    return all;
  });
}

namespace {

// A field of the case that the device lacks, or null.
const char* refused_field(const TestDevice& device, const Case& c) {
  if (c.chosen > 0 && c.lists && !device.has_id_lists()) return "id_offsets";
  if (c.only_chosen && !device.has_id_lists()) return "only_chosen";
  if (c.chosen > device.most_chosen()) return "ids";
  return c.listed > 0 && !device.has_top() ? "top_logits" : nullptr;
}

}  // namespace

bool is_refused(const TestDevice& device, const Case& c) {
  return refused_field(device, c) != nullptr;
}

// A refused call must write nothing, and its message must name the field.
Comparison judge_refusal(const TestDevice& device, const Case& c) {
  const Outcome outcome = run_case(device, c);
  Comparison judged;
  const char* field = refused_field(device, c);
  if (outcome.status.code() != StatusCode::not_supported ||
      std::string(outcome.status.message()).find(field) == std::string::npos) {
    judged.fail(std::string(field) + " is not refused: " + outcome.status.message());
  }
  for (const std::string& violation : outcome.violations) judged.fail(violation);
  return judged;
}

Comparison judge(const TestDevice& device, const Case& c, const RunPlan& plan) {
  if (is_refused(device, c)) return judge_refusal(device, c);
  return with_any_op(c.op, [&](auto op) {
    using Op = decltype(op);
    const Problem<Op> problem = build<Op>(c);
    return compare(expected(device, problem.op, problem.model),
                   execute(device, problem.op, problem.pool, plan));
  });
}

std::vector<Row> pair_rows(OpKind op, DType dtype, Part part) {
  std::vector<Row> rows;
  const std::vector<Pair> pairs = feature_pairs(op, dtype);
  for (size_t i = part.offset; i < pairs.size(); i += part.step) {
    const Case c = case_of(op, dtype, pairs[i]);
    const std::string name = std::string(features()[pairs[i].first].name) + " + " +
                             features()[pairs[i].second].name + ", " + describe(c);
    rows.push_back({name, c, kMemories[i % 2]});
  }
  return rows;
}

Comparison judge_pairs(const TestDevice& device, OpKind op, DType dtype, Part part) {
  return judge_rows(device, pair_rows(op, dtype, part));
}

void apply_everything(Case& c) {
  if (diverges(c.op)) {
    c.divergence = {.kind = static_cast<DivergenceKind>((c.seed + c.shape.vocab) % 5),
                    .beta = 0.4f,
                    .label_weight = 0.6f,
                    .teacher_logit_scale = 0.9f,
                    .teacher_softcap = 15,
                    .teacher_temperature = 1.2f};
    c.teacher_bias = true;
    c.teacher_hidden = c.shape.hidden + 3;
  } else {
    c.options.label_smoothing = 0.1f;
    c.options.z_loss = 1e-3f;
    c.vocab_weight = true;
  }
  c.options.logit_scale = 0.8f;
  c.options.softcap = 20;
  c.options.temperature = 1.3f;
  c.options.out_of_range = OutOfRange::ignore;
  c.ignored = c.outside = 0.15;
  c.token_weight = c.statistics = c.grad_loss = true;
  c.bias = true;
  c.bias_dtype = c.dtype;
  c.grad_lse = c.grad_target_logit = c.grad_entropy = c.saved_state = true;
}

std::vector<Row> shape_rows(OpKind op, DType dtype, Part part) {
  static constexpr Data kData[] = {Data::normal, Data::peaked, Data::constant, Data::large};
  static constexpr Placement kPlacements[] = {
      Placement::dense,     Placement::padded, Placement::dense,      Placement::strided,
      Placement::unaligned, Placement::dense,  Placement::transposed, Placement::broadcast};
  static constexpr DType kGradients[] = {DType::f32, DType::bf16, DType::f32, DType::f16,
                                         DType::f32};
  static constexpr Reduction kReductions[] = {Reduction::mean, Reduction::none, Reduction::sum};
  std::vector<Row> rows;
  uint64_t seed = 0;
  for (const Shape& shape : shapes(op)) {
    for (const bool everything : {false, true}) {
      if (++seed % part.step != part.offset) continue;
      Case c{.op = op, .shape = shape, .dtype = dtype, .seed = seed};
      c.data = kData[seed / 3 % 4];
      c.placement = kPlacements[seed / 2 % 8];
      c.grad_input = kGradients[seed % 5];
      c.grad_weight = kGradients[seed / 5 % 5];
      c.options.reduction = kReductions[seed / 7 % 3];
      c.statistics = seed % 3 == 0;
      c.divergence.kind = static_cast<DivergenceKind>(seed / 2 % 5);
      c.near = seed % 4 == 0;
      c.no_target = !everything && seed % 5 == 0;
      if (everything) {
        apply_everything(c);
        c.logprob = c.rank = c.sum_p_squared = c.mean_logit = true;
        c.max_logprob = c.mass_above = true;
        c.temperatures = seed % 4 == 0;
        if (c.temperatures) c.options.temperature = 1;
        c.inactive = seed % 3 == 0 ? 0.4 : 0;
      }
      rows.push_back({describe(c) + (everything ? " everything" : ""), c, kMemories[seed / 4 % 2]});
    }
  }
  return rows;
}

Comparison judge_shapes(const TestDevice& device, OpKind op, DType dtype, Part part) {
  return judge_rows(device, shape_rows(op, dtype, part));
}

}  // namespace logitless::conformance
