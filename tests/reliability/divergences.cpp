// SPDX-License-Identifier: Apache-2.0
// Compares random divergences of two heads with the reference, element by element: every kind and
// dtype, many options, teachers as heads or as logits, infinite and NaN values, workspaces from the
// minimum to the recommended size, with and without kept dz. A seed is one case of one to three
// calls, each with its own plan.
//   --calls 300   how many calls to make, at least
//   --seed 1      seed of the first case
//   --cases 0     how many cases to run, at most; 0: any. `--seed S --cases 1` runs one again
//   --device 0    1: the CUDA device instead of the CPU
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "tests/reliability/report.h"
#include "tests/support/divergences.h"

namespace logitless::reliability {
namespace {

using conformance::Case;
using conformance::Comparison;
using conformance::Data;
using conformance::KeptDivergence;
using conformance::Memory;
using conformance::NormalizerKind;
using conformance::OpKind;
using conformance::Outcome;
using conformance::Placement;
using conformance::Problem;
using conformance::RunPlan;
using conformance::Shape;
using conformance::TestDevice;

constexpr const char* kKindNames[] = {"forward_kl", "reverse_kl", "jsd", "skew_kl", "tv"};
constexpr float kBelowOne = 1 - 0x1p-24f;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kFar = -1e30;
constexpr char kPoisonedFar[] = ", poisoned, some far";

// A number up to `most`; half of them are a multiple of a tile's size or next to one.
int64_t size_of(Random& random, int64_t most) {
  constexpr int64_t edges[] = {1, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 16384};
  const int64_t edge = random.pick(edges) + random.between(-1, 1);
  const int64_t size = random.below(2) == 0 ? edge : random.between(1, most);
  return std::clamp<int64_t>(size, 1, most);
}

// The reference computes a million products in about a millisecond.
Shape shape_of(Random& random) {
  const int64_t products = random.below(16) == 0 ? 16'000'000 : 1'000'000;
  const int64_t vocab = size_of(random, random.below(8) == 0 ? 40'000 : 3'000);
  const int64_t tokens = size_of(random, std::clamp<int64_t>(products / vocab, 1, 400));
  const int64_t hidden = size_of(random, std::clamp<int64_t>(products / vocab / tokens, 1, 300));
  return {tokens, hidden, vocab};
}

void draw_maps(Random& random, Case& c) {
  constexpr float scales[] = {1, 1, 1, 0.5f, -0.7f, 3, 1e-3f};
  constexpr float softcaps[] = {0, 0, 0, 3, 15, 200};
  constexpr float temperatures[] = {1, 1, 1, 0.5f, 1.7f, 20};
  LossOptions& o = c.options;
  o.logit_scale = random.pick(scales), o.softcap = random.pick(softcaps);
  c.temperatures = random.below(4) == 0;
  if (!c.temperatures) o.temperature = random.pick(temperatures);
  DivergenceOptions& d = c.divergence;
  const bool alike = c.near || c.equal;  // then the options of both heads are equal too
  d.teacher_logit_scale = alike ? o.logit_scale : random.pick(scales);
  d.teacher_softcap = alike ? o.softcap : random.pick(softcaps);
  c.teacher_temperatures = !alike && random.below(4) == 0;
  if (!c.teacher_temperatures) {
    d.teacher_temperature = alike ? o.temperature : random.pick(temperatures);
  }
}

void draw_tokens(Random& random, Case& c) {
  constexpr double shares[] = {0, 0, 0.15, 0.5, 1};
  constexpr NormalizerKind normalizers[] = {NormalizerKind::counted, NormalizerKind::f32,
                                            NormalizerKind::i64};
  c.no_target = random.below(3) == 0;
  if (!c.no_target) {
    c.ignored = random.pick(shares);
    if (random.below(4) == 0) c.options.out_of_range = OutOfRange::ignore, c.outside = 0.15;
    c.divergence.label_weight = random.below(3) == 0 ? 0.7f : 0;
    c.logprob = random.below(2) == 0;
    c.target = random.below(2) == 0 ? DType::i32 : DType::i64;
  }
  c.options.reduction = static_cast<Reduction>(random.below(3));
  if (c.options.reduction == Reduction::mean) c.normalizer = random.pick(normalizers);
  c.token_weight = random.below(3) == 0;
  c.inactive = random.below(4) == 0 ? 0.4 : 0;
  c.statistics = random.below(2) == 0;
  c.grad_loss = random.below(2) == 0;
}

Case draw(Random& random, uint64_t seed) {
  constexpr OpKind ops[] = {OpKind::divergence_forward, OpKind::divergence_backward,
                            OpKind::divergence_forward_backward};
  constexpr float betas[] = {0, 0x1p-90f, 1e-20f, 1e-8f, 1e-3f, 0.1f, 0.5f, 0.9f, kBelowOne, 1};
  constexpr Data data[] = {Data::normal, Data::normal, Data::peaked, Data::constant, Data::large};
  constexpr Placement placements[] = {
      Placement::dense,   Placement::dense,      Placement::padded,   Placement::unaligned,
      Placement::strided, Placement::transposed, Placement::broadcast};
  Case c{.op = random.pick(ops), .shape = shape_of(random), .dtype = random.pick(kDtypes)};
  c.seed = seed;
  c.divergence.kind = static_cast<DivergenceKind>(random.below(5));
  c.divergence.beta = random.pick(betas);
  c.data = random.pick(data), c.placement = random.pick(placements);
  c.grad_input = random.pick(kDtypes), c.grad_weight = random.pick(kDtypes);
  c.bias = random.below(2) == 0, c.bias_dtype = random.below(2) == 0 ? c.dtype : DType::f32;
  c.teacher_logits = random.below(4) == 0;
  if (!c.teacher_logits) {
    c.near = random.below(4) == 0, c.equal = !c.near && random.below(8) == 0;
    c.teacher_bias = random.below(2) == 0;
    c.teacher_hidden = random.below(2) == 0 ? size_of(random, c.shape.hidden + 70) : 0;
  }
  draw_maps(random, c);
  draw_tokens(random, c);
  c.wants_grad_input = random.below(4) != 0;
  c.wants_grad_weight = !c.wants_grad_input || random.below(4) != 0;
  c.accumulate = c.wants_grad_weight && random.below(4) == 0;
  if (c.accumulate) c.grad_weight = DType::f32;
  c.fault = random.below(2) == 0;
  return c;
}

void put(const TensorView& view, int64_t at, double value) {
  std::vector<double> all = conformance::read(view);
  all[static_cast<size_t>(at)] = value;
  conformance::write(view, all);
}

// Makes some values infinite, NaN or extreme: in columns of one or both biases, in given logits and
// in hidden states. Returns what it changed.
template <class Op>
std::string poison(Random& random, const Case& c, const Problem<Op>& p) {
  if (c.placement == Placement::broadcast || random.below(3) != 0) return "";
  constexpr double values[] = {-kInf, -kInf, kFar, 60, 0x1p-140, 0, kInf, NAN};
  bool far = false;
  const auto value = [&] {
    const double picked = random.pick(values);
    far |= picked == kFar;
    return picked;
  };
  const auto [tokens, hidden, vocab] = c.shape;
  const int64_t column = random.below(vocab);
  const auto& [student, teacher] = std::tie(p.op.bias, p.op.teacher.bias);
  for (const int64_t at : {column, random.below(vocab)}) {
    if (student && random.below(2) == 0) put(student, at, value());
    if (teacher && random.below(2) == 0) put(teacher, at, value());
  }
  const TensorView& logits = p.op.teacher.logits;
  for (int i = 0; logits && i < 3; ++i) {
    const int64_t at = i == 0 ? column : random.below(vocab);
    put(logits, random.below(tokens) * vocab + at, value());
  }
  if (random.below(4) == 0) {
    // With a softcap an infinite state could give finite logits, but the gradient multiplies it.
    const double state = c.options.softcap == 0 && random.below(2) == 0 ? kInf : NAN;
    put(p.op.input, random.below(tokens * hidden), state);
  }
  return far ? kPoisonedFar : ", poisoned";
}

// Picks a workspace of any size and a way to run; sizes are queried without addresses.
template <class Op>
RunPlan memory_of(Random& random, const TestDevice& device, Op op) {
  RunPlan plan{.fill = random.below(2) == 0 ? std::byte{0xFF} : std::byte{0x5A}};
  plan.by = static_cast<conformance::By>(random.below(8) < 6 ? 0 : random.between(1, 2));
  const int64_t how = random.below(4);
  plan.memory = how == 0 ? Memory::minimum : how == 1 ? Memory::recommended : Memory::exact;
  if (plan.memory != Memory::exact) return plan;
  const logitless_op unused{};
  for_each_tensor(op, unused,
                  [](const char*, Access, TensorView& view, auto&&) { view.data = nullptr; });
  conformance::place(op, device.tensors());
  WorkspaceSize size;
  const Status status = workspace(op, device.execution(), &size);
  if (!status.ok()) broken("a random call: %s", status.message());
  const auto more = static_cast<int64_t>(size.recommended - size.minimum);
  plan.bytes = size.minimum + static_cast<uint64_t>(random.below(more + 1));
  return plan;
}

// Counts calls, and the largest errors relative to their bounds.
struct Tally {
  int64_t calls = 0, cases = 0, undecided = 0;  // undecided: the contract allows both answers
  std::map<std::string, std::pair<double, uint64_t>> worst;  // the largest share, and its seed
  std::vector<uint64_t> failing;

  void add(const Case& c, const std::string& what, const reference::Result& want,
           const Outcome& got) {
    ++calls;
    if (want.undecided) ++undecided;
    if (want.undecided) return;
    const Comparison result = conformance::compare(want, got);
    auto& [share, seed] = worst[kKindNames[static_cast<int>(c.divergence.kind)]];
    if (result.worst_ratio >= share) share = result.worst_ratio, seed = c.seed;
    if (result.ok()) return;
    if (failing.empty() || failing.back() != c.seed) failing.push_back(c.seed);
    std::fprintf(stderr, "seed %" PRIu64 ": %s beta %g%s\n%s\n", c.seed, describe(c).c_str(),
                 static_cast<double>(c.divergence.beta), what.c_str(), result.report.c_str());
  }
};

template <class Op>
void run_one(Random& random, const TestDevice& device, const Case& c, Tally* tally) {
  const Problem<Op> p = conformance::build<Op>(c);
  const std::string poisoned = poison(random, c, p);
  const RunPlan plan = memory_of(random, device, p.op);
  const Outcome got = conformance::execute(device, p.op, p.pool, plan);
  reference::Result want = conformance::expected(device, p.op, p.model);
  // What semantics.md says of reverse_kl in f16 beyond 1,023 nats, where no dz is kept.
  want.undecided |= std::string(device.name()) == "cuda" && c.dtype == DType::f16 &&
                    c.op != OpKind::divergence_forward &&
                    c.divergence.kind == DivergenceKind::reverse_kl && poisoned == kPoisonedFar;
  tally->add(c, poisoned + ", " + std::to_string(got.given) + " bytes", want, got);
}

// A Forward that keeps dz, and two Backwards from it.
void run_kept(Random& random, const TestDevice& device, const Case& c, Tally* tally) {
  KeptDivergence k(device, c);
  const std::string poisoned = poison(random, c, k.p);
  const Outcome kept =
      conformance::execute(device, k.forward, k.p.pool, memory_of(random, device, k.forward));
  const auto forward = conformance::expected(device, k.forward, k.p.model);
  tally->add(c, poisoned + ", keeping", forward, kept);
  k.take(kept);
  const auto want = conformance::expected(device, k.p.op, k.p.model);
  for (const char* what : {", kept", ", kept, again"}) {
    const LinearDivergenceBackward op = k.without_teacher();
    const Outcome got = conformance::execute(device, op, k.p.pool, memory_of(random, device, op));
    tally->add(c, poisoned + what + ", " + std::to_string(got.given) + " bytes", want, got);
  }
}

void run_case(uint64_t seed, const TestDevice& device, Tally* tally) {
  Random random(seed);
  const Case c = draw(random, seed);
  logitless_set_num_threads(static_cast<int32_t>(random.between(1, 4)));
  ++tally->cases;
  if (c.op == OpKind::divergence_backward && random.below(2) == 0) {
    run_kept(random, device, c, tally);
  } else if (c.op == OpKind::divergence_backward) {
    run_one<LinearDivergenceBackward>(random, device, c, tally);
  } else if (c.op == OpKind::divergence_forward) {
    run_one<LinearDivergenceForward>(random, device, c, tally);
  } else {
    run_one<LinearDivergenceForwardBackward>(random, device, c, tally);
  }
}

int run(uint64_t first, int64_t calls, int64_t cases, const TestDevice& device) {
  Tally tally;
  while (cases != 0 ? tally.cases < cases : tally.calls < calls) {
    run_case(first + static_cast<uint64_t>(tally.cases), device, &tally);
  }
  figure("calls", tally.calls);
  figure("cases", tally.cases);
  figure("undecided", tally.undecided);
  for (const auto& [kind, worst] : tally.worst) {
    std::printf("worst %s: %.4f of seed %" PRIu64 "\n", kind.c_str(), worst.first, worst.second);
  }
  std::string failing;
  for (const uint64_t seed : tally.failing) failing += " " + std::to_string(seed);
  std::printf("failing seeds:%s\n", failing.empty() ? " none" : failing.c_str());
  return tally.failing.empty() ? 0 : 1;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  using namespace logitless;
  using reliability::option;
  const bool cuda = option(argc, argv, "--device", 0) == 1;
  for (const conformance::Found& found : conformance::all_devices()) {
    if (found.name != (cuda ? "cuda" : "cpu")) continue;
    if (found.device == nullptr) reliability::broken("%s", found.reason.c_str());
    return reliability::run(static_cast<uint64_t>(option(argc, argv, "--seed", 1)),
                            option(argc, argv, "--calls", 300), option(argc, argv, "--cases", 0),
                            *found.device);
  }
  reliability::broken("this build has no CUDA backend");
}
