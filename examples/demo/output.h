// SPDX-License-Identifier: Apache-2.0
// A trained model leaves this behind: text that it wrote, and itself in a .safetensors file.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cli/output_file.h"
#include "examples/demo/text.h"
#include "examples/demo/train.h"

namespace logitless::cli::demo {

struct SampleOptions {
  int64_t words = 250;     // punctuation marks and line breaks come on top
  double temperature = 1;  // the logits are divided by it; below 1 likelier words come
  uint64_t seed = 1;
};

struct Sample {
  std::string prompt;  // the end of a held-out passage, from which the model goes on
  std::string text;
};

// Draws text word by word from the model.
Sample write_text(const Text& text, const SampleOptions& options, Model* model);

// Saves the parameters under their names, the vocabulary in the metadata, and "hidden" and "target"
// of some held-out words, which `logitless loss FILE --bias bias` reads.
void save_model(OutputFile& file, const Text& text, std::span<const int64_t> heldout_at,
                Model* model);

}  // namespace logitless::cli::demo
