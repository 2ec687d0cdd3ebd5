// SPDX-License-Identifier: Apache-2.0
// What the planners of every engine share: an engine enumerates plans, these settle what follows
// from one and choose among them.
#pragma once

#include <algorithm>

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// Fills in what follows from the chunk, the stored and the remade columns, but the bytes and the
// time.
void settle(const LinearShape& shape, LinearPlan* plan);
// Logits in f32, so many bytes at a time.
void set_block(const LinearShape& shape, int64_t bytes, LinearPlan* plan);

// Widths in which columns are made again, in the unit of an engine.
inline constexpr int64_t panel_widths[] = {66, 33, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4, 2, 1};

// The plan with the largest share of E that fits into `bytes`: from a little more columns than may
// fit, in whole steps, down. Other arrays may shrink or grow with it, or no longer find a place in
// grad_weight's memory. finish(columns) is the whole plan; one without bytes: none fits.
template <class F>
LinearPlan largest_share(const LinearShape& s, uint64_t bytes, int64_t least, int64_t step,
                         int64_t column_bytes, F&& finish) {
  const LinearPlan smallest = finish(least);
  if (smallest.bytes > bytes) return {};
  const int64_t more = static_cast<int64_t>(
      std::min<uint64_t>((bytes - smallest.bytes) / static_cast<uint64_t>(column_bytes),
                         static_cast<uint64_t>(s.vocab)));
  int64_t columns = std::min(least + (more / step + 2) * step, (s.vocab - 1) / step * step);
  for (int tries = 0; tries < 6 && columns > 0; ++tries) {
    const LinearPlan mixed = finish(columns);
    if (mixed.bytes <= bytes) return mixed;
    const auto over = static_cast<int64_t>(mixed.bytes - bytes);
    columns = mixed.stored_columns - round_up(divide_up(over, column_bytes), step);
  }
  return {};
}

// Picks of each_plan(consider) the one of fewest bytes, the quicker of two alike. The time is set
// of those alone that may be chosen, for it takes longer to say than the rest.
template <class F, class G>
LinearPlan smallest_of(F&& each_plan, G&& set_time) {
  LinearPlan least;
  each_plan([&](LinearPlan p) {
    if (least.bytes > 0 && p.bytes > least.bytes) return;
    set_time(&p);
    if (least.bytes == 0 || p.bytes < least.bytes || p.seconds < least.seconds) least = p;
  });
  return least;
}

// The quickest, the smaller of two alike, of at least `minimum` and at most `bytes`: what would do
// with less than the minimum is not what the minimum was made for. Without bytes: none.
class Fastest {
 public:
  Fastest(uint64_t minimum, uint64_t bytes) : minimum_(minimum), bytes_(bytes) {}
  bool may_be(const LinearPlan& p) const { return p.bytes <= bytes_ && p.bytes >= minimum_; }
  void choose(const LinearPlan& p) {
    const bool better =
        p.seconds < best_.seconds || (p.seconds == best_.seconds && p.bytes < best_.bytes);
    if (best_.bytes == 0 || better) best_ = p;
  }
  const LinearPlan& best() const { return best_; }

 private:
  uint64_t minimum_, bytes_;
  LinearPlan best_;
};

}  // namespace logitless::cuda
