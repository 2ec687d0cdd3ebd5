// SPDX-License-Identifier: Apache-2.0
// logitless: the command line. 0: done; 1: a check failed or the machine refused; 2: bad input, in
// one line on stderr.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

#include "cli/commands.h"
#include "logitless/logitless.h"

namespace logitless::cli {
namespace {

int complain(const CLI::App& app, int code, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  const auto chosen = app.get_subcommands();
  const std::string where = chosen.empty() ? "" : chosen.front()->get_name() + ": ";
  fmt::print(stderr, "logitless: {}{}\n", where, message);
  return code;
}

int main(int argc, char** argv) {
  CLI::App app{"Logitless: exact cross-entropy for language models without the logits",
               "logitless"};
  app.set_version_flag("--version", fmt::format("logitless {}.{}.{}", LOGITLESS_VERSION_MAJOR,
                                                LOGITLESS_VERSION_MINOR, LOGITLESS_VERSION_PATCH));
  app.require_subcommand(1);
  Context context;
  add_info(app, context);
  add_plan(app, context);
  add_bench(app, context);
  add_check(app, context);
  add_loss(app, context);
#ifdef LOGITLESS_CLI_DEMO
  add_demo(app, context);
#endif
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return complain(app, 1, "the output could not be written");
    }
    return context.exit_code;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    if (!app.remaining().empty() && app.get_subcommands().empty()) {
      return complain(app, 2, app.remaining().front() + ": no such command; see logitless --help");
    }
    return complain(app, 2, e.what());
  } catch (const BadInput& e) {
    return complain(app, 2, e.what());
  } catch (const std::bad_alloc&) {
    return complain(app, 1, "out of memory");
  } catch (const std::exception& e) {
    return complain(app, 1, e.what());
  }
}

}  // namespace

}  // namespace logitless::cli

int main(int argc, char** argv) { return logitless::cli::main(argc, argv); }
