# SPDX-License-Identifier: Apache-2.0
"""Every rule of the validation with a switch: compiled once, then each rule is off in turn.

Taken from the sources, so that a new rule is a new mutant: the functions of the table kRules, each
`return error(...)` of src/validate*.cpp, each row of the tables of options and of fields, and each
comparison of an option's range."""

from __future__ import annotations

import re
from pathlib import Path

FILES = (
    "validate.cpp", "validate_fields.cpp", "validate_options.cpp", "validate_data.cpp",
    "validate_divergence.cpp",
)  # fmt: skip

SWITCH = """// Written by scripts/mutants.py into a scratch copy: whether the rule of that name is off.
#pragma once
#include <cstdlib>
#include <string>
#include <string_view>
namespace logitless {
inline bool rule_is_off(std::string_view name, std::string_view part = {}) {
  static const char* const off = std::getenv("LOGITLESS_MUTANT");
  return off != nullptr && std::string(name).append(part) == off;
}
}  // namespace logitless
"""

# Rules without which nothing more is accepted: check_dtype_pairs refuses the same tensors with the
# same status, since a dtype that is not floating can match neither f32 nor the input's. If the
# input's own dtype is wrong as well, it is named first.
EQUIVALENT = tuple(
    f"check_dtypes: {field}"
    for field in ("weight", "bias", "teacher_input", "teacher_weight", "teacher_bias")
)
# These fields define N, V and D, so their shapes cannot be wrong alone.
SETS_SIZES = ("input", "logits")


def without_strings(text: str) -> str:
    """The text with blanks in its string literals, at the same length."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"', lambda m: '"' + " " * (len(m[0]) - 2) + '"', text)


def opening(text: str, at: int, pair: str) -> int:
    """Where the bracket opens that is not closed before `at`."""
    depth = 0
    for i in range(at - 1, -1, -1):
        if text[i] == pair[1]:
            depth += 1
        elif text[i] == pair[0]:
            if depth == 0:
                return i
            depth -= 1
    raise ValueError("no opening bracket")


def is_conditional(text: str, at: int) -> bool:
    """Whether the statement at `at` is in an if or for, so that code goes on when it is skipped."""
    before = text[:at].rstrip()
    if before.endswith(")"):
        return True  # the brace belongs to an if (...) return
    head = text[: opening(text, at, "{}")].rstrip()
    if head.endswith("else"):
        return True
    if not head.endswith(")"):
        return False  # the brace belongs to a lambda
    word = re.search(r"(\w+)\s*$", head[: opening(head, len(head) - 1, "()")])
    return word is not None and word[1] in ("if", "for")


def switch_errors(file: str, text: str, names: list[str]) -> str:
    blank = without_strings(text)
    out, last, seen = [], 0, dict[str, int]()
    for found in re.finditer(r"\breturn error\(", blank):
        function = re.findall(r"^Status (\w+)\(", blank[: found.start()], re.MULTILINE)[-1]
        seen[function] = seen.get(function, 0) + 1
        name = f"{file.removesuffix('.cpp')}: {function} {seen[function]}"
        names.append(name)
        out.append(text[last : found.start()])
        if is_conditional(blank, found.start()):
            out.append(f'if (!rule_is_off("{name}")) return error(')
        else:
            out.append(f'if (rule_is_off("{name}")) return {{}};\n  return error(')
        last = found.end()
    return "".join(out) + text[last:]


def replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{old!r} is {text.count(old)} times in the validation; expected once")
    return text.replace(old, new)


def switch_rules(text: str, names: list[str]) -> str:
    table = re.search(r"kRules\[\]\)\(const Call&\) = \{\n(.*?)\};", text, re.DOTALL)
    if table is None:
        raise ValueError("validate.cpp has no table kRules")
    rows = re.findall(r"(\w+),", table[1])
    names += [f"rule: {row}" for row in rows]
    wrapped = "".join(f"    switched<{row}, {i}>,\n" for i, row in enumerate(rows))
    text = text[: table.start(1)] + wrapped + text[table.end(1) :]
    listed = ", ".join(f'"rule: {row}"' for row in rows)
    return replace_once(
        text,
        "// Checked in this order;",
        f"constexpr const char* kRuleNames[] = {{{listed}}};\n"
        "template <Status (*rule)(const Call&), int index>\n"
        "Status switched(const Call& call) {\n"
        "  return rule_is_off(kRuleNames[index]) ? Status() : rule(call);\n}\n"
        "// Checked in this order;",
    )


def switch_options(text: str, names: list[str]) -> str:
    for table, loop in (("kEnums", "EnumRule"), ("kRanges", "RangeRule")):
        rows = re.search(rf"{table}\[\] = \{{\n(.*?)\n\}};", text, re.DOTALL)
        if rows is None:
            raise ValueError(f"validate_options.cpp has no table {table}")
        options = re.findall(r'^    \{"(\w+)"', rows[1], re.MULTILINE)
        names += [f"option: {option}" for option in options]
        head = f"for (const {loop}& rule : {table}) {{\n"
        # The first loop applies the rules of options.
        switch = '    if (rule_is_off("option: ", rule.name)) continue;\n'
        text = text.replace(head, head + switch, 1)
        if switch not in text:
            raise ValueError(f"validate_options.cpp has no loop over {table}")

    def each_comparison(row: re.Match[str]) -> str:
        def switched(comparison: re.Match[str]) -> str:
            name = f"range: {row[1]} {comparison[0]}"
            names.append(name)
            return f'(rule_is_off("{name}") || {comparison[0]})'

        return re.sub(r"x [<>]= \w+|std::isfinite\(x\)", switched, row[0])

    return re.sub(r'\{"(\w+)", &LossOptions::\w+,[^}]*?\{ return [^}]*\}', each_comparison, text)


def switch_fields(text: str, names: list[str]) -> str:
    fields = re.findall(r'^    \{"(\w+)", Shape::\w+', text, re.MULTILINE)
    for check in ("check_ranks", "check_shapes", "check_dtypes"):
        names += [
            f"{check}: {field}"
            for field in fields
            if (check != "check_shapes" or field not in SETS_SIZES)
            and f"{check}: {field}" not in EQUIVALENT
        ]
        start = text.index(f"Status {check}(")
        lambda_head = re.compile(r"const TensorView& \w+\) -> Status \{\n").search(text, start)
        if lambda_head is None:
            raise ValueError(f"{check} has no lambda over the fields")
        skip = f'    if (rule_is_off("{check}: ", field.name)) return {{}};\n'
        text = text[: lambda_head.end()] + skip + text[lambda_head.end() :]
    return text


def rewrite_validation(tree: Path, originals: dict[str, str] | None) -> list[str]:
    """The switches' names; with `originals` the files of `tree` are rewritten and what they held is
    kept there."""
    names: list[str] = []
    for file in FILES:
        path = tree / "src" / file
        before = text = path.read_text()
        text = switch_errors(file, text, names)
        if file == "validate.cpp":
            text = switch_rules(text, names)
        if file == "validate_options.cpp":
            text = switch_options(text, names)
        if file == "validate_fields.cpp":
            text = switch_fields(text, names)
        text = text.replace("#include", '#include "src/rule_switch.h"\n#include', 1)
        if originals is not None:
            originals.setdefault(f"src/{file}", before)
            path.write_text(text)
    if originals is not None:
        (tree / "src/rule_switch.h").write_text(SWITCH)
    if len(set(names)) != len(names):
        raise ValueError("two rules of one name")
    return names
