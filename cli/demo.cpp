// SPDX-License-Identifier: Apache-2.0
// logitless demo: trains a word-level language model on a text, with the exact softmax over its
// whole vocabulary, and prints its time, memory and perplexity.
#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/text.h"
#include "examples/demo/output.h"
#include "examples/demo/report.h"
#include "examples/demo/train.h"

namespace logitless::cli {
namespace {

using namespace demo;

struct DemoOptions {
  std::vector<std::string> paths;
  int64_t steps = 0;   // 0: as many as fit in `seconds`, or the default
  double seconds = 0;  // 0: as long as `steps` take, or the default
  int64_t dim = 128, context = 16, units = 128;
  int64_t batch = 0;  // 0: by the text's length
  int64_t vocab = 50257;
  uint64_t seed = 1;
  int threads = 0;  // 0: the library's default
  std::string dtype = "bf16";
  std::string save, generate;
  SampleOptions sample;
};

// Training only: `make demo` as a whole then takes less than three minutes on two cores.
constexpr int default_seconds = 65;
constexpr int64_t default_passes = 4;  // at most, over a short text
constexpr int64_t most_batch = 1024;
constexpr int64_t most_heldout = 50000;  // words to score; gives a perplexity to about 1 %
constexpr int64_t exactness_words = 16;
constexpr double learning_rate = 0.004;  // for batches of most_batch

TrainOptions train_options(const DemoOptions& options, const Text& text) {
  const auto words = static_cast<int64_t>(text.train.size());
  TrainOptions train{.seed = options.seed};
  // A short text gets small batches, for enough steps.
  train.batch = options.batch > 0 ? options.batch
                                  : std::clamp<int64_t>(words / 500 / 32 * 32, 32, most_batch);
  const bool neither = options.steps == 0 && options.seconds == 0;
  train.steps =
      neither ? std::max<int64_t>(1, default_passes * words / train.batch) : options.steps;
  if (neither) train.seconds = default_seconds;
  if (options.seconds > 0) train.seconds = options.seconds;
  train.learning_rate = learning_rate * std::sqrt(static_cast<double>(train.batch) / most_batch);
  return train;
}

// The words to score: all, or evenly spread ones.
std::vector<int64_t> heldout_words(const Text& text) {
  const std::vector<int64_t> all = countable(text.heldout);
  if (static_cast<int64_t>(all.size()) <= most_heldout) return all;
  std::vector<int64_t> some;
  for (int64_t i = 0; i < most_heldout; ++i) {
    some.push_back(all[static_cast<size_t>(i) * all.size() / most_heldout]);
  }
  return some;
}

Exactness measure_exactness(const Text& text, std::span<const int64_t> at, Model* model) {
  const auto words = std::min<size_t>(exactness_words, at.size());
  const Batch batch = make_batch(text.heldout, at.first(words), model->shape().context);
  const std::vector<float> fast = model->losses(batch);
  const std::vector<float> exact = model->losses(batch, DeviceType::reference);
  Exactness result{.words = static_cast<int64_t>(words)};
  for (size_t i = 0; i < words; ++i) {
    result.largest_difference =
        std::max(result.largest_difference, std::abs(static_cast<double>(fast[i]) - exact[i]));
  }
  return result;
}

uint64_t peak_resident_bytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
#ifdef __APPLE__
  return static_cast<uint64_t>(usage.ru_maxrss);
#else
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
#endif
}

Memory measure_memory(const Model& model) {
  const Shape& shape = model.shape();
  const auto numbers = static_cast<uint64_t>(model.gradient().all.size());
  const auto copy = static_cast<uint64_t>(
      model.head().dtype() == DType::f32 ? 0 : shape.vocab * shape.hidden * 2);
  return {.logits = static_cast<uint64_t>(model.head().batch() * shape.vocab) * sizeof(float),
          .workspace = model.head().workspace_bytes(),
          .parameters = numbers * sizeof(float) + copy,
          .gradients = numbers * sizeof(float),
          .optimizer = model.optimizer_bytes(),
          .peak_resident = peak_resident_bytes()};
}

struct Files {
  std::unique_ptr<OutputFile> generate, save;
};

Files open_files(const DemoOptions& options, const std::vector<std::filesystem::path>& text) {
  auto files = open_outputs({{"--generate", options.generate}, {"--save", options.save}}, text);
  return {std::move(files[0]), std::move(files[1])};
}

void write_files(const Files& files, const Outcome& outcome, const Text& text,
                 std::span<const int64_t> heldout_at, Model* model) {
  if (files.generate) files.generate->write(outcome.sample.text);
  if (files.save) save_model(*files.save, text, heldout_at, model);
  for (const auto* file : {&files.generate, &files.save}) {
    if (*file) (*file)->commit();
  }
}

Outcome run_demo(const DemoOptions& options, const Text& text, const Files& files,
                 Progress* progress, Model* model) {
  Outcome outcome;
  outcome.training = train(text, train_options(options, text), model,
                           [&](const TrainProgress& p) { progress->show(p); });
  const std::vector<int64_t> at = heldout_words(text);
  progress->say("Scoring the held-out words");
  outcome.memory = measure_memory(*model);
  outcome.perplexity = perplexity(text.heldout, at, model);
  outcome.baselines = measure_baselines(text, at);
  outcome.heldout_words = static_cast<int64_t>(at.size());
  const auto unknown = std::count_if(at.begin(), at.end(), [&](int64_t i) {
    return text.heldout[static_cast<size_t>(i)] == unknown_word;
  });
  outcome.unknown_share = static_cast<double>(unknown) / static_cast<double>(at.size());
  outcome.exactness = measure_exactness(text, at, model);
  progress->say("Writing some text");
  SampleOptions sample = options.sample;
  sample.seed = options.seed;
  outcome.sample = write_text(text, sample, model);
  write_files(files, outcome, text, at, model);
  return outcome;
}

void run(const Context& context, const DemoOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  if (options.threads > 0) logitless_set_num_threads(options.threads);
  const std::vector<std::filesystem::path> paths = find_text(options.paths);
  const Files files = open_files(options, paths);
  const Text text = read_text(paths, {.vocab = options.vocab, .seed = options.seed});
  if (!context.json) print_text(text);
  const Shape shape{text.vocab(), options.dim, options.context, options.units};
  Model model(shape, text, train_options(options, text).batch, parse_dtype(options.dtype),
              options.seed);
  if (!context.json) print_model(model);
  Progress progress(context.json                 ? Progress::Mode::silent
                    : isatty(STDOUT_FILENO) != 0 ? Progress::Mode::terminal
                                                 : Progress::Mode::lines);
  Outcome outcome = run_demo(options, text, files, &progress, &model);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (context.json) {
    print_json(to_json(outcome, text, model));
  } else {
    print_outcome(outcome, text);
    for (const std::string& file : {options.generate, options.save}) {
      if (!file.empty()) fmt::print("wrote {}\n", file);
    }
  }
}

void add_options(CLI::App* command, DemoOptions* o) {
  command->add_option("TEXT", o->paths,
                      "files and folders; default: the sources of Python's standard library");
  command->add_option("--steps", o->steps, "steps of training; with these the result is fixed")
      ->check(integer(1, 1 << 30));
  command
      ->add_option("--seconds", o->seconds,
                   fmt::format("of training; default: {}, less for a short text", default_seconds))
      ->check(number(0.1, 1e9));
  command->add_option("--dim", o->dim, "width of the hidden state")->check(integer(1, 8192));
  command->add_option("--context", o->context, "words the model looks back")
      ->check(integer(1, 256));
  command->add_option("--units", o->units, "rectified units; 0: purely log-bilinear")
      ->check(integer(0, 8192));
  command->add_option("--vocab", o->vocab, "words at most")->check(integer(3, 1 << 24));
  command->add_option("--batch", o->batch, "words of a step; default: up to 1024")
      ->check(integer(1, 1 << 20));
  command->add_option("--seed", o->seed, "of everything random")->check(integer(0));
  command->add_option("--threads", o->threads, "default: the processors this process may use")
      ->check(integer(1, 4096));
  command->add_option("--dtype", o->dtype, "of the head's products")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--save", o->save, "write the model to this .safetensors file");
  command->add_option("--generate", o->generate, "write text of the model's own to this file");
  command->add_option("--words", o->sample.words, "words of that text")->check(integer(1, 1 << 20));
  command->add_option("--temperature", o->sample.temperature, "below 1: likelier words")
      ->check(number(0.01, 100));
  for (const char* name : {"--dim", "--context", "--units", "--vocab", "--dtype", "--words",
                           "--temperature", "--seed"}) {
    command->get_option(name)->capture_default_str();
  }
}

}  // namespace

void add_demo(CLI::App& app, Context& context) {
  const auto options = std::make_shared<DemoOptions>();
  CLI::App* command = add_command(app, context, "demo", "train a language model on text, exactly");
  add_options(command, options.get());
  command->callback([&context, options] { run(context, *options); });
}

}  // namespace logitless::cli
