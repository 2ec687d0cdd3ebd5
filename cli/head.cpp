// SPDX-License-Identifier: Apache-2.0
// Turns the file's tensors into the library's, and reports what is wrong with them.
#include "cli/head.h"

#include <fmt/core.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstring>
#include <functional>
#include <numeric>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/safetensors_header.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

// The product of the first `count` sizes. It fits in 64 bits unless a later size is 0, because the
// file holds at least that many elements; for an empty tensor it may overflow.
int64_t product(const std::vector<int64_t>& shape, size_t count) {
  const auto end = shape.begin() + static_cast<std::ptrdiff_t>(count);
  if (std::find(shape.begin(), end, 0) != end) return 0;
  return std::accumulate(shape.begin(), end, int64_t{1}, std::multiplies<>());
}

const SafetensorsTensor& find(const Safetensors& content, const std::string& name,
                              const std::string& option) {
  const SafetensorsTensor* tensor = content.find(name);
  if (tensor != nullptr) return *tensor;
  constexpr size_t kListed = 8;
  std::string names;
  for (size_t i = 0; i < content.tensors.size() && i < kListed; ++i) {
    names += (i == 0 ? "" : ", ") + in_quotes(content.tensors[i].name);
  }
  if (content.tensors.size() > kListed) names += ", ...";
  throw BadInput(fmt::format("{}: the file has no tensor {}; it has {}", option, in_quotes(name),
                             names.empty() ? "none" : names));
}

// Returns a view of rank `rank`. With `flatten`, leading dimensions are merged into the first.
InputTensor load(const Safetensors& content, const std::string& name, const std::string& option,
                 int32_t rank, bool flatten, const std::vector<std::string>& dtypes) {
  InputTensor input;
  if (name.empty()) return input;
  const SafetensorsTensor& tensor = find(content, name, option);
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype_name) == dtypes.end()) {
    throw BadInput(fmt::format("{}: tensor {} has dtype {}; allowed: {}", option, in_quotes(name),
                               tensor.dtype_name, joined(dtypes)));
  }
  const size_t dimensions = tensor.shape.size();
  const auto wanted = static_cast<size_t>(rank);
  if (dimensions < wanted || (dimensions > wanted && !flatten)) {
    throw BadInput(fmt::format("{}: tensor {} has {} dimensions; allowed: {}{}", option,
                               in_quotes(name), dimensions, rank, flatten ? " or more" : ""));
  }
  if (rank == 2 && tensor.shape.back() == 0) {
    throw BadInput(fmt::format("{}: tensor {} has a last dimension of 0; allowed: >= 1", option,
                               in_quotes(name)));
  }
  const int64_t rows = product(tensor.shape, dimensions - wanted + 1);
  const void* data = tensor.data.data();
  if (tensor.data.empty()) {
    data = nullptr;
  } else if (reinterpret_cast<uintptr_t>(data) % static_cast<uint64_t>(size_of(*tensor.dtype)) !=
             0) {
    input.copy = Buffer(tensor.data.size());
    std::memcpy(input.copy.data(), data, tensor.data.size());
    data = input.copy.data();
  }
  input.view = rank == 2 ? matrix_view(data, *tensor.dtype, rows, tensor.shape.back())
                         : vector_view(data, *tensor.dtype, rows);
  input.shape = tensor.shape;
  return input;
}

int64_t element(const TensorView& integers, int64_t i) {
  return integers.dtype == DType::i64 ? integers.as<const int64_t>()[i]
                                      : integers.as<const int32_t>()[i];
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::vector<std::string> extents;
  for (const int64_t extent : shape) extents.push_back(std::to_string(extent));
  return joined(extents);
}

// A shift stays within a sequence, so both shapes must have the same sequences.
void check_sequences(const InputTensor& hidden, const InputTensor& of_tokens,
                     const std::string& option, const std::string& name) {
  const std::vector<int64_t> sequences(hidden.shape.begin(), hidden.shape.end() - 1);
  if (of_tokens.shape == sequences) return;
  throw BadInput(
      fmt::format("{}: tensor {} has the shape [{}]; allowed with --shift: [{}], as --hidden",
                  option, in_quotes(name), text_of(of_tokens.shape), text_of(sequences)));
}

// Position i of the last dimension gets the element of position i + shift, or `none` past the end.
// `at` reads an element.
template <class T, class At>
InputTensor shifted(const InputTensor& given, DType dtype, int64_t shift, T none, At&& at) {
  const int64_t tokens = given.view.shape[0];
  const int64_t length = std::max<int64_t>(given.shape.back(), 1);
  InputTensor moved;
  moved.shape = given.shape;
  moved.copy = Buffer(sizeof(T) * static_cast<uint64_t>(tokens));
  T* to = moved.copy.as<T>();
  for (int64_t i = 0; i < tokens; ++i) {
    const bool has_one = shift < length && i % length < length - shift;
    to[i] = has_one ? at(i + shift) : none;
  }
  moved.view = vector_view(tokens > 0 ? to : nullptr, dtype, tokens);
  return moved;
}

// Targets and their weights are shifted together. Targets become i64, which holds any ignore_index.
void shift(HeadInputs& inputs, const HeadArguments& arguments) {
  check_sequences(inputs.hidden, inputs.target, "--target", arguments.target);
  const TensorView target = inputs.target.view;
  inputs.target =
      shifted<int64_t>(inputs.target, DType::i64, arguments.shift, arguments.options.ignore_index,
                       [&](int64_t i) { return element(target, i); });
  if (!inputs.token_weight.view) return;
  check_sequences(inputs.hidden, inputs.token_weight, "--token-weight", arguments.token_weight);
  const auto* weight = inputs.token_weight.view.as<const float>();
  inputs.token_weight = shifted<float>(inputs.token_weight, DType::f32, arguments.shift, 0,
                                       [&](int64_t i) { return weight[i]; });
}

HeadInputs load_inputs(const SafetensorsFile& file, const HeadArguments& arguments) {
  const Safetensors& content = file.content();
  const std::vector<std::string> floats{"F32", "F16", "BF16"}, integers{"I32", "I64"}, f32{"F32"};
  HeadInputs inputs{
      .hidden = load(content, arguments.hidden, "--hidden", 2, true, floats),
      .weight = load(content, arguments.weight, "--weight", 2, false, floats),
      .target = load(content, arguments.target, "--target", 1, true, integers),
      .bias = load(content, arguments.bias, "--bias", 1, false, floats),
      .token_weight = load(content, arguments.token_weight, "--token-weight", 1, true, f32),
      .vocab_weight = load(content, arguments.vocab_weight, "--vocab-weight", 1, false, f32)};
  if (arguments.shift > 0) shift(inputs, arguments);
  return inputs;
}

#define LOGITLESS_CHANGED "the file changed while it was read"
volatile std::sig_atomic_t json_wanted = 0;
char changed_line[128];  // the error message, with the command's name

// If another process truncates the mapped file, the command ends here and prints the error as main
// prints others.
void on_bus_error(int) {
  // Several threads read the file; only the first to fail writes the message.
  static std::atomic_flag told;
  while (told.test_and_set()) ::pause();
  constexpr char kJson[] =
      R"({"error":{"code":"failure","field":"file","message":")" LOGITLESS_CHANGED "\"}}\n";
  remove_unfinished_files();
  static_cast<void>(!::write(STDERR_FILENO, changed_line, std::strlen(changed_line)));
  if (json_wanted) static_cast<void>(!::write(STDOUT_FILENO, kJson, sizeof(kJson) - 1));
  ::_exit(1);
}

}  // namespace

std::string in_the_file(const std::string& message, const HeadInputs& inputs, int64_t first) {
  const std::string_view name = "target[";
  int64_t token = 0;
  const char* last = message.data() + message.size();
  if (!message.starts_with(name)) return message;
  const auto [end, problem] = std::from_chars(message.data() + name.size(), last, token);
  if (problem != std::errc{} || end == last || *end != ']') return message;
  std::vector<int64_t> index;
  token += first;
  for (auto extent = inputs.target.shape.rbegin(); extent != inputs.target.shape.rend(); ++extent) {
    index.insert(index.begin(), token % *extent);
    token /= *extent;
  }
  return fmt::format("{}{}{}", name, text_of(index), std::string_view(end, last));
}

int64_t HeadInputs::target_at(int64_t token) const { return element(target.view, token); }

void with_head(const Context& context, const std::string& command, const HeadArguments& arguments,
               const std::function<void(const HeadInputs&)>& body) {
  json_wanted = context.json;
  const std::string line = "logitless: " + command + ": " LOGITLESS_CHANGED "\n";
  line.copy(changed_line, sizeof(changed_line) - 1);
  std::signal(SIGBUS, on_bus_error);
  if (arguments.threads > 0) logitless_set_num_threads(arguments.threads);
  try {
    const SafetensorsFile file(arguments.file);
    body(load_inputs(file, arguments));
  } catch (const SafetensorsError& e) {
    throw BadInput(e.what(), "file");
  }
}

void add_head_options(CLI::App& command, const std::string& name, HeadArguments& a) {
  LossOptions& o = a.options;
  command.add_option("file", a.file, "the .safetensors file")->required();
  command.add_option("--hidden", a.hidden, "hidden states [..., D]")->capture_default_str();
  command.add_option("--weight", a.weight, "the head [V, D]")->capture_default_str();
  command.add_option("--target", a.target, "target tokens [...], I32 or I64")
      ->capture_default_str();
  command.add_option("--bias", a.bias, "bias of the head [V]");
  command
      .add_option("--shift", a.shift,
                  "a position has the target, and its weight, of the one so many behind it; 1: "
                  "next-token prediction")
      ->check(integer(0))
      ->capture_default_str();
  command.add_option("--ignore-index", o.ignore_index)->check(integer())->capture_default_str();
  command
      .add_option_function<std::string>(
          "--out-of-range",
          [&o](const std::string& text) {
            o.out_of_range = text == "ignore" ? OutOfRange::ignore : OutOfRange::error;
          },
          "targets outside the vocabulary")
      ->check(CLI::IsMember({"error", "ignore"}))
      ->default_str("error");
  const auto add = [&](const char* option, float& value, const char* text) {
    command.add_option(option, value, text)->check(number())->capture_default_str();
  };
  add("--softcap", o.softcap, "0: none");
  add("--temperature", o.temperature, "");
  add("--logit-scale", o.logit_scale, "");
  add_memory_option(command, a.memory);
  command.add_option("--device", a.device)->check(device_of(name))->capture_default_str();
  command.add_option("--threads", a.threads, "0: all that this process may use")
      ->check(integer(0, 1024));
}

}  // namespace logitless::cli
