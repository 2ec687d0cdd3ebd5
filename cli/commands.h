// SPDX-License-Identifier: Apache-2.0
// Each subcommand has a file with the function that adds it. A command throws BadInput (exit 2) or
// Failure (exit 1) with a one-line message; main prints it and, with --json, an object on the
// standard output.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

// CLI11's headers take seconds to compile, so only files that add options include them.
namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace logitless::cli {

struct Context {
  bool json = false;  // print one JSON object, or JSON lines if the command streams
  int exit_code = 0;  // main returns it; 1: a check failed
};

// `field` is the option, argument or tensor at fault, if there is one; an option that begins the
// message need not be given again.
struct CommandError : std::runtime_error {
  CommandError(const std::string& message, std::string code_of, std::string field_of)
      : std::runtime_error(message), code(std::move(code_of)), field(std::move(field_of)) {
    if (field.empty() && message.starts_with("--")) {
      field = message.substr(0, message.find_first_of(": "));
    }
  }
  std::string code, field;
};
// The caller's error: exit code 2.
struct BadInput : CommandError {
  explicit BadInput(const std::string& message, std::string field = "",
                    std::string code = "bad_input")
      : CommandError(message, std::move(code), std::move(field)) {}
};
// Not the caller's error: exit code 1.
struct Failure : CommandError {
  explicit Failure(const std::string& message, std::string code = "failure")
      : CommandError(message, std::move(code), "") {}
};

// Adds a subcommand with its --json flag.
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
