// SPDX-License-Identifier: Apache-2.0
// Reads a token's target, which decides whether the token counts: one word, or two if it is `wide`.

struct Target {
  kind: u32,
  column: u32,  // of the whole vocabulary, or none
}

// Reads the target at word `at`; a column is below `classes`.
fn target_at(at: u32, classes: u32) -> Target {
  if ((p.flags & is_softmax) != 0u) {
    return Target(counts, none);
  }
  let low = targets[at];
  var high = select(0u, none, (low >> 31u) == 1u);
  if (p.wide != 0u) {
    high = targets[at + 1u];
  }
  if (low == p.ignore_low && high == p.ignore_high) {
    return Target(ignored, none);
  }
  if (high == 0u && low < classes) {
    return Target(counts, low);
  }
  return Target(select(outside, ignored, (p.flags & outside_is_ignored) != 0u), none);
}
