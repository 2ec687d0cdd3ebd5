// SPDX-License-Identifier: Apache-2.0
// This is a framework's cross-entropy module on Logitless. dev_AI_framework
// (https://teach-meaning.tistory.com) describes a loss by CrossEntropyAttrs and runs it through two
// launchers and two kernel wrappers; here each of the four is a few lines that fill an op. Nothing
// is copied to the host: the valid rows (its Meff) are counted on the device. Its list of tests
// follows, with plain loops in double as the reference.
//   cross_entropy_attrs [--device cpu|cuda]
// Exit code 1 says that a result differs, 77 that there is no such device.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "logitless/logitless.h"
#include "memory.h"

namespace dev_ai {

using logitless::Status;
using logitless::StatusCode;
using Tensor = logitless::TensorView;

enum class Reduction : int { None = 0, Mean = 1, Sum = 2 };

struct CrossEntropyAttrs {
  bool from_logits{true};
  Reduction reduction{Reduction::Mean};
  int ignore_index{-1};
  float eps{1e-9f};  // from_logits = false takes log(p + eps)
  float ls_eps{0.f};
};

// The enums have different values, so each is mapped by name.
logitless::Reduction to_logitless(Reduction r) {
  switch (r) {
    case Reduction::None:
      return logitless::Reduction::none;
    case Reduction::Mean:
      return logitless::Reduction::mean;
    case Reduction::Sum:
      return logitless::Reduction::sum;
  }
  return static_cast<logitless::Reduction>(-1);  // run() returns unknown_enum for it
}

logitless::LossOptions to_logitless(const CrossEntropyAttrs& attrs) {
  logitless::LossOptions options;
  options.reduction = to_logitless(attrs.reduction);
  options.ignore_index = attrs.ignore_index;
  options.label_smoothing = attrs.ls_eps;
  if (!attrs.from_logits) {
    options.input_kind = logitless::InputKind::probabilities;
    options.probability_floor = attrs.eps;
  }
  return options;
}

template <class Op>
Status run_in_scratch(const Op& op, const Tensor& X, void* stream) {
  const logitless::Execution execution{.device = X.device, .stream = stream};
  logitless::WorkspaceSize size;
  const Status status = workspace(op, execution, &size);
  if (!status.ok()) return status;
  Scratch scratch(X.device, size.recommended, stream);
  if (size.recommended > 0 && scratch.data() == nullptr) {
    return {StatusCode::device_error, "no memory for the workspace"};
  }
  return run(op, {scratch.data(), size.recommended}, execution);
}

Status CrossEntropyLaunch(const Tensor& X, const Tensor& target, Tensor& loss,
                          const CrossEntropyAttrs& attrs, void* stream) {
  const logitless::CrossEntropyForward op{
      .logits = X, .target = target, .loss = loss, .options = to_logitless(attrs)};
  return run_in_scratch(op, X, stream);
}

Status CrossEntropyBackwardLaunch(const Tensor& X, const Tensor& target, Tensor& dX,
                                  const CrossEntropyAttrs& attrs, void* stream) {
  const logitless::CrossEntropyBackward op{
      .logits = X, .target = target, .grad_logits = dX, .options = to_logitless(attrs)};
  return run_in_scratch(op, X, stream);
}

Tensor on(logitless::Device device, Tensor view) {
  view.device = device;
  return view;
}

Status ce_forward_logits_kernel_launcher(const float* X, const int32_t* T, float* loss_vec, int M,
                                         int N, int ignore_index, float ls_eps,
                                         logitless::Device device, void* stream) {
  using logitless::DType;
  Tensor loss = on(device, logitless::vector_view(loss_vec, DType::f32, M));
  return CrossEntropyLaunch(
      on(device, logitless::matrix_view(X, DType::f32, M, N)),
      on(device, logitless::vector_view(T, DType::i32, M)), loss,
      {.reduction = Reduction::None, .ignore_index = ignore_index, .ls_eps = ls_eps}, stream);
}

// dX is (p - q) inv_scale, of a mean over 1 / inv_scale tokens. An inv_scale of 0 (no valid row)
// becomes a normalizer so large that every gradient is 0; for a negative one the library returns
// invalid_argument.
Status ce_backward_logits_kernel_launcher(const float* X, const int32_t* T, float* dX, int M, int N,
                                          float inv_scale, int ignore_index, float ls_eps,
                                          logitless::Device device, void* stream) {
  using logitless::DType;
  const Tensor logits = on(device, logitless::matrix_view(X, DType::f32, M, N));
  logitless::CrossEntropyBackward op{
      .logits = logits,
      .target = on(device, logitless::vector_view(T, DType::i32, M)),
      .grad_logits = on(device, logitless::matrix_view(dX, DType::f32, M, N)),
      .options = to_logitless(CrossEntropyAttrs{.ignore_index = ignore_index, .ls_eps = ls_eps})};
  op.options.normalizer =
      inv_scale == 0 ? std::numeric_limits<double>::max() : 1 / static_cast<double>(inv_scale);
  return run_in_scratch(op, logits, stream);
}

}  // namespace dev_ai

namespace {

using dev_ai::CrossEntropyAttrs;
using dev_ai::Reduction;
using dev_ai::Tensor;
using logitless::DType;

constexpr int M = 37, N = 1003;

// A case goes through the attribute launchers, or directly through the kernel wrappers.
enum class Through { launcher, kernel };

struct Case {
  const char* name;
  CrossEntropyAttrs attrs{};
  int ignored = 0;  // of the M rows
  float offset = 0;
  Through through = Through::launcher;
};

constexpr CrossEntropyAttrs kNone{.reduction = Reduction::None};
constexpr CrossEntropyAttrs kSum{.reduction = Reduction::Sum};
constexpr CrossEntropyAttrs kSmooth{.ls_eps = 0.1f};
constexpr CrossEntropyAttrs kNoneSmooth{.reduction = Reduction::None, .ls_eps = 0.1f};
constexpr CrossEntropyAttrs kAll{.reduction = Reduction::Sum, .ignore_index = 5, .ls_eps = 0.2f};
constexpr CrossEntropyAttrs kProbabilities{.from_logits = false, .eps = 1e-6f, .ls_eps = 0.1f};

// The inputs of a case, and in double the results that the module's page defines.
struct Problem {
  std::vector<float> x;         // [M, N]
  std::vector<int32_t> target;  // [M]
  std::vector<double> loss;     // [M] or [1]
  std::vector<double> dx;       // [M, N]
  std::vector<double> weight;   // [M, N]  dx's error is relative to it: scale (p + q)
  double scale = 1;

  explicit Problem(const Case& c);
  double row(const CrossEntropyAttrs& attrs, int i);
};

Problem::Problem(const Case& c)
    : x(size_t{M} * N), target(M), dx(size_t{M} * N), weight(size_t{M} * N) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  for (float& v : x) v = c.offset + normal(random);
  if (!c.attrs.from_logits) {
    for (float& v : x) v = std::exp(v - 3) / N;
  }
  for (int i = 0; i < M; ++i) target[i] = static_cast<int32_t>(random() % N);
  for (int i = 0; i < M; ++i) {
    if (target[i] == c.attrs.ignore_index) target[i] = (target[i] + 1) % N;
    if (i * 7 % M < c.ignored) target[i] = c.attrs.ignore_index;
  }
  const int valid = M - c.ignored;
  if (c.attrs.reduction == Reduction::Mean || c.through == Through::kernel) {
    scale = valid > 0 ? 1.0 / valid : 0;
  }
  loss.assign(c.attrs.reduction == Reduction::None ? M : 1, 0);
  for (int i = 0; i < M; ++i) {
    if (target[i] == c.attrs.ignore_index) continue;
    const double value = row(c.attrs, i);
    if (loss.size() > 1) {
      loss[i] = value;
    } else {
      loss[0] += value * scale;
    }
  }
}

// Returns the loss of one row, -sum q log p, and fills its row of dx = (p - q) scale.
double Problem::row(const CrossEntropyAttrs& attrs, int i) {
  const float* z = &x[size_t(i) * N];  // [N]
  double top = z[0], sum = 0, value = 0;
  for (int j = 0; j < N; ++j) top = std::max(top, double(z[j]));
  for (int j = 0; j < N; ++j) sum += std::exp(z[j] - top);
  for (int j = 0; j < N; ++j) {
    const double e = attrs.ls_eps, q = (1 - e) * (target[i] == j) + e / N;
    const size_t at = size_t(i) * N + j;
    if (attrs.from_logits) {
      const double log_p = z[j] - top - std::log(sum), p = std::exp(log_p);
      value -= q * log_p;
      dx[at] = (p - q) * scale;
      weight[at] = (p + q) * scale;
    } else {
      const double p = double(z[j]) + attrs.eps;
      value -= q * std::log(p);
      dx[at] = -q / p * scale;
      weight[at] = q / p * scale;
    }
  }
  return value;
}

// Prints the verdict, and returns true if every element was written and is within its bound.
bool judge(const char* what, const char* name, const std::vector<float>& got,
           const std::vector<double>& want, const std::vector<double>* weight) {
  double worst = 0;
  bool good = true;
  for (size_t k = 0; k < want.size(); ++k) {
    // This example's own limits, relative to p + q and to the loss. Those of docs/semantics.md,
    // "Accuracy", depend on the logits.
    const double bound =
        weight ? 2e-5 * (*weight)[k] + 1e-37 : 1e-6 * std::max(1.0, std::abs(want[k]));
    const double ratio = std::abs(got[k] - want[k]) / bound;
    good = good && ratio <= 1;  // false for a NaN
    worst = std::max(worst, ratio);
  }
  std::printf("%-8s %-34s %s  error / bound %.3f\n", what, name, good ? "True " : "FALSE", worst);
  return good;
}

logitless::Status forward(const Case& c, const Tensor& x, const Tensor& target, Tensor& loss,
                          void* stream) {
  if (c.through == Through::launcher) {
    return dev_ai::CrossEntropyLaunch(x, target, loss, c.attrs, stream);
  }
  return dev_ai::ce_forward_logits_kernel_launcher(x.as<float>(), target.as<int32_t>(),
                                                   loss.as<float>(), M, N, c.attrs.ignore_index,
                                                   c.attrs.ls_eps, x.device, stream);
}

logitless::Status backward(const Case& c, const Tensor& x, const Tensor& target, Tensor& dx,
                           double scale, void* stream) {
  if (c.through == Through::launcher) {
    return dev_ai::CrossEntropyBackwardLaunch(x, target, dx, c.attrs, stream);
  }
  return dev_ai::ce_backward_logits_kernel_launcher(
      x.as<float>(), target.as<int32_t>(), dx.as<float>(), M, N, static_cast<float>(scale),
      c.attrs.ignore_index, c.attrs.ls_eps, x.device, stream);
}

bool check(const Case& c, const Place& place) {
  const Problem p(c);
  // an element that is not written stays NaN
  std::vector<float> loss(p.loss.size(), NAN), dx(p.dx.size(), NAN);
  const Memory x_memory(place, p.x), target_memory(place, p.target);
  Memory loss_memory(place, loss), dx_memory(place, dx);
  const Tensor x = dev_ai::on(place.device, matrix_view(x_memory.data(), DType::f32, M, N));
  const Tensor target = dev_ai::on(place.device, vector_view(target_memory.data(), DType::i32, M));
  Tensor loss_view = dev_ai::on(
      place.device, vector_view(loss_memory.data(), DType::f32, static_cast<int64_t>(loss.size())));
  Tensor dx_view = dev_ai::on(place.device, matrix_view(dx_memory.data(), DType::f32, M, N));
  for (const auto& status : {forward(c, x, target, loss_view, place.stream),
                             backward(c, x, target, dx_view, p.scale, place.stream)}) {
    if (!status.ok()) {
      std::printf("%s: %s\n", c.name, status.message());
      return false;
    }
  }
  loss_memory.read(place, &loss);
  dx_memory.read(place, &dx);
  const bool forward_good = judge("forward", c.name, loss, p.loss, nullptr);
  return judge("backward", c.name, dx, p.dx, &p.weight) && forward_good;
}

// Wrong arguments come back as a status and write nothing.
bool check_rejects(const Place& place) {
  const std::vector<float> zeros(size_t{M} * N);
  const Memory memory(place, zeros), target_memory(place, std::vector<int32_t>(M));
  Memory loss_memory(place, std::vector<float>(M, -5));
  const Tensor x = dev_ai::on(place.device, matrix_view(memory.data(), DType::f32, M, N));
  const Tensor target = dev_ai::on(place.device, vector_view(target_memory.data(), DType::i32, M));
  Tensor loss = dev_ai::on(place.device, vector_view(loss_memory.data(), DType::f32, M));
  const auto launch = [&](const Tensor& t, CrossEntropyAttrs attrs) {
    return dev_ai::CrossEntropyLaunch(x, t, loss, attrs, place.stream).code();
  };
  Tensor shorter = target, floats = target;
  shorter.shape[0] = M - 1;
  floats.dtype = DType::f32;
  using logitless::StatusCode;
  bool good = launch(shorter, kNone) == StatusCode::wrong_shape;
  good = good && launch(floats, kNone) == StatusCode::wrong_dtype;
  good = good && launch(target, {}) == StatusCode::wrong_shape;  // a mean is [] or [1]
  good =
      good && launch(target, {.reduction = static_cast<Reduction>(9)}) == StatusCode::unknown_enum;
  good = good && launch(target, {.reduction = Reduction::None, .ls_eps = 2}) ==
                     StatusCode::invalid_argument;
  std::vector<float> after(M);
  loss_memory.read(place, &after);
  for (const float v : after) good = good && v == -5;
  std::printf("%-8s %-34s %s\n", "rejects", "shape, dtype, enum, ls_eps", good ? "True" : "FALSE");
  return good;
}

constexpr Case kCases[] = {
    // The page's list of cases, each forward and backward.
    {"mean"},
    {"none", kNone},
    {"sum", kSum},
    {"mean, ignore_index", {}, 12},
    {"mean, label_smoothing", kSmooth},
    // Other properties that the page promises.
    {"mean, ignore_index = 5", {.ignore_index = 5}, 12},
    {"mean, every row ignored", {}, M},
    {"sum, all of them", kAll, 12},
    {"mean, logits near 1e4", {}, 0, 1e4f},
    // The page mentions from_logits = false as future work.
    {"mean, probabilities", kProbabilities, 12},
    // The wrappers return losses of the rows, and gradients by an inv_scale of 1 / valid rows.
    {"wrappers", kNone, 12, 0, Through::kernel},
    {"wrappers, label_smoothing", kNoneSmooth, 0, 0, Through::kernel},
    {"wrappers, every row ignored", kNoneSmooth, M, 0, Through::kernel},
};

}  // namespace

int main(int argc, char** argv) {
  const bool cuda =
      argc == 3 && std::strcmp(argv[1], "--device") == 0 && std::strcmp(argv[2], "cuda") == 0;
  const bool cpu = argc == 1 || (argc == 3 && std::strcmp(argv[1], "--device") == 0 &&
                                 std::strcmp(argv[2], "cpu") == 0);
  if (!cpu && !cuda) {
    std::fprintf(stderr, "usage: %s [--device cpu|cuda]\n", argv[0]);
    return 2;
  }
  Place place;
  if (cuda && !open_cuda(&place)) return 77;
  int wrong = !check_rejects(place);
  for (const Case& c : kCases) wrong += !check(c, place);
  std::printf(wrong == 0 ? "all True\n" : "%d of the cases differ\n", wrong);
  return wrong == 0 ? 0 : 1;
}
