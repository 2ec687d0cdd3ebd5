// SPDX-License-Identifier: Apache-2.0
// A fake wgpu-native that runs nothing and answers when a test lets it, to test the native device
// without an adapter, with late answers, or without memory.
#pragma once

#include <webgpu.h>
#include <wgpu.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace logitless::webgpu {

struct PaperWgpu {
  bool has_adapter = true;
  bool answers = true;                          // at once, else when `late` is called
  std::vector<std::function<void()>> late;      // pending answers
  std::vector<void*> userdata;                  // of every callback
  int instances = 0, adapters = 0, scopes = 0;  // alive; scopes: open
  int encoders = 0;                             // begun and not released
  int recorded = 0;                             // dispatches of the open encoder
  int submitted = 0;                            // dispatches
  bool fails_scopes = false;                    // every scope reports an error
  int allocations_left = -1;                    // of operator new, until one fails; -1: no limit
};
PaperWgpu& paper_wgpu();

}  // namespace logitless::webgpu
