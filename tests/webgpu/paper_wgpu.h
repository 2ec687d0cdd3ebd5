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
  bool answers = true;                          // within the events, else when `late` is called
  std::vector<std::function<void()>> late;      // answers that wait
  std::vector<void*> userdata;                  // every callback has one
  int instances = 0, adapters = 0, scopes = 0;  // alive, or open
  int encoders = 0;                             // begun and not released
  int recorded = 0;                             // dispatches of the open encoder
  int submitted = 0;                            // dispatches
  bool fails_scopes = false;                    // every scope has caught something
  int allocations_left = -1;                    // of operator new, until one fails; -1: no limit
};
PaperWgpu& paper_wgpu();

}  // namespace logitless::webgpu
