// SPDX-License-Identifier: Apache-2.0
// The demo's text comes from the files and folders given, or from Python's standard library.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "cli/commands.h"
#include "examples/demo/text.h"

namespace logitless::cli::demo {
namespace {

namespace fs = std::filesystem;

// Returns the library folder that `python3` prints, or an empty path without Python.
fs::path ask_python() {
  const char* command =
      "python3 -c \"import sysconfig; print(sysconfig.get_paths()['stdlib'])\" 2>/dev/null";
  const auto close = [](std::FILE* pipe) { pclose(pipe); };
  const std::unique_ptr<std::FILE, decltype(close)> pipe(popen(command, "r"), close);
  if (pipe == nullptr) return {};
  std::string output;
  std::array<char, 4096> line{};
  if (std::fgets(line.data(), line.size(), pipe.get()) != nullptr) output = line.data();
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

// Adds the folders python3* directly under `parent`, by name.
void add_versions(const fs::path& parent, std::vector<fs::path>* found) {
  std::error_code failed;
  std::vector<fs::path> here;
  for (const auto& entry : fs::directory_iterator(parent, failed)) {
    if (entry.path().filename().string().starts_with("python3")) here.push_back(entry.path());
  }
  std::sort(here.begin(), here.end());
  found->insert(found->end(), here.begin(), here.end());
}

fs::path standard_library() {
  std::vector<fs::path> candidates;
  add_versions("/usr/lib", &candidates);
  add_versions("/usr/local/lib", &candidates);
  if (const char* home = std::getenv("HOME"); home != nullptr) {
    std::error_code failed;
    for (const auto& entry : fs::directory_iterator(fs::path(home) / ".pyenv/versions", failed)) {
      add_versions(entry.path() / "lib", &candidates);
    }
  }
  candidates.push_back(ask_python());
  for (auto at = candidates.rbegin(); at != candidates.rend(); ++at) {
    std::error_code failed;
    if (fs::exists(*at / "os.py", failed)) return *at;
  }
  throw BadInput("found no Python standard library to train on; name a text file or a folder");
}

// Tests and installed packages differ from machine to machine; caches are not text.
bool is_skipped(const std::string& folder) {
  static const std::array<std::string, 7> skipped = {
      "site-packages", "dist-packages", "test",        "tests",
      "idle_test",     "__pycache__",   "node_modules"};
  return folder.starts_with(".") ||
         std::find(skipped.begin(), skipped.end(), folder) != skipped.end();
}

// A NUL byte near the start marks a binary file.
bool looks_like_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 4096> start{};
  file.read(start.data(), start.size());
  return std::find(start.begin(), start.begin() + file.gcount(), '\0') ==
         start.begin() + file.gcount();
}

void add_folder(const fs::path& folder, const std::string& extension,
                std::vector<fs::path>* files) {
  std::error_code failed;
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied,
                                      failed);
  if (failed) throw BadInput(fmt::format("cannot read {}", folder.string()));
  for (; at != fs::recursive_directory_iterator(); at.increment(failed)) {
    const fs::path& path = at->path();
    if (at->is_directory(failed)) {
      if (is_skipped(path.filename().string())) at.disable_recursion_pending();
    } else if (at->is_regular_file(failed) &&
               (extension.empty() ? looks_like_text(path) : path.extension() == extension)) {
      files->push_back(path);
    }
  }
}

}  // namespace

std::vector<fs::path> find_text(const std::vector<std::string>& paths) {
  std::vector<fs::path> files;
  if (paths.empty()) add_folder(standard_library(), ".py", &files);
  for (const std::string& given : paths) {
    std::error_code failed;
    if (fs::is_directory(given, failed)) {
      add_folder(given, "", &files);
    } else if (fs::exists(given, failed)) {
      files.emplace_back(given);
    } else {
      throw BadInput(fmt::format("{} does not exist", given));
    }
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  if (files.empty()) throw BadInput(fmt::format("no text file in {}", paths.front()));
  return files;
}

}  // namespace logitless::cli::demo
