# SPDX-License-Identifier: Apache-2.0
"""Which tokens count, what a mean divides by, the loss of a row and its coefficients: src/row and
src/cpu/tokens.*, shared by the ops on logits and the linear ones."""

from mutants.mutant import mutant

TOKENS, HEADER = "src/cpu/tokens.cpp", "src/cpu/tokens.h"
LOSS, GRADIENT, STATE = "src/row/loss.h", "src/row/gradient.h", "src/row/state.h"
COMBINE = "include/logitless/combine.h"
BOTH = "logits linear"

MUTANTS = [
    mutant(
        "class weights: their sum is V", TOKENS,
        "if (!weight) return static_cast<double>(whole);", "if (whole > 0) return static_cast<double>(whole);",
        BOTH,
    ),
    mutant(
        "class weights: of the columns, not of the target", TOKENS,
        "call.vocab_weight ? f32_at(call.vocab_weight, target) : 1;",
        "call.vocab_weight ? f32_at(call.vocab_weight, target > 0 ? target - 1 : target) : 1;",
        BOTH,
    ),
    mutant(
        "normalizer: N, not the tokens that count", TOKENS,
        "if (!call.vocab_weight) return static_cast<double>(tokens.valid);",
        "if (!call.vocab_weight) return static_cast<double>(tokens.total);",
        BOTH,
    ),
    mutant(
        "normalizer: the number of tokens despite class weights", TOKENS,
        "if (!call.vocab_weight) return static_cast<double>(tokens.valid);",
        "return static_cast<double>(tokens.valid);",
        BOTH,
    ),
    mutant(
        "normalizer: token weights enter it", TOKENS,
        "  if (!call.vocab_weight) return static_cast<double>(tokens.valid);\n"
        "  return pairwise_sum(0, tokens.valid, [&](int64_t k) { return tokens.target_weight[k]; });",
        "  return pairwise_sum(0, tokens.valid, [&](int64_t k) {\n"
        "    return tokens.target_weight[k] * tokens.token_weight[k];\n"
        "  });",
        BOTH,
    ),
    mutant(
        "normalizer: the caller's is not used", TOKENS,
        "if (o.normalizer != 0) return o.normalizer;", "", BOTH,
    ),
    mutant(
        "mean over no token: NaN and zero exchanged", GRADIENT,
        "common = o.empty_mean == EmptyMean::zero ?", "common = o.empty_mean == EmptyMean::nan ?",
        BOTH,
    ),
    mutant(
        "mean over no token: the loss NaN and zero exchanged", TOKENS,
        "    sum = o.empty_mean == EmptyMean::zero ?", "    sum = o.empty_mean == EmptyMean::nan ?", BOTH,
    ),
    mutant(
        "token weight: not in the loss", LOSS,
        "loss *= token_weight;", "if (token_weight == 0) loss = 0;", BOTH,
    ),
    mutant(
        "token weight: not in the z-loss", LOSS,
        "loss += token_weight * k.z_loss", "loss += k.z_loss", BOTH,
    ),
    mutant(
        "token weight: not in the gradient", GRADIENT,
        "const float ga = g * token_weight;", "const float ga = token_weight == 0 ? 0 : g;", BOTH,
    ),
    mutant(
        "NaN x 0: the target's logit at factor 0", LOSS,
        "float loss = onehot == 0 ? 0 * lse : onehot *", "float loss = onehot *", BOTH,
    ),
    mutant(
        "loss: log of a stored p, by way of lse alone", LOSS,
        "onehot * ((s.reference - s.target_logit) + s.log_sum)", "onehot * (lse - s.target_logit)", BOTH,
    ),
    mutant(
        "label smoothing: not in the weight of p", GRADIENT,
        "(1 - k.smoothing) * target_weight + k.smoothing_per_class * k.class_weight_sum;",
        "(1 - k.smoothing) * target_weight + k.smoothing;",
        BOTH,
    ),
    mutant(
        "label smoothing: divided by the shard's V", TOKENS,
        "      loss_constants(o, whole, smooths ?", "      loss_constants(o, vocab, smooths ?",
        "shards",
    ),
    mutant("z-loss: its gradient without the 2", GRADIENT, "2 * k.z_loss * s.lse()", "k.z_loss * s.lse()", BOTH),
    mutant("z-loss: linear in the loss", LOSS, "k.z_loss * lse * lse;", "k.z_loss * lse;", BOTH),
    mutant(
        "grad_target_logit: wrong sign", GRADIENT,
        "target_weight - grad_target_logit,", "target_weight + grad_target_logit,", BOTH,
    ),
    mutant("grad_lse: dropped", GRADIENT, "ga * (w + z_term) + grad_lse,", "ga * (w + z_term),", BOTH),
    mutant(
        "ignored: -100 whatever ignore_index is", TOKENS,
        "if (target == o.ignore_index) continue;", "if (target == -100) continue;", BOTH,
    ),
    mutant(
        "out of range: the nearest target counts", TOKENS,
        "    const int64_t target = int_at(call.target, i);\n",
        "    int64_t target = int_at(call.target, i);\n"
        "    if (o.out_of_range == OutOfRange::ignore && target != o.ignore_index)\n"
        "      target = std::clamp<int64_t>(target, 0, whole - 1);\n",
        BOTH,
    ),
    mutant(
        "ignored: their statistics are not written", TOKENS,
        "write_f32(view, i, counts ? statistic.number(row) : 0);",
        "if (counts) write_f32(view, i, statistic.number(row));", BOTH,
    ),
    mutant(
        "ignored: argmax 0", TOKENS,
        "counts ? statistic.index(row) : -1", "counts ? statistic.index(row) : 0", BOTH,
    ),
    mutant(
        "compaction: statistics at the compacted index", TOKENS,
        "write_f32(view, i, counts ? statistic.number(row) : 0);",
        "write_f32(view, counts ? k - 1 : i, counts ? statistic.number(row) : 0);", BOTH,
    ),
    mutant(
        "compaction: losses at the compacted index", TOKENS,
        "      const bool counts = k < tokens.valid && tokens.row[k] == i;\n      write_f32(loss,",
        "      const bool counts = k < tokens.valid;\n      write_f32(loss,",
        BOTH,
    ),
    mutant(
        "compaction: grad_loss at the compacted index", TOKENS,
        "f32_at(call.grad_loss, tokens->row[k]) * s.inverse)", "f32_at(call.grad_loss, k) * s.inverse)",
        BOTH,
    ),
    mutant(
        "compaction: token weights at the compacted index", TOKENS,
        "call.token_weight ? f32_at(call.token_weight, i) : 1;",
        "call.token_weight ? f32_at(call.token_weight, k) : 1;",
        BOTH,
    ),
    mutant(
        "statistics' gradients: not relative to the common factor", HEADER,
        "const float scale = tokens.inv_gradient_scale;", "const float scale = 1;", BOTH,
    ),
    mutant(
        "shard: a target of another one counts here", TOKENS,
        "const float target_weight = tokens.target[k] < 0 ? 0 : tokens.target_weight[k];",
        "const float target_weight = tokens.target_weight[k];",
        "tokens",
    ),
    mutant(
        "shard: argmax counts from its first column", TOKENS, "  row.argmax += call.vocab_start();\n", "",
        "shards",
    ),
    mutant(
        "shard: the target as in the whole vocabulary", TOKENS,
        "here ? target - start : -1;", "here ? std::min(target, vocab - 1) : -1;", "shards",
    ),
    mutant(
        "shard: combined entropy without the shards' own probabilities", COMBINE,
        "(pa == 0 ? 0 : pa * (a.entropy - ra))", "(pa == 0 ? 0 : pa * a.entropy)", "shards",
    ),
    mutant(
        "shard: combined argmax of the last of equal logits", COMBINE,
        "const bool a_leads = ma >= mb;", "const bool a_leads = ma > mb;", "combine",
    ),
    mutant(
        "shard: combined over one whose logits are all -inf", COMBINE,
        "return m == least ? double(least) :", "return m == 1e30f ? double(least) :", "shards",
    ),
    mutant(
        "shard: combined loss without z-loss", COMBINE, "if (o.z_loss > 0) loss +=", "if (o.z_loss > 1e30f) loss +=", "shards",
    ),
    mutant(
        "sums: of the loss in f32, one by one", TOKENS,
        "double sum = pairwise_sum(0, tokens.valid, loss_of);",
        "float naive = 0;\n  for (int64_t k = 0; k < tokens.valid; ++k) naive += loss_of(k);\n"
        "  double sum = naive;",
        "tokens",
    ),
    mutant(
        "mass_above: rounded above 1", "src/row/statistics.h", "s.mass_above > 1 ? 1 : s.mass_above",
        "s.mass_above", "tokens",
    ),
    mutant(
        "logprob: rounded above 0", STATE, "return x > 0 ? 0 : x;", "return x;", "tokens",
    ),
    mutant(
        "logprob: a NaN becomes 0", STATE, "return x > 0 ? 0 : x;", "return x < 0 ? x : 0;", "tokens",
    ),
    mutant(
        "temperatures: at the compacted index", HEADER,
        "map_of(map, tokens.temperature, tokens.row[k])", "map_of(map, tokens.temperature, k)", BOTH,
    ),
    mutant(
        "temperatures: a bad one is used as it is", TOKENS,
        "if (given.is_bad && !may_be_number(map, temperature)) {",
        "if (given.is_bad && row < 0) {", "tokens",
    ),
    mutant(
        "temperatures: the common factor as for none", TOKENS, "  o.temperature = temperature;\n", "", "tokens",
    ),
    mutant(
        "inactive: 0 times NaN is 0", TOKENS, "if (!zero || grad_loss * token_weight != 0) return true;",
        "if (!zero) return true;", "tokens",
    ),
    mutant(
        "inactive: not in the normalizer", TOKENS,
        "  tokens->normalizer = normalizer_of(call, *tokens);\n",
        "  if (!call.forward) leave_out_inactive(call, tokens);\n"
        "  tokens->normalizer = normalizer_of(call, *tokens);\n", BOTH,
    ),
    mutant(
        "workspace: the tokens' part is short", TOKENS, "indices + 3 * padded(tokens * sizeof(float));",
        "indices + 2 * padded(tokens * sizeof(float));", BOTH,
    ),
]  # fmt: skip
