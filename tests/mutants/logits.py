# SPDX-License-Identifier: Apache-2.0
"""The ops on given logits: src/cpu/{cross_entropy,logit_rows,probability_rows,softmax}.cpp."""

from mutants.mutant import mutant

ROWS, LOSS = "src/cpu/logit_rows.cpp", "src/cpu/cross_entropy.cpp"
PROBABILITIES, SOFTMAX = "src/cpu/probability_rows.cpp", "src/cpu/softmax.cpp"

MUTANTS = [
    mutant(
        "logits, last column: not in lse", ROWS,
        "      forward_block(map, z, nullptr, weight, count, wants,",
        "      forward_block(map, z, nullptr, weight,\n"
        "                    count - (column + count == columns_ && columns_ > 1), wants,",
        "logits",
    ),
    mutant(
        "logits, last column: no gradient", ROWS,
        "gradient_block(map, g, from, weight, count, draw);",
        "gradient_block(map, g, from, weight, count - (count > 1), draw);", "logits",
    ),
    mutant(
        "logits, last column: no gradient from exponentials", ROWS,
        "scale_block(map, g, from, maximum, weight, count, draw);",
        "scale_block(map, g, from, maximum, weight, count - (count > 1), draw);", "logits",
    ),
    mutant(
        "logits, kept exponentials: of the first block's maximum", ROWS,
        "kept_ ? scratch[column / row_block] : again.maximum;", "kept_ ? scratch[0] : again.maximum;", "logits",
    ),
    mutant(
        "logits, target: the gradient of p alone", ROWS,
        "      if (here) draw[target] = at_target;",
        "      if (here) draw[target] = exponentials ? draw[target] - g.onehot : at_target;", "logits",
    ),
    mutant(
        "logits, last row: left out", LOSS, "last = first_at_or_after(tokens, end);",
        "last = first_at_or_after(tokens, end) - (end == tokens.total && tokens.valid > 1);", "logits",
    ),
    mutant("softmax, last row: left out", SOFTMAX, "for (int64_t first = task * rows.task_rows(); first < end;",
           "for (int64_t first = task * rows.task_rows(); first < end - (end == total && total > 1);", "logits"),
    mutant("logits, ignored: their gradient is not zeroed", LOSS, "        rows.clear(row);\n", "", "logits"),
    mutant(
        "logits, ignored: only the first column is zeroed", ROWS,
        "std::memset(address(output_, row, 0), 0, columns_ * size);",
        "std::memset(address(output_, row, 0), 0, size);", "logits",
    ),
    mutant(
        "logits, 32-bit offset", ROWS,
        "  return v.as<char>() + (row * v.stride[0] + column * v.stride[1]) * size_of(v.dtype);",
        "  return v.as<char>() + static_cast<int32_t>((row * v.stride[0] + column * v.stride[1]) *\n"
        "                                             size_of(v.dtype));",
        "offsets",
    ),
    mutant(
        "C: the stride of an axis of one element reaches the backends", "src/c_api.cpp",
        "  make_free_strides_dense(view);\n", "", "offsets",
    ),
    mutant(
        "logits, 32-bit offset of strided elements", ROWS,
        "    return base + (row != nullptr ? row[r] : r) * row_stride + j * column_stride;",
        "    return base + static_cast<int32_t>((row != nullptr ? row[r] : r) * row_stride) +\n"
        "           j * column_stride;",
        "offsets",
    ),
    mutant(
        "logits, in place: the target's logit is read after it is overwritten", ROWS,
        "      if (here) draw[target] = at_target;",
        "      if (here) draw[target] = exponentials ? at_target : target_gradient(map, g, from[target], 1);",
        "logits",
    ),
    mutant(
        "logits, rounded to bf16", ROWS,
        "      BlockState state;\n",
        "      BlockState state;\n      uint16_t narrow[4096];\n"
        "      float rounded[4096];\n"
        "      store_from_f32(z, count, DType::bf16, narrow);\n"
        "      load_as_f32(narrow, DType::bf16, count, rounded);\n      z = rounded;\n",
        "logits",
    ),
    mutant("logits, given row_reference: made again from the logits", LOSS, "return !call.state_given();", "return true;",
           "logits shards"),
    mutant(
        "logits, class weights: of the shard's first columns", LOSS,
        "return weight.as<const float>() + start * weight.stride[0];", "return weight.as<const float>();", "shards",
    ),
    mutant(
        "logits, smoothing without class weights", LOSS,
        "  if (!layout.uses_weight) return nullptr;\n", "  if (columns > 0) return nullptr;\n", "logits",
    ),
    mutant(
        "logits, common factor: not in the smoothing term", "src/row/gradient.h", "  g.smoothing *= factor;\n", "", "logits",
    ),
    mutant(
        "logits, workspace: a lane is short", ROWS, "padded(group_ * pitch_ * sizeof(float));",
        "padded(group_ * pitch_ * sizeof(float)) - 64;", "logits workspace",
    ),
    mutant(
        "logits, workspace: more than is touched", LOSS,
        "  l.lanes = l.class_weight + (l.copies_weight ? padded(columns * sizeof(float)) : 0);",
        "  l.lanes = l.class_weight + padded(columns * sizeof(float));", "workspace",
    ),
    mutant(
        "probabilities: no floor in the loss", PROBABILITIES,
        "std::log(element(view.probabilities, row, j) + view.floor);",
        "std::log(element(view.probabilities, row, j) + 1e-38);", "logits",
    ),
    mutant(
        "probabilities: no floor in the gradient", PROBABILITIES,
        "(element(view.probabilities, row, j) + view.floor));",
        "(element(view.probabilities, row, j) + 1e-38));", "logits",
    ),
    mutant(
        "probabilities: smoothing without class weights", PROBABILITIES,
        "smoothing * (class_weight != nullptr ? class_weight[j] : 1.0);", "smoothing;",
        "logits logit-ops",
    ),
    mutant(
        "probabilities: ignored rows are not zeroed", LOSS,
        "if (!counts && gradient) rows.clear(row);", "", "logits",
    ),
]  # fmt: skip
