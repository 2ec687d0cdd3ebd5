# SPDX-License-Identifier: Apache-2.0
"""The linear ops and kept state: src/cpu/{linear_run,linear_products,plan}.*, the row kernel of kept exponentials."""

from mutants.mutant import mutant

RUN, PLAN = "src/cpu/linear_run.cpp", "src/cpu/plan.cpp"
HEADER, ROW = "src/cpu/plan.h", "src/cpu/row-inl.h"
PRODUCTS, PASSES = "src/cpu/linear_products.cpp", "src/cpu/linear_products.h"

ROUND_ROW = (
    "uint16_t narrow[vocab_tile];\n"
    "      store_from_f32(row, width, DType::bf16, narrow);\n"
    "      load_as_f32(narrow, DType::bf16, width, row);\n"
)

MUTANTS = [
    mutant(
        "linear, last column: not in lse", RUN,
        "forward_block(map_of(n), row, bias, class_weight, width,",
        "forward_block(map_of(n), row, bias, class_weight,\n"
        "                  width - (tile + 1 == plan_.vocab_tiles && width > 1),",
        "linear",
    ),
    mutant(
        "linear, last column: no gradient", RUN, "gradient_block(map, g, z, class_weight, width, row);",
        "gradient_block(map, g, z, class_weight, width, row);\n"
        "      if (tile + 1 == plan_.vocab_tiles && width > 1) row[width - 1] = 0;",
        "linear",
    ),
    mutant("linear, last row: no gradient", PASSES, "      if (n0 + r < count_) {", "      if (n0 + r < count_ - (count_ > 1)) {", "linear"),
    mutant(
        "linear, last row: not in the last chunk", RUN,
        "const int64_t count = std::min(plan.token_chunk, tokens.valid - first);",
        "int64_t count = std::min(plan.token_chunk, tokens.valid - first);\n"
        "    if (count > 1 && first + count == tokens.valid) --count;",
        "linear",
    ),
    mutant(
        "linear, last k: not in the logits", PRODUCTS, "std::min(plan_.depth_block, hidden - k),",
        "std::min(plan_.depth_block,\n"
        "                                   hidden - k - (hidden > 1 && k + plan_.depth_block >= hidden)),",
        "linear",
    ),
    mutant(
        "linear, last k: not in grad_input", PRODUCTS,
        "                    .k = engine.padded_k(width),\n                    .c = slot + column,",
        "                    .k = engine.padded_k(width) - engine.k_multiple,\n                    .c = slot + column,",
        "linear",
    ),
    mutant(
        "linear, last k: not in grad_weight", PRODUCTS,
        "                    .k = padded_count_,\n", "                    .k = padded_count_ - engine.k_multiple,\n",
        "linear",
    ),
    mutant(
        "linear, 32-bit offset of output rows", PRODUCTS,
        "char* row = to.as<char>() + (row0 + r) * to.stride[0] * size;",
        "char* row = to.as<char>() + static_cast<int32_t>((row0 + r) * to.stride[0] * size);", "offsets",
    ),
    mutant(
        "linear, logits rounded to bf16", RUN, "    float* row = logits + n * vocab_tile;\n    forward_block(",
        "    float* row = logits + n * vocab_tile;\n    {\n      " + ROUND_ROW + "    }\n    forward_block(", "linear",
    ),
    mutant(
        "linear, bf16 inputs: logits rounded to bf16", RUN,
        "    float* row = logits + n * vocab_tile;\n    forward_block(",
        "    float* row = logits + n * vocab_tile;\n    if (shape_.dtype == DType::bf16) {\n      "
        + ROUND_ROW + "    }\n    forward_block(",
        "linear-bf16",
    ),
    mutant(
        "linear, smoothing without class weights in the loss", RUN,
        "  const float* class_weight = call_.vocab_weight ? lane.class_weight : nullptr;\n  BlockState unused;",
        "  const float* class_weight = nullptr;\n  BlockState unused;", "linear",
    ),
    mutant(
        "linear, smoothing without class weights in the gradient", RUN,
        "  const float* class_weight = call_.vocab_weight ? lane.class_weight : nullptr;\n  const bool rounded",
        "  const float* class_weight = nullptr;\n  const bool rounded", "linear",
    ),
    mutant(
        "linear, class weights: of the shard's first columns", RUN,
        "load_vector(call_.vocab_weight, call_.vocab_start() + first, width, lane.class_weight);",
        "load_vector(call_.vocab_weight, first, width, lane.class_weight);", "shards",
    ),
    mutant(
        "linear, bias: of the first tile everywhere", RUN, "load_vector(call_.bias, first, width, lane.bias);",
        "load_vector(call_.bias, 0, width, lane.bias);", "linear",
    ),
    mutant(
        "linear, ignored: their grad_input is not zeroed", PRODUCTS,
        "store_rows(nullptr, 0, 0, n, 1, 0, hidden, call_.grad_input);", "", "linear",
    ),
    mutant(
        "linear, ignored: compaction of the input alone", PRODUCTS,
        "store_rows(sum, 0, tokens_->gradient_scale, tokens_->row[first_ + n], 1, 0, hidden,",
        "store_rows(sum, 0, tokens_->gradient_scale, first_ + n, 1, 0, hidden,", "linear",
    ),
    mutant(
        "linear, ignored: their input is read", PRODUCTS,
        "source_of(input, tokens_->row + first_);", "source_of(input, nullptr);", "linear",
    ),
    mutant(
        "linear, NaN: rows that pad a chunk are not zero", PASSES,
        "      } else {\n        std::fill(row, row + vocab_tile, 0.0f);\n      }", "      }", "determinism",
    ),
    mutant(
        "linear, NaN: columns that pad a tile are not zero", PASSES,
        "        std::fill(row + width, row + vocab_tile, 0.0f);\n", "",
        "determinism-bf16",
    ),
    mutant(
        "linear, accumulate: the first chunk overwrites", PRODUCTS,
        "const bool overwrite = first_chunk && !call_.accumulate;", "const bool overwrite = first_chunk;", "linear",
    ),
    mutant(
        "linear, accumulate: every chunk overwrites", PRODUCTS,
        "const bool overwrite = first_chunk && !call_.accumulate;", "const bool overwrite = !call_.accumulate;",
        "linear",
    ),
    mutant(
        "linear, accumulate: a summed grad_weight overwrites", PRODUCTS,
        "                 hidden, call_.grad_weight, call_.accumulate);", "                 hidden, call_.grad_weight, false);",
        "linear",
    ),
    mutant(
        "linear, accumulate: grad_bias is overwritten", PRODUCTS,
        "add_scaled(sum, 1, tokens.gradient_scale, vocab, 1, false, column.as<float>(),",
        "add_scaled(sum, 1, tokens.gradient_scale, vocab, 1, true, column.as<float>(),", "linear",
    ),
    mutant(
        "linear, accumulate: without a token it writes zeros", PRODUCTS,
        "(plan_.weight_sum || !any_chunk) && !(call_.accumulate && !any_chunk)) {",
        "(plan_.weight_sum || !any_chunk)) {", "edges",
    ),
    mutant(
        "linear, chunks: the last is left out", RUN, "first < tokens.valid; first += plan.token_chunk) {",
        "first == 0 || first + plan.token_chunk < tokens.valid;\n       first += plan.token_chunk) {", "linear",
    ),
    mutant(
        "linear, chunks: one token too far apart", RUN,
        "first < tokens.valid; first += plan.token_chunk) {", "first < tokens.valid; first += plan.token_chunk + 1) {",
        "linear",
    ),
    mutant(
        "linear, slots: the last is left out", PRODUCTS, "for (int64_t slot = 1; slot < plan_.slots; ++slot) {",
        "for (int64_t slot = 1; slot + 1 < plan_.slots; ++slot) {", "linear",
    ),
    mutant(
        "linear, slots: a tile between two is left out", PASSES, "end = (slot + 1) * plan_.vocab_tiles / plan_.slots;",
        "end = (slot + 1) * plan_.vocab_tiles / plan_.slots - (slot == 0 && plan_.slots > 1);", "linear",
    ),
    mutant(
        "linear, threads: the slots follow them", PLAN, "    set_lanes(useful_lanes(shape, p, room), &p);",
        "    set_lanes(useful_lanes(shape, p, room), &p);\n    p.slots = std::min(p.slots, p.lanes);",
        "determinism",
    ),
    mutant(
        "linear, threads: the chunk follows them", PLAN, "    set_lanes(useful_lanes(shape, p, room), &p);",
        "    set_lanes(useful_lanes(shape, p, room), &p);\n    if (threads == 64 && p.chunks == 1) p.token_chunk = 8;",
        "determinism",
    ),
    mutant(
        "linear, plan: a larger chunk for one thread's scratch", PLAN,
        "{{8, 8, 1}, {8, 4, 1.02}, {4, 4, 1.19}, {2, 2, 1.68}, {1, 1, 2.83}};",
        "{{8, 8, 1}, {8, 4, 1.02}, {4, 4, 1.19}, {2, 2, 1.68}, {1, 1, 1}};", "plan",
    ),
    mutant(
        "linear, plan: no step with fewer lanes", PLAN, "if (p.bytes > bytes) {\n    const int64_t least_chunk",
        "if (p.bytes > bytes) {\n    const uint64_t whole = bytes;\n    bytes = bytes < (4 << 20) ? 0 : whole;\n"
        "    const int64_t least_chunk", "plan",
    ),
    mutant(
        "linear, plan: the promise holds for two lanes only", PLAN, "if (p.bytes > default_limit(shape, p)) return;",
        "if (p.lanes_at + 2 * p.lane_bytes > default_limit(shape, p)) return;", "plan",
    ),
    mutant(
        "linear, threads: grad_bias is summed by each part", PASSES,
        "rows_of(tile, lane, part == 0), call_.grad_bias && part == 0);",
        "rows_of(tile, lane, part == 0), bool(call_.grad_bias));", "determinism",
    ),
    mutant(
        "linear, batch: a row's blocks are added in an order of its own", PRODUCTS,
        "    row.add(blocks[block], tile * vocab_tile, wants, rare != nullptr ? &rare[block] : nullptr);",
        "    const int64_t t = (tile + n) % plan_.vocab_tiles;\n"
        "    row.add(blocks[t * plan_.token_chunk + n + 0 * block], t * vocab_tile, wants, rare);\n"
        "    row.sum = static_cast<float>(row.sum);  // sums in double hide the order", "invariance",
    ),
    mutant(
        "linear, common factor: missing in grad_bias", PRODUCTS,
        "    store_rows(sum, 1, tokens.gradient_scale, 0, vocab, 0, 1, column);",
        "    store_rows(sum, 1, 1, 0, vocab, 0, 1, column);", "linear",
    ),
    mutant(
        "linear, given entropy: that of the compacted index", RUN,
        "state.entropy = f32_at(call.entropy, tokens.row[k]);", "state.entropy = f32_at(call.entropy, k);", "linear",
    ),
    mutant(
        "linear, given row state: at the compacted index", RUN,
        "    const int64_t row = tokens.row[i];\n    states[i] =", "    const int64_t row = i;\n    states[i] =", "linear",
    ),
    mutant(
        "linear, workspace: a lane is short", PLAN, "  p.lane_bytes = lane.at;", "  p.lane_bytes = lane.at - 64;",
        "linear workspace",
    ),
    mutant(
        "linear, workspace: more than is touched", PLAN, "  p->bytes = p->lanes_at + lanes * p->lane_bytes;",
        "  p->bytes = p->lanes_at + lanes * p->lane_bytes + 4096;", "workspace",
    ),
    mutant(
        "linear, workspace: the slots lie on the blocks' end", PLAN, "  whole.at_least(forward_end);\n",
        "  whole.at_least(forward_at);\n", "linear workspace",
    ),
    mutant(
        "kept: every chunk begins at the first row", PRODUCTS, "return {data + first_ * stride, stride,", "return {data, stride,", "kept",
    ),
    mutant(
        "kept: the last tile as wide as the others", PRODUCTS,
        "std::min(vocab_tile, round_up(kept_ - first, kept_block)) * size;", "vocab_tile * size;", "kept",
    ),
    mutant(
        "kept: rows that lie too far are not made again", RUN,
        ".overwritten = rounded && !fits ? 1.0f : 0.0f,", ".overwritten = 0 * (rounded && !fits),", "kept",
    ),
    mutant(
        "kept: the workspace has no room for rows to be made again", HEADER,
        "|| (dtype != DType::f32 && !diverges);", ";", "kept plan",
    ),
    mutant("kept: exponentials beyond the range", RUN, "most_below = 60,", "most_below = 600,", "kept"),
    mutant(
        "kept: anchors without the bias", RUN,
        "      if (call_.bias) bias = element_as_f32(call_.bias, columns[r]);\n", "", "kept",
    ),
    mutant(
        "kept: entropy's logarithm without the sum's", ROW, "static_cast<float>(shift) + g.entropy_value);",
        "static_cast<float>(shift + g.log_sum) + g.entropy_value);", "kept",
    ),
    mutant(
        "kept: the state of another Forward is used", RUN,
        "    state.reference = std::numeric_limits<float>::quiet_NaN();\n", "", "kept",
    ),
    mutant("kept: row_log_sum is not compared", RUN, "&& same(row.log_sum, state.log_sum);", "&& true;", "kept"),
    mutant("kept shards: whose state it is is not asked", RUN, "kept_tolerance)", "1e30f)", "kept_shards"),
    mutant("kept shards: the anchor is not taken", RUN, "f32_at(call_.anchor, tokens_->row[token])",
           "0.0f", "kept_shards"),
    mutant(
        "kept: a mismatch sets no fault", RUN,
        "    if (call_.fault) *call_.fault.as<int32_t>() |= 2;\n", "", "kept",
    ),
    mutant(
        "kept, inactive: rows lie one after the other", PASSES,
        "return data + (place != nullptr ? place[n] : n) * stride;",
        "return data + (place != nullptr ? place[0] + n : n) * stride;", "kept",
    ),
    mutant("kept: what is consumed is not said", RUN, "rows[i].layout = 0;", "rows[i].unused = 0;", "kept"),
]  # fmt: skip
