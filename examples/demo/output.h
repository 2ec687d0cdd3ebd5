// SPDX-License-Identifier: Apache-2.0
// The outputs of a trained model: text that it writes, and a .safetensors file of its parameters.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cli/output_file.h"
#include "examples/demo/text.h"
#include "examples/demo/train.h"

namespace logitless::cli::demo {

struct SampleOptions {
  int64_t words = 250;     // words only; punctuation marks and line breaks are not counted
  double temperature = 1;  // divides the logits; below 1 favours likelier words
  uint64_t seed = 1;
};

struct Sample {
  std::string prompt;  // the end of a held-out passage, which the model continues
  std::string text;
};

// Draws text word by word from the model.
Sample write_text(const Text& text, const SampleOptions& options, Model* model);

// Saves the parameters under their names, the vocabulary in the metadata, and "hidden" and "target"
// of some held-out words, which `logitless loss FILE --bias bias` reads.
void save_model(OutputFile& file, const Text& text, std::span<const int64_t> heldout_at,
                Model* model);

}  // namespace logitless::cli::demo
