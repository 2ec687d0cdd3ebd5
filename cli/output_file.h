// SPDX-License-Identifier: Apache-2.0
// A command writes these files. Each appears whole or not at all: it is written beside its place,
// reaches the disk, and takes its name in one step. A signal that ends the command takes the
// unfinished ones with it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace logitless::cli {

// This is a file to write and the option that names it; an empty path says that there is none.
struct OutputName {
  std::string option, path;
};

// open_outputs makes these objects.
class OutputFile {
 public:
  explicit OutputFile(const OutputName& name);
  ~OutputFile();  // what is not committed disappears
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Throws Failure, which names the file, where the disk refuses.
  void write(const void* data, uint64_t bytes);
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

 private:
  std::string path_;  // messages have it as it was given
  std::string destination_, temporary_;
  mode_t mode_ = 0;
  int descriptor_ = -1;
};

// Opens all that a command writes, before the work whose results they are to hold. The result is in
// the order of `names`, with nullptr for an empty path. It throws BadInput where one of them cannot
// be written, or is an input, another output or the standard output, whatever links and spellings
// lead there.
std::vector<std::unique_ptr<OutputFile>> open_outputs(
    const std::vector<OutputName>& names, const std::vector<std::filesystem::path>& inputs);

// Removes what is not committed yet. A handler of signals may call it.
void remove_unfinished_files();

}  // namespace logitless::cli
