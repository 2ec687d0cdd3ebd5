# SPDX-License-Identifier: Apache-2.0
"""What a plan owns, and what a run of it is checked for: src/run.cpp."""

from mutants.mutant import mutant

RUN = "src/run.cpp"

MUTANTS = [
    mutant(
        "plans: an address may be less aligned than at create", RUN,
        "        found >= tensor.alignment) {", "        found >= least) {", "plans",
    ),
    mutant(
        "plans: of an unknown address everything is assumed", RUN,
        "if (tensor.alignment == 0) tensor.alignment = static_cast<uint32_t>(size_of(tensor.dtype));",
        "if (tensor.alignment == 0) tensor.alignment = most_alignment;", "plans",
    ),
    mutant(
        "plans: addresses in the order of the C++ op", RUN,
        "return a->in_c < b->in_c;", "return a->in_call < b->in_call;", "plans",
    ),
    mutant(
        "plans: any number of addresses", RUN,
        "if (addresses.size() != count_) {", "if (addresses.size() > count_) {", "plans",
    ),
    mutant(
        "plans: the executor stays the caller's", RUN,
        "    call_.execution.executor = &executor_;\n", "", "plans",
    ),
    mutant(
        "plans: a larger workspace is used up", RUN,
        "{workspace.data, bytes_, workspace.byte_offset}", "workspace", "plans",
    ),
    mutant(
        "plans: the run's memory is not looked at", RUN,
        "  if (status.ok()) status = validate_data(call, workspace, needed);\n", "", "plans",
    ),
    mutant(
        "plans: a smaller workspace will do", RUN,
        "  if (bytes_ < size.minimum) {", "  if (bytes_ + 1 < size.minimum) {", "plans",
    ),
    mutant(
        "plans: a run's normalizer is not looked at", RUN,
        "    status = check_normalizer(call);\n", "", "plans",
    ),
    mutant(
        "plans: a counted mean takes a normalizer", RUN,
        "    if (call.options.normalizer == 0) {", "    if (call.options.normalizer < 0) {", "plans",
    ),
    mutant(
        "plans: the normalizer of create stays", RUN,
        "    call.options.normalizer = normalizer;\n", "", "plans",
    ),
]  # fmt: skip
