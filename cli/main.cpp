// SPDX-License-Identifier: Apache-2.0
// The command line, logitless. Exit codes: 0 when all is done, 2 for bad input, 1 when a check or
// anything else failed. An error is one line on stderr and, with --json, an object on
// stdout.
#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <string_view>

#include "cli/commands.h"
#include "cli/text.h"
#include "logitless/logitless.h"

namespace logitless::cli {
namespace {

// Searches the arguments, because an error in one of them ends the parsing before the flag is set.
bool wants_json(int argc, char** argv) {
  return std::any_of(argv, argv + argc,
                     [](const char* argument) { return argument == std::string_view("--json"); });
}

int complain(const CLI::App& app, bool json, int exit_code, const CommandError& error) {
  std::string message = error.what();
  std::replace(message.begin(), message.end(), '\n', ' ');
  const auto chosen = app.get_subcommands();
  const std::string where = chosen.empty() ? "" : chosen.front()->get_name() + ": ";
  fmt::print(stderr, "logitless: {}{}\n", where, message);
  if (json) {
    nlohmann::json field;  // null
    if (!error.field.empty()) field = error.field;
    print_json({{"error", {{"code", error.code}, {"field", field}, {"message", message}}}});
    std::fflush(stdout);
  }
  return exit_code;
}

// Returns the argument that a message of CLI11 names: "V is required", "V: ...", "The following
// argument was not expected: V", "Could not convert: V = ...".
std::string field_of(const CLI::ParseError& error) {
  const std::string message = error.what();
  const size_t colon = message.find(": "), blank = message.find(' ');
  if (message.find(" is required") == blank) return message.substr(0, blank);
  if (colon == message.npos) return "";
  if (colon < blank) return message.substr(0, colon);
  std::istringstream rest(message.substr(colon + 1));
  std::string field;
  rest >> field;
  return field;
}

int main(int argc, char** argv) {
  // write() then fails if a file exceeds the size limit, instead of a signal.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App app{"Logitless: exact cross-entropy for language models without the logits",
               "logitless"};
  app.set_version_flag("--version", fmt::format("logitless {}.{}.{}", LOGITLESS_VERSION_MAJOR,
                                                LOGITLESS_VERSION_MINOR, LOGITLESS_VERSION_PATCH));
  app.require_subcommand(1);
  Context context;
#define COMMAND(name) add_##name(app, context)
  LOGITLESS_CLI_COMMANDS;  // COMMAND(info), COMMAND(plan), ...: the commands built
#undef COMMAND
  const bool json = wants_json(argc, argv);
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return complain(app, false, 1, Failure("the output could not be written"));
    }
    return context.exit_code;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help and --version end here
    if (!app.remaining().empty() && app.get_subcommands().empty()) {
      const std::string name = app.remaining().front();
      return complain(app, json, 2,
                      BadInput(name + ": no such command; see logitless --help", name));
    }
    if (app.get_subcommands().empty() && dynamic_cast<const CLI::RequiredError*>(&e) != nullptr) {
      return complain(app, json, 2, BadInput("a command is missing; see logitless --help"));
    }
    return complain(app, json, 2, BadInput(e.what(), field_of(e)));
  } catch (const BadInput& e) {
    return complain(app, json, 2, e);
  } catch (const CommandError& e) {
    return complain(app, json, 1, e);
  } catch (const std::bad_alloc&) {
    return complain(app, json, 1, Failure("out of memory", "out_of_memory"));
  } catch (const std::exception& e) {
    return complain(app, json, 1, Failure(e.what()));
  }
}

}  // namespace

}  // namespace logitless::cli

int main(int argc, char** argv) { return logitless::cli::main(argc, argv); }
