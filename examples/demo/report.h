// SPDX-License-Identifier: Apache-2.0
// The demo's output: progress, the loss curve, memory, perplexities; or all of it as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "examples/demo/baseline.h"
#include "examples/demo/output.h"
#include "examples/demo/text.h"
#include "examples/demo/train.h"

namespace logitless::cli::demo {

// The bar redraws itself on a terminal; elsewhere there is a line for the first step and every five
// seconds.
class Progress {
 public:
  enum class Mode { terminal, lines, silent };
  explicit Progress(Mode mode) : mode_(mode) {}
  void show(const TrainProgress& progress);
  void say(const char* what);  // prints the name of the current stage

 private:
  Mode mode_;
  double shown_ = 0;  // when the last line was shown, in seconds since the start
};

// Draws a curve in braille dots, `rows` lines high, with its scale.
std::string draw_curve(std::span<const float> values, int64_t columns, int64_t rows);

struct Memory {
  uint64_t logits = 0;      // [N, V]  f32 of one batch, for comparison
  uint64_t workspace = 0;   // of the loss
  uint64_t parameters = 0;  // with the bf16 copy that the products read
  uint64_t gradients = 0;
  uint64_t optimizer = 0;
  uint64_t peak_resident = 0;  // of the process; 0: unknown
};

struct Exactness {
  int64_t words = 0;
  // The largest difference between a word's loss and its loss in double.
  double largest_difference = 0;
};

struct Outcome {
  TrainResult training;
  Baselines baselines;
  double perplexity = 0;
  int64_t heldout_words = 0;  // the number scored
  double unknown_share = 0;   // the share of these that is not in the vocabulary
  Memory memory;
  Exactness exactness;
  Sample sample;
  double seconds = 0;  // of the whole run
};

void print_text(const Text& text);
void print_model(const Model& model);
void print_outcome(const Outcome& outcome, const Text& text);
nlohmann::json to_json(const Outcome& outcome, const Text& text, const Model& model);

}  // namespace logitless::cli::demo
