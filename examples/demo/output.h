// SPDX-License-Identifier: Apache-2.0
// What a trained model leaves behind: text it wrote, and itself in a .safetensors file.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cli/output_file.h"
#include "examples/demo/text.h"
#include "examples/demo/train.h"

namespace logitless::cli::demo {

struct SampleOptions {
  int64_t words = 250;     // besides punctuation marks and line breaks
  double temperature = 1;  // of the logits; below 1: likelier words
  uint64_t seed = 1;
};

struct Sample {
  std::string prompt;  // the end of a held-out passage, which the model goes on from
  std::string text;
};

// Text drawn word by word from the model.
Sample write_text(const Text& text, const SampleOptions& options, Model* model);

// Parameters under their names, the vocabulary in the metadata, and "hidden" and "target" of some
// held-out words: what `logitless loss FILE --bias bias` reads.
void save_model(OutputFile& file, const Text& text, std::span<const int64_t> heldout_at,
                Model* model);

}  // namespace logitless::cli::demo
