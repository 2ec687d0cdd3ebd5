// SPDX-License-Identifier: Apache-2.0
// This is a wgpu-native that runs nothing and answers when a test lets it: it shows what the native
// device does where there is no adapter yet, an answer is late, or memory is short.
#pragma once

#include <webgpu.h>
#include <wgpu.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace logitless::webgpu {

struct PaperWgpu {
  bool has_adapter = true;
  bool answers = true;  // it answers within the events, else as `late` is called
  std::vector<std::function<void()>> late;      // these were not answered
  std::vector<void*> userdata;                  // every callback has one
  int instances = 0, adapters = 0, scopes = 0;  // they are alive, or open
  int encoders = 0;                             // they are begun and not released
  int recorded = 0;                             // it counts dispatches of the open encoder
  int submitted = 0;                            // it counts dispatches
  bool fails_scopes = false;                    // every scope has caught something
  int allocations_left = -1;  // operator new has so many until one fails; -1 is no limit
};
PaperWgpu& paper_wgpu();

}  // namespace logitless::webgpu
