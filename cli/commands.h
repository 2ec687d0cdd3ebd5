// SPDX-License-Identifier: Apache-2.0
// The command line has this shape: every subcommand is one file and one function that adds it. A
// command throws BadInput (exit 2) or Failure (exit 1) with one line to say; main prints it, and
// with --json an object on the standard output too.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

// CLI11's headers cost a file seconds, so only who adds options includes them.
namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace logitless::cli {

struct Context {
  bool json = false;  // it is one JSON object, or JSON lines where the command streams
  int exit_code = 0;  // main returns it; 1 says that a check failed
};

// A command stops with this. `field` is the option, argument or tensor that it is about, where it
// is about one; an option that begins the message need not be given again.
struct CommandError : std::runtime_error {
  CommandError(const std::string& message, std::string code_of, std::string field_of)
      : std::runtime_error(message), code(std::move(code_of)), field(std::move(field_of)) {
    if (field.empty() && message.starts_with("--")) {
      field = message.substr(0, message.find_first_of(": "));
    }
  }
  std::string code, field;
};
// BadInput stands for the caller's fault, with exit code 2.
struct BadInput : CommandError {
  explicit BadInput(const std::string& message, std::string field = "",
                    std::string code = "bad_input")
      : CommandError(message, std::move(code), std::move(field)) {}
};
// A Failure is what is not the caller's fault; its exit code is 1.
struct Failure : CommandError {
  explicit Failure(const std::string& message, std::string code = "failure")
      : CommandError(message, std::move(code), "") {}
};

// Adds a subcommand with its --json flag; `body` runs after parsing.
CLI::App* add_command(CLI::App& app, Context& context, const std::string& name,
                      const std::string& description);

void add_info(CLI::App& app, Context& context);
void add_loss(CLI::App& app, Context& context);
void add_score(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_check(CLI::App& app, Context& context);
void add_demo(CLI::App& app, Context& context);

}  // namespace logitless::cli
