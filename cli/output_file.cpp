// SPDX-License-Identifier: Apache-2.0
#include "cli/output_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "cli/commands.h"

namespace logitless::cli {
namespace {

namespace fs = std::filesystem;

// The existing temporary files. A signal handler reads the list, so it is static memory, and a name
// is complete before it is marked as used.
struct Unfinished {
  std::atomic<bool> used{false};
  char path[PATH_MAX];
};
static_assert(std::atomic<bool>::is_always_lock_free);
Unfinished unfinished_files[4];

// When the handler returns, the signal's default action ends the command.
void on_ending_signal(int number) {
  remove_unfinished_files();
  ::raise(number);
}

// A signal that was ignored when the command started (nohup) stays ignored.
void handle_ending_signals() {
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGALRM, SIGXCPU}) {
    struct sigaction action{};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_DFL) continue;
    action.sa_handler = on_ending_signal;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigfillset(&action.sa_mask);
    ::sigaction(number, &action, nullptr);
  }
}

// mkostemp with signals blocked until the file is in the list. `path` ends in XXXXXX.
int make_unfinished(std::string& path) {
  auto* free = std::find_if(std::begin(unfinished_files), std::end(unfinished_files),
                            [](const Unfinished& file) { return !file.used; });
  if (free == std::end(unfinished_files) || path.size() >= sizeof(free->path)) {
    errno = ENAMETOOLONG;
    return -1;
  }
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
  const int reason = errno;
  if (descriptor >= 0) {
    std::memcpy(free->path, path.c_str(), path.size() + 1);
    free->used = true;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = reason;
  return descriptor;
}

void forget_unfinished(const std::string& path) {
  for (Unfinished& file : unfinished_files) {
    if (file.used && path == file.path) file.used = false;
  }
}

[[noreturn]] void refuse(const OutputName& name, const std::string& reason) {
  throw BadInput(fmt::format("{}: {}: {}", name.option, name.path, reason));
}

// The path that a write really reaches: the last component may be a link to a file that does not
// exist yet, which std::filesystem does not resolve.
fs::path destination_of(const OutputName& name) {
  constexpr int kMostLinks = 40;  // the kernel's limit
  std::error_code failed;
  fs::path path = name.path;
  for (int links = 0; fs::is_symlink(fs::symlink_status(path, failed)); ++links) {
    if (links == kMostLinks) refuse(name, std::strerror(ELOOP));
    path = path.parent_path() / fs::read_symlink(path, failed);
  }
  const fs::path parent =
      fs::canonical(path.has_parent_path() ? path.parent_path() : fs::path("."), failed);
  if (failed) refuse(name, failed.message());
  return parent / path.filename();
}

// A file's device and inode or, if it does not exist yet, its folder's, and its name there.
using Identity = std::tuple<dev_t, ino_t, std::string>;

std::optional<Identity> identity_of(const fs::path& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) return Identity{info.st_dev, info.st_ino, ""};
  if (::stat(path.parent_path().c_str(), &info) != 0) return {};
  return Identity{info.st_dev, info.st_ino, path.filename().string()};
}

// The standard output, if it is a file.
std::optional<struct stat> redirected_output() {
  struct stat info;
  if (::fstat(STDOUT_FILENO, &info) != 0 || !S_ISREG(info.st_mode)) return {};
  return info;
}

void check_distinct(const std::vector<OutputName>& names, const std::vector<fs::path>& inputs) {
  const std::optional<struct stat> output = redirected_output();
  const auto is_output = [&](const std::optional<Identity>& file) {
    return output && file == Identity{output->st_dev, output->st_ino, ""};
  };
  std::vector<std::pair<Identity, const OutputName*>> seen;
  for (const OutputName& name : names) {
    if (name.path.empty()) continue;
    const std::optional<Identity> file = identity_of(destination_of(name));
    if (!file) continue;  // a file without an identity cannot be opened either
    if (is_output(file)) refuse(name, "this is where the standard output goes");
    for (const auto& [other, other_name] : seen) {
      if (other == *file) refuse(name, other_name->option + " names the same file");
    }
    for (const fs::path& input : inputs) {
      if (identity_of(input) == file) refuse(name, "would overwrite the input " + input.string());
    }
    seen.emplace_back(*file, &name);
  }
  // An empty output needs no check: if it is an input, the shell has already truncated it.
  if (!output || output->st_size == 0) return;
  for (const fs::path& input : inputs) {
    if (is_output(identity_of(input))) {
      throw BadInput("the standard output would be written into the input " + input.string());
    }
  }
}

}  // namespace

OutputFile::OutputFile(const OutputName& name) : path_(name.path) {
  destination_ = destination_of(name);
  struct stat info;
  if (::stat(destination_.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) refuse(name, "exists and is not a regular file");
    if (::access(destination_.c_str(), W_OK) != 0) refuse(name, std::strerror(errno));
    mode_ = info.st_mode & 0777;
  } else {
    const mode_t mask = ::umask(0);
    ::umask(mask);
    mode_ = 0666 & ~mask;
  }
  temporary_ = destination_ + ".XXXXXX";
  descriptor_ = make_unfinished(temporary_);
  if (descriptor_ < 0) refuse(name, std::strerror(errno));
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget_unfinished(temporary_);
}

void OutputFile::write(const void* data, uint64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, at, std::min<uint64_t>(bytes, 1 << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw Failure(fmt::format("{}: {}", path_, std::strerror(errno)));
    at += written;
    bytes -= static_cast<uint64_t>(written);
  }
}

void OutputFile::commit() {
  const int descriptor = std::exchange(descriptor_, -1);
  const bool written = ::fchmod(descriptor, mode_) == 0 && ::fsync(descriptor) == 0;
  const int reason = errno;
  const bool closed = ::close(descriptor) == 0;
  if (!written) errno = reason;
  if (!written || !closed || ::rename(temporary_.c_str(), destination_.c_str()) != 0) {
    throw Failure(fmt::format("{}: {}", path_, std::strerror(errno)));
  }
  forget_unfinished(temporary_);
  temporary_.clear();
  // Syncs the directory, which holds the name. If the system cannot sync directories, the file is
  // complete anyway.
  const std::string parent = fs::path(destination_).parent_path();
  const int directory = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    static_cast<void>(::fsync(directory));
    ::close(directory);
  }
}

std::vector<std::unique_ptr<OutputFile>> open_outputs(const std::vector<OutputName>& names,
                                                      const std::vector<fs::path>& inputs) {
  check_distinct(names, inputs);
  handle_ending_signals();
  std::vector<std::unique_ptr<OutputFile>> files;
  for (const OutputName& name : names) {
    files.push_back(name.path.empty() ? nullptr : std::make_unique<OutputFile>(name));
  }
  return files;
}

void remove_unfinished_files() {
  for (const Unfinished& file : unfinished_files) {
    if (file.used) ::unlink(file.path);
  }
}

}  // namespace logitless::cli
