// SPDX-License-Identifier: Apache-2.0
// Instruction sets can be listed, forced and released.
#include "src/cpu/dispatch.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace logitless::cpu {
namespace {

std::vector<std::string> targets() {
  std::istringstream words(target_names());
  return {std::istream_iterator<std::string>(words), {}};
}

TEST(Dispatch, ListsTheBestFirstAndRunsIt) {
  ASSERT_FALSE(targets().empty());
  EXPECT_TRUE(force_target(nullptr));
  if (std::getenv("LOGITLESS_CPU_TARGET") == nullptr) {
    EXPECT_EQ(targets()[0], target_name());
  }
}

TEST(Dispatch, ForcesEveryTargetOfItsList) {
  const std::vector<std::string> all = targets();
  for (const std::string& name : all) {
    EXPECT_TRUE(force_target(name.c_str()));
    EXPECT_EQ(name, target_name());
    EXPECT_EQ(targets(), all);
  }
  EXPECT_TRUE(force_target(nullptr));
}

TEST(Dispatch, AnUnknownTargetChangesNothing) {
  const std::string before = target_name();
  EXPECT_FALSE(force_target("NONSENSE"));
  EXPECT_FALSE(force_target(""));
  EXPECT_EQ(before, target_name());
}

// Returns target_name() of a fresh process with LOGITLESS_CPU_TARGET set.
std::string target_with(const std::string& value) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::FILE* pipe =
      popen(("LOGITLESS_CPU_TARGET=" + value + " '" + self + "' --print_target").c_str(), "r");
  char text[64] = "";
  const bool read = std::fscanf(pipe, "%63s", text) == 1;
  pclose(pipe);
  return read ? text : "";
}

TEST(Dispatch, TheEnvironmentForcesATarget) {
  for (const std::string& name : targets()) EXPECT_EQ(target_with(name), name);
  EXPECT_EQ(target_with("NONSENSE"), targets()[0]);
}

}  // namespace
}  // namespace logitless::cpu

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--print_target") {
    std::printf("%s\n", logitless::cpu::target_name());
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
