// SPDX-License-Identifier: Apache-2.0
// Finds which tokens count and, in Backward, which of them have a gradient.
//   chunk  one workgroup initializes the rows of a chunk of tokens and lists those that count
//   each   the same, a thread per token, if the block is the caller's matrix; lists every token
//   count  a workgroup sums c_t over those of 1024 tokens that count    -> sums
//   emit   writes a word of every row, or a value computed from it, to a strided output
// Uses common: numbers, token, target, chunk.

@group(0) @binding(2) var<storage, read> vocab_weight: array<f32>;  // [vocab_total]
@group(0) @binding(3) var<storage, read> inputs: array<Given>;      // [tokens]
@group(0) @binding(4) var<storage, read_write> rows: array<State>;  // [tokens]
// counted[0] tokens are listed: counted[4], counted[5], ... in the order given.
@group(0) @binding(5) var<storage, read_write> counted: array<u32>;
@group(0) @binding(6) var<storage, read_write> fault: array<atomic<u32>>;
@group(0) @binding(7) var<storage, read_write> sums: array<f32>;
@group(0) @binding(8) var<storage, read> rows_in: array<u32>;  // [tokens, row_words]
@group(0) @binding(9) var<storage, read_write> result: array<u32>;
@group(0) @binding(10) var<storage, read_write> extras: array<Extra>;  // [tokens]
@group(0) @binding(11) var<storage, read> scalars: Scalars;

fn target_of(i: u32) -> Target {
  return target_at(p.base + i * p.stride, p.vocab_total);
}

// Compares bits, since a device may flush a subnormal number to 0.
fn is_zero(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) == 0u;
}
// Returns whether some upstream gradient of a token is not exactly 0. The loss's is grad_loss times
// the token's weight; 0 times an infinity or a NaN is NaN, not 0.
fn is_active(i: u32) -> bool {
  if ((p.flags & is_backward) == 0u) {
    return true;
  }
  let given = inputs[i];
  let g = select(bitcast<f32>(scalars.upstream), given.grad_loss, (p.flags & has_token_grad) != 0u);
  let a = select(1.0, given.token_weight, (p.flags & has_token_weight) != 0u);
  let is_number = !is_nan(g) && !is_infinite(g) && !is_nan(a) && !is_infinite(a);
  return !(is_number && (is_zero(g) || is_zero(a))) ||
         ((p.flags & has_grad_lse) != 0u && !is_zero(given.grad_lse)) ||
         ((p.flags & has_grad_target) != 0u && !is_zero(given.grad_target_logit)) ||
         ((p.flags & has_grad_entropy) != 0u && !is_zero(given.grad_entropy)) ||
         ((p.flags & has_grad_chosen) != 0u && (rows[i].kind & state_chosen) != 0u);
}
fn active_target_of(i: u32) -> Target {
  let t = target_of(i);
  if (t.kind == counts && !is_active(i)) {
    return Target(ignored, none);
  }
  return t;
}

fn weight_of(t: Target) -> f32 {
  if ((p.flags & has_vocab_weight) == 0u) {
    return 1.0;
  }
  if (t.kind != counts || t.column == none) {
    return 0.0;
  }
  return vocab_weight[t.column];
}

fn begin_row(i: u32, t: Target, place: u32) {
  var s = State();
  s.kind = t.kind;
  s.target_column = none;
  s.argmax = none;
  s.place = none;
  if (t.kind == outside) {
    s.loss = bitcast<f32>(p.nan);
  }
  if (t.kind == counts) {
    // -inf, which stays if the target is another shard's column.
    s.target_logit = bitcast<f32>(p.nan ^ 0x80400000u);
    let column = t.column - p.vocab_start;
    if (t.column >= p.vocab_start && column < p.vocab) {
      s.target_column = column;
    }
    s.class_weight = weight_of(t);
    s.token_weight = 1.0;
    if ((p.flags & has_token_weight) != 0u) {
      s.token_weight = inputs[i].token_weight;
    }
    s.place = place;
  }
  rows[i] = s;
  if ((p.flags & has_extras) != 0u) {
    extras[i] = Extra();
    extras[i].rank = select(none, 0u, t.kind == counts);
  }
}

@compute @workgroup_size(256)
fn each(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i == 0u) {
    counted[0] = p.tokens;
  }
  if (i >= p.tokens) {
    return;
  }
  let t = active_target_of(i);
  begin_row(i, t, i);
  counted[4u + i] = i;
  if (t.kind == outside && (p.flags & has_fault) != 0u) {
    atomicOr(&fault[p.fault], 1u);
  }
}

var<workgroup> scan: array<u32, 256>;
var<workgroup> tree: array<f32, 256>;
var<workgroup> any_outside: atomic<u32>;

@compute @workgroup_size(256)
fn chunk(@builtin(local_invocation_index) thread: u32) {
  // WGSL guarantees zeros at the start, but not every driver implements it.
  if (thread == 0u) {
    atomicStore(&any_outside, 0u);
  }
  workgroupBarrier();
  var before = 0u;
  for (var first = 0u; first < p.tokens; first += 256u) {
    let i = first + thread;
    var t = Target(ignored, none);
    if (i < p.tokens) {
      t = active_target_of(i);
    }
    let own = select(0u, 1u, t.kind == counts);
    scan[thread] = own;
    for (var step = 1u; step < 256u; step *= 2u) {
      workgroupBarrier();
      var left = 0u;
      if (thread >= step) {
        left = scan[thread - step];
      }
      workgroupBarrier();
      scan[thread] += left;
    }
    workgroupBarrier();
    let place = before + scan[thread] - own;
    before += scan[255];
    workgroupBarrier();
    if (i < p.tokens) {
      begin_row(i, t, place);
      if (t.kind == counts) {
        counted[4u + place] = i;
      }
      if (t.kind == outside) {
        atomicStore(&any_outside, 1u);
      }
    }
  }
  workgroupBarrier();
  if (thread == 0u) {
    counted[0] = before;
    if (atomicLoad(&any_outside) != 0u && (p.flags & has_fault) != 0u) {
      atomicOr(&fault[p.fault], 1u);
    }
  }
}

fn count_of(i: u32) -> f32 {
  if (i >= p.tokens) {
    return 0.0;
  }
  let t = target_of(i);
  // A target outside the vocabulary is not ignored: the mean counts it as 1, or as 0 if there are
  // class weights.
  return select(weight_of(t), 0.0, t.kind == ignored);
}

@compute @workgroup_size(256)
fn count(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let number = group.y * 65535u + group.x;
  let i = number * 1024u + thread;
  tree[thread] = (count_of(i) + count_of(i + 256u)) + (count_of(i + 512u) + count_of(i + 768u));
  for (var step = 128u; step > 0u; step /= 2u) {
    workgroupBarrier();
    if (thread < step) {
      tree[thread] += tree[thread + step];
    }
  }
  if (thread == 0u && number * 1024u < p.tokens) {
    sums[p.sums + number] = tree[0];
  }
}

// Indices of words of a State.
const kind_word = 0u;
const target_column_word = 1u;
const m_word = 4u;
const log_sum_word = 5u;
const target_logit_word = 6u;

@compute @workgroup_size(256)
fn emit(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let i = group.x * 256u + thread;
  if (i >= p.tokens) {
    return;
  }
  let row = i * p.row_words;
  let at = p.base + i * p.stride;
  var value = rows_in[row + p.word];
  if (p.kind == 1u || p.kind == 2u) {
    value = rows_in[row + log_sum_word];
    if ((rows_in[row + kind_word] & state_nan) == 0u) {
      let m = bitcast<f32>(rows_in[row + m_word]);
      let log_sum = bitcast<f32>(value);
      let target_logit = bitcast<f32>(rows_in[row + target_logit_word]);
      let logprob = (target_logit - m) - log_sum;
      value = bitcast<u32>(select(m + log_sum, select(logprob, 0.0, logprob > 0.0), p.kind == 2u));
    }
    let kind = rows_in[row + kind_word];
    if (p.kind == 2u && is_counted(kind) && rows_in[row + target_column_word] == none) {
      value = p.nan ^ 0x80400000u;  // -inf: another shard has the target
    }
    if (p.kind == 2u && (kind & 255u) == outside) {
      value = p.nan;
    }
  }
  if (p.kind == 5u) {
    value = select(value ^ 0x80000000u, 0u, value == 0u);
  } else if (p.kind >= 3u && value != none) {
    value += p.vocab_start;
  }
  result[at] = value;
  if (p.kind == 4u) {
    result[at + 1u] = select(0u, none, value == none);
  }
}
