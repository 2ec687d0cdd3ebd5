// SPDX-License-Identifier: Apache-2.0
// main() of test programs that need no device. Only slow builds (eighth()) leave out cases.
#include "gtest/gtest.h"
#include "tests/support/rotation.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (logitless::conformance::eighth()) logitless::conformance::rotate_cases();
  return RUN_ALL_TESTS();
}
