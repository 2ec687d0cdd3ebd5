// SPDX-License-Identifier: Apache-2.0
// Trains a small transformer on a text, with the installed library, and draws its loss curve:
//
//     example_train [FILE] [--steps N] [--vocab V] [--untied] [--below NATS]
//
// transformer.h has the model. Without a file the text is the reference of Python's language, where
// a Python is installed. The last line is the loss on a held-out tenth of the text; with --below
// NATS the program fails unless the training loss ends below that. `logitless demo` (demo/) is the
// larger one: on the library's own threads and matrix products, over whole folders, with
// perplexities compared with counting models', and text that it writes.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "demo/words-inl.h"
#include "transformer.h"

namespace {

using Tokens = std::vector<int32_t>;

constexpr int64_t batch = 8;  // sequences per step
constexpr float largest_rate = 3e-3f;
constexpr const char* usage = "[FILE] [--steps N] [--vocab V] [--untied] [--below NATS]";

struct Options {
  std::string file;
  int64_t steps = 1000;
  int64_t vocab = 8192;
  bool tied = true;
  double below = INFINITY;
};

template <class Number>
Number number(const std::string& option, std::string_view value, Number least) {
  Number result{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || !(result >= least)) {
    throw std::invalid_argument(option + " is \"" + std::string(value) +
                                "\"; allowed: a number from " + std::to_string(least));
  }
  return result;
}

Options read_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const auto value = [&]() -> std::string_view {
      if (++i == count) throw std::invalid_argument(name + " needs a number");
      return arguments[i];
    };
    if (name == "--steps") {
      options.steps = number<int64_t>(name, value(), 1);
    } else if (name == "--vocab") {
      options.vocab = number<int64_t>(name, value(), 2);
    } else if (name == "--below") {
      options.below = number<double>(name, value(), 0);
    } else if (name == "--untied") {
      options.tied = false;
    } else if (name.substr(0, 1) == "-" || !options.file.empty()) {
      throw std::invalid_argument(name + " is not allowed here; allowed: " + usage);
    } else {
      options.file = name;
    }
  }
  return options;
}

// Returns the file of Python's help pages, which are English text.
std::string find_text() {
  std::error_code none;
  for (const char* folder : {"/usr/lib", "/usr/local/lib"}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
      const auto file = entry.path() / "pydoc_data/topics.py";
      if (std::filesystem::exists(file, none)) return file.string();
    }
  }
  throw std::invalid_argument("found no Python whose help pages to train on; name a text file");
}

std::string read_file(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  if (!file || std::filesystem::is_directory(name))
    throw std::invalid_argument("cannot read " + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Numbers the words of a text by frequency, the most frequent first; 0 stands for words that occur
// once or do not fit the vocabulary. Returns the vocabulary's size.
int64_t number_words(const std::string& text, int64_t most, Tokens* tokens) {
  std::map<std::string, int64_t, std::less<>> count;
  std::vector<std::string> words;
  logitless::cli::demo::split_words(text, [&](std::string_view word) {
    words.emplace_back(word);
    ++count[words.back()];
  });
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [word, times] : count) {
    if (times > 1) order.emplace_back(-times, word);
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), static_cast<size_t>(most - 1)));
  std::map<std::string, int32_t> number;
  for (const auto& [times, word] : order) {
    number.emplace(word, static_cast<int32_t>(number.size()) + 1);
  }
  for (const std::string& word : words) {
    const auto at = number.find(word);
    tokens->push_back(at == number.end() ? 0 : at->second);
  }
  return static_cast<int64_t>(number.size()) + 1;
}

// Draws sequences of a part of the text, [first, last), and each word's next word.
void draw_batch(const Tokens& text, int64_t first, int64_t last, int64_t context,
                std::mt19937_64* random, Tokens* tokens, Tokens* next) {
  tokens->clear();
  next->clear();
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    const auto range = static_cast<uint64_t>(last - first - context);
    const auto at = text.begin() + first + static_cast<int64_t>((*random)() % range);
    tokens->insert(tokens->end(), at, at + context);
    next->insert(next->end(), at + 1, at + context + 1);
  }
}

// Rises over the first tenth of the steps, then falls to 0.
float rate_at(int64_t step, int64_t steps) {
  const auto done = static_cast<float>(step + 1) / static_cast<float>(steps + 1);
  return largest_rate * std::min(10 * done, (1 - done) / 0.9f);
}

// Prints one line of the chart for several steps, with a bar of their mean loss.
void report(int64_t step, double loss, double largest, double seconds) {
  const auto length = static_cast<size_t>(std::clamp(50 * loss / largest, 0.0, 60.0));
  std::printf("step %5lld  %6.1f s  loss %7.4f  %s\n", static_cast<long long>(step), seconds, loss,
              std::string(length, '#').c_str());
  std::fflush(stdout);
}

// Returns the mean loss of the last line's steps.
double train(const Tokens& text, int64_t last, int64_t steps, int64_t context,
             example::Model* model) {
  std::mt19937_64 random(1);
  Tokens tokens, next;
  const auto start = std::chrono::steady_clock::now();
  const int64_t stretch = std::max<int64_t>(1, steps / 20);
  double sum = 0, largest = 0, mean = 0;
  for (int64_t step = 0, summed = 0; step < steps; ++step) {
    draw_batch(text, 0, last, context, &random, &tokens, &next);
    sum += double{model->gradients(tokens, next)};
    model->step(rate_at(step, steps));
    if (++summed < stretch && step + 1 < steps) continue;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    mean = sum / static_cast<double>(summed);
    largest = std::max(largest, mean);
    report(step + 1, mean, largest, spent.count());
    sum = 0;
    summed = 0;
  }
  return mean;
}

double unseen_loss(const Tokens& text, int64_t first, int64_t context, example::Model* model) {
  constexpr int batches = 16;
  std::mt19937_64 random(2);
  Tokens tokens, next;
  double sum = 0;
  for (int i = 0; i < batches; ++i) {
    draw_batch(text, first, static_cast<int64_t>(text.size()), context, &random, &tokens, &next);
    sum += double{model->loss(tokens, next)};
  }
  return sum / batches;
}

int run(const Options& options) {
  const std::string file = options.file.empty() ? find_text() : options.file;
  Tokens text;
  example::Shape shape;
  shape.vocab = number_words(read_file(file), options.vocab, &text);
  shape.tied = options.tied;
  const auto size = static_cast<int64_t>(text.size()), seen = size * 9 / 10;
  if (size - seen <= shape.context + 1) {
    throw std::invalid_argument(file + " has " + std::to_string(size) + " words; allowed: from " +
                                std::to_string(10 * (shape.context + 2)));
  }
  example::Model model(shape, 1);
  std::printf("%s: %lld words, %lld of them different; %zu parameters, the head %s\n", file.c_str(),
              static_cast<long long>(size), static_cast<long long>(shape.vocab),
              model.parameters.all.size(), shape.tied ? "tied" : "of its own");
  std::printf("to guess costs log V = %.4f nats\n", std::log(static_cast<double>(shape.vocab)));
  const double end = train(text, seen, options.steps, shape.context, &model);
  std::printf("unseen text: loss %.4f\n", unseen_loss(text, seen, shape.context, &model));
  if (end < options.below) return 0;
  std::fprintf(stderr, "the training ended at %.4f, not below %.4f\n", end, options.below);
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(read_options(count, arguments));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "example_train: %s\n", error.what());
    return 2;
  }
}
