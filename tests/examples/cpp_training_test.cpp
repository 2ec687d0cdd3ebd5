// SPDX-License-Identifier: Apache-2.0
// cpp_training_test FILE: runs examples/cpp_training.cpp on a file once for each call that it makes
// of a plan, with that call failing: it must print the error and end with 2. Without a failure it
// must end with 1 if the loss is not below a bound, and otherwise with 0. Its gradients must be the
// slopes of its loss.
#include <logitless/c.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>

static int failing_call = 0, calls = 0;

static bool fails(logitless_status* status) {
  if (++calls != failing_call) return false;
  status->code = LOGITLESS_INTERNAL;
  std::snprintf(status->message, sizeof(status->message), "call %d fails", calls);
  return true;
}

// The C++ interface is inline, so that these macros reach its calls.
#define logitless_plan_create(a, b, c, d, status) \
  (fails(status) ? 0 : (logitless_plan_create)(a, b, c, d, status))
#define logitless_plan_size(a, b, status) (fails(status) ? 0 : (logitless_plan_size)(a, b, status))
#define logitless_plan_run(a, b, c, status) \
  (fails(status) ? 0 : (logitless_plan_run)(a, b, c, status))
#define main train_example
#include "examples/cpp_training.cpp"
#undef main

// Runs two steps in a process of its own; returns its exit code, and what it wrote to stderr.
static int exit_code(char* file, const char* below, std::string* errors) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    std::string words[] = {"example", "2", below};
    char* arguments[] = {words[0].data(), file, words[1].data(), words[2].data()};
    std::exit(train_example(4, arguments));
  }
  close(ends[1]);
  errors->clear();
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) errors->append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static bool ends_as_it_must(char* file) {
  const auto size = static_cast<int64_t>(std::filesystem::file_size(file));
  const int64_t held_out = size - size * 9 / 10;
  const int64_t made = 4 + 2 + (held_out + N - 1) / N;  // create and size, two steps, evaluations
  std::string errors;
  for (failing_call = 1; failing_call <= made; ++failing_call) {
    const int code = exit_code(file, "100", &errors);
    if (code == 2 && errors == "call " + std::to_string(failing_call) + " fails\n") continue;
    std::fprintf(stderr, "call %d of %d: exit code %d, \"%s\"\n", failing_call,
                 static_cast<int>(made), code, errors.c_str());
    return false;
  }
  const int below = exit_code(file, "100", &errors), above = exit_code(file, "1", &errors);
  std::printf("without a failure: exit codes %d and %d\n", below, above);
  return below == 0 && above == 1;
}

// Returns the mean loss of the batch, without the library.
static double plain_loss() {
  forward();
  double sum = 0;
  for (int64_t n = 0; n < N; ++n) {
    double exponentials = 0, chosen = 0;
    for (int64_t v = 0; v < V; ++v) {
      double logit = 0;
      for (int64_t d = 0; d < D; ++d) logit += double(h[n * D + d]) * embedding.value[v * D + d];
      exponentials += std::exp(logit);
      if (v == target[n]) chosen = logit;
    }
    sum += std::log(exponentials) - chosen;
  }
  return sum / N;
}

// Adds `times` the gradient to a parameter and returns the gradient's square.
template <int64_t size>
static double move(double times, Parameter<size>* parameter) {
  double square = 0;
  for (int64_t i = 0; i < size; ++i) {
    square += double(parameter->grad[i]) * parameter->grad[i];
    parameter->value[i] += static_cast<float>(times * parameter->grad[i]);
  }
  return square;
}

template <int64_t size>
static bool has_slope(const char* name, Parameter<size>* parameter) {
  const double square = move(0, parameter), step = 0.002 / square;
  move(step, parameter);
  const double above = plain_loss();
  move(-2 * step, parameter);
  const double below = plain_loss();
  move(step, parameter);
  const double slope = (above - below) / (2 * step);
  std::printf("%s: the gradient's square is %.6f, the slope along it %.6f\n", name, square, slope);
  return square > 1e-4 && std::abs(slope / square - 1) < 1e-3;
}

static bool has_the_slopes_of_its_loss(const char* file) {
  std::ifstream stream(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  const std::vector<uint8_t> text(bytes.begin(), bytes.end());
  train(text, 5);
  for (int64_t n = 0; n < N; ++n) place(text, K + n, n);
  forward();
  const LinearCrossEntropyForwardBackward op{
      .input = matrix_view(h, DType::f32, N, D),
      .weight = matrix_view(embedding.value, DType::f32, V, D),
      .target = vector_view(target, DType::i32, N),
      .grad_input = matrix_view(grad_h, DType::f32, N, D),
      .grad_weight = matrix_view(embedding.grad, DType::f32, V, D)};
  WorkspaceSize size;
  check(workspace(op, {}, &size));
  std::vector<char> memory(size.recommended + size.alignment);
  void* start = memory.data();
  size_t bytes_left = memory.size();
  std::align(size.alignment, size.recommended, start, bytes_left);
  check(run(op, {start, bytes_left}, {}));
  backward();
  const bool embeds = has_slope("embedding", &embedding), mixes = has_slope("mix", &mix);
  return embeds && mixes;
}

int main(int, char** argv) {
  if (!ends_as_it_must(argv[1])) return 1;
  failing_call = 0;
  return has_the_slopes_of_its_loss(argv[1]) ? 0 : 1;
}
