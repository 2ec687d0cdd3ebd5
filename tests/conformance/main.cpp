// SPDX-License-Identifier: Apache-2.0
// main() of programs whose tests run on the backends named in LOGITLESS_TEST_DEVICES. If none of
// these is present, it prints the reason and exits as skipped.
#include <cstdio>

#include "gtest/gtest.h"
#include "tests/support/device.h"
#include "tests/support/rotation.h"

int main(int argc, char** argv) {
  using namespace logitless::conformance;
  constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of conformance.cmake
  testing::InitGoogleTest(&argc, argv);
  bool absent = false;
  for (const Found& found : all_devices()) {
    if (!asked_for(found.name) || found.device != nullptr) continue;
    std::printf("skipped: %s\n", found.reason.c_str());
    absent = true;
  }
  if (devices().empty()) {
    if (absent) return kSkipped;
    std::fprintf(stderr, "LOGITLESS_TEST_DEVICES names no backend of this build; it has:");
    for (const Found& found : all_devices()) std::fprintf(stderr, " %s", found.name.c_str());
    std::fprintf(stderr, "\n");
    return 1;
  }
  // Unless slow, the suite Conformance runs whole: on a CPU it is quick and finds most.
  rotate_cases(eighth() ? "" : "/Conformance.");
  return RUN_ALL_TESTS();
}
