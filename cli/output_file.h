// SPDX-License-Identifier: Apache-2.0
// The files that a command writes. Each appears whole or not at all: it is written under a
// temporary name, synced, and renamed atomically. A signal that ends the command removes unfinished
// files.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace logitless::cli {

// A file to write and the option that names it; an empty path: none.
struct OutputName {
  std::string option, path;
};

// Made by open_outputs.
class OutputFile {
 public:
  explicit OutputFile(const OutputName& name);
  ~OutputFile();  // a file that is not committed is removed
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Throws Failure, naming the file, if the write fails.
  void write(const void* data, uint64_t bytes);
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

 private:
  std::string path_;  // as it was given, for messages
  std::string destination_, temporary_;
  mode_t mode_ = 0;
  int descriptor_ = -1;
};

// Opens all files that a command writes, before its work starts. The result is in the order of
// `names`, with nullptr for an empty path. Throws BadInput if a file cannot be written, or is an
// input, another output or the standard output, whatever links and spellings lead there.
std::vector<std::unique_ptr<OutputFile>> open_outputs(
    const std::vector<OutputName>& names, const std::vector<std::filesystem::path>& inputs);

// Removes all files that are not committed yet. Safe in a signal handler.
void remove_unfinished_files();

}  // namespace logitless::cli
