// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.h"

#include <CLI/CLI.hpp>

namespace logitless::cli {

CLI::App* add_command(CLI::App& app, Context& context, const std::string& name,
                      const std::string& description) {
  CLI::App* command = app.add_subcommand(name, description);
  command->add_flag("--json", context.json, "print JSON instead of text");
  return command;
}

}  // namespace logitless::cli
