// SPDX-License-Identifier: Apache-2.0
// The command line's shape: every subcommand is one file and one function that adds it. A command
// throws BadInput (exit 2) or Failure (exit 1) with one line to say; main prints it.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>
#include <string>

namespace logitless::cli {

struct Context {
  bool json = false;  // one JSON object, or JSON lines where the command streams
  int exit_code = 0;  // what main returns; 1 where a check failed
};

// The caller's fault: exit code 2 and this one line on stderr.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Anything else that stops a command: exit code 1 and this one line on stderr.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A subcommand with its --json flag; `body` runs after parsing.
CLI::App* add_command(CLI::App& app, Context& context, const std::string& name,
                      const std::string& description);

void add_info(CLI::App& app, Context& context);
void add_loss(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_check(CLI::App& app, Context& context);
void add_demo(CLI::App& app, Context& context);

}  // namespace logitless::cli
