// SPDX-License-Identifier: Apache-2.0
#include "src/webgpu/cost.h"
#include "src/rounding.h"

#include <algorithm>

namespace logitless::webgpu {
namespace {

// Up to this many multiplications a product uses small tiles. SwiftShader (the browser without a
// GPU) needs 0.2 s for them; a GPU, which larger tiles would leave idle, gets more workgroups.
constexpr int64_t kSmallProduct = int64_t{1} << 26;

constexpr int64_t kCores = 132;
constexpr int64_t kThreadsAtOnce = 512;  // per core, limited by registers for 8 x 8 sums each
constexpr double kDispatch = 4;          // microseconds from one dispatch to the next
constexpr double kBytes = 2.5e6;         // read or written per microsecond

// Microseconds for 16 steps of k of all workgroups that run at the same time: the loads' latency,
// and a full core's arithmetic.
double step_time(const Tile& tile, int64_t groups) {
  const int64_t of_a_core =
      divide_up(std::min(groups, kCores * kThreadsAtOnce / tile.threads()), kCores);
  const double share = static_cast<double>(of_a_core * tile.threads()) / kThreadsAtOnce;
  return tile.small ? 0.8 + 0.8 * share : 1 + 3.4 * share;
}

double product_time(int64_t rows, int64_t columns, int64_t depth, int64_t slices, bool logits) {
  const Tile tile = tile_of(rows, columns, depth, logits);
  const int64_t groups = tile.count(rows, columns) * slices;
  const int64_t at_once = kCores * kThreadsAtOnce / tile.threads();
  const auto steps = static_cast<double>(divide_up(depth, 16 * slices));
  const double full = static_cast<double>(groups / at_once) * step_time(tile, at_once);
  const double rest = groups % at_once > 0 ? step_time(tile, groups % at_once) : 0;
  return kDispatch + steps * (full + rest);
}

double copy_time(double bytes) { return kDispatch + bytes / kBytes; }

// The time of a window's gradients, and of the sum over slices.
double gradient_time(const Problem& p, const Plan& plan, bool adds) {
  const auto block = 4.0 * static_cast<double>(plan.chunk * plan.window);
  double time = copy_time(2 * block);
  if (p.wants_grad_bias) time += copy_time(block);
  const auto rows = 4.0 * static_cast<double>(plan.chunk * p.hidden);
  if (p.wants_grad_input) {
    time += product_time(plan.chunk, p.hidden, plan.window, plan.slices, false);
    if (plan.slices > 1) time += copy_time(rows * static_cast<double>(plan.slices + 2));
  }
  if (p.wants_grad_weight) {
    time += product_time(plan.window, p.hidden, plan.chunk, 1, false);
    if (adds) time += 4.0 * static_cast<double>(plan.window * p.hidden) / kBytes;
  }
  return time;
}

}  // namespace

Tile tile_of(int64_t rows, int64_t columns, int64_t depth, bool logits) {
  if (rows * columns <= kSmallProduct / std::max<int64_t>(depth, 1)) {
    return {.small = true, .m = 32, .n = 32};
  }
  const Tile largest{.m = rows > 64 ? 128 : 64, .n = 128};
  if (logits && largest.m == 128 &&
      largest.count(rows, columns) * largest.threads() >= kCores * kThreadsAtOnce) {
    return largest;
  }
  return {.m = largest.m, .n = 64};
}

int64_t most_slices(const Problem& p, int64_t chunk, int64_t window) {
  if (!p.wants_grad_input || chunk == 0) return 1;
  constexpr int64_t kMost = 32, kLeastDepth = 256;
  const Tile tile = tile_of(chunk, p.hidden, window, false);
  const int64_t groups = kCores * kThreadsAtOnce * 3 / 4 / tile.threads();
  const int64_t wanted = groups / tile.count(chunk, round_up(p.hidden, 4));
  return std::clamp<int64_t>(std::min(wanted, window / kLeastDepth), 1, kMost);
}

double predicted_microseconds(const Problem& p, const Plan& plan) {
  if (plan.chunk == 0) return 0;
  const auto block = 4.0 * static_cast<double>(plan.chunk * plan.window);
  const auto weight = 4.0 * static_cast<double>(plan.window * p.hidden);
  double logits = 0;
  if (p.targets_only) {
    logits = copy_time(weight);
    if (!p.weight_bound) logits += copy_time(2 * weight);
  } else if (p.linear) {
    logits = product_time(plan.chunk, plan.window, p.hidden, 1, true);
    if (!p.weight_bound) logits += copy_time(2 * weight);
  } else if (!p.direct) {
    logits = copy_time(2 * block);
  }
  double teacher = 0;
  if (p.has_teacher()) {
    teacher = p.teacher.is_head ? product_time(plan.chunk, plan.window, p.teacher.hidden, 1, true)
                                : copy_time(2 * block);
    if (p.teacher.is_head && !p.teacher.weight_bound) {
      teacher += copy_time(8.0 * static_cast<double>(plan.window * p.teacher.hidden));
    }
    teacher += copy_time(block) + copy_time(2 * block);  // teacher's slots, both heads' sums
  } else if (p.reads_kept) {
    logits = copy_time(2 * block);
  }
  const bool makes_state = !p.state_given;
  const bool uses_logits = p.gradients || p.softmax;
  double window = makes_state ? logits + teacher + copy_time(block) : 0;
  if (p.needs_logits_again() && !(plan.whole && makes_state) && !p.diverges) window += logits;
  if (p.ranks) window += copy_time(block);
  double first = 0, later = 0;
  if (p.linear && p.gradients) {
    first = gradient_time(p, plan, false);
    later = gradient_time(p, plan, true);
    if (!p.weight_bound && p.wants_grad_input)
      first += copy_time(2 * weight), later += copy_time(2 * weight);
  } else if (uses_logits) {
    first = later = copy_time((p.direct ? 2 : 4) * block);
  }
  // A chunk starts and ends with half a dozen dispatches.
  const double chunk = 6 * kDispatch + copy_time(16.0 * static_cast<double>(plan.chunk * p.hidden));
  const auto windows = static_cast<double>(plan.windows), chunks = static_cast<double>(plan.chunks);
  return chunks * (chunk + windows * window) + windows * (first + (chunks - 1) * later);
}

}  // namespace logitless::webgpu
