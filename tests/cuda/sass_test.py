#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of a CUDA source for Hopper: no register spills but ALLOWED, no warning
of ptxas (C75xx: products that wait for each other), tensor core instructions where they are meant.
    sass_test.py [OBJECT]
OBJECT is of a build with LOGITLESS_CUDA_LISTING: its machine code is not compressed, and OBJECT.log
holds what ptxas said. Without one: one line and exit code 77."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

from cubin import ELF, Broken, functions, images

SKIPPED = 77
# Kernels whose products use wgmma, by their mangled names.
MULTIPLIES = re.compile(r"sm90.*(forward|product|both|few_tokens)_kernel")
# Bytes of register spills that are accepted, by kernel.
ALLOWED = {
    r"gather_cu_.*6gatherI": 4,  # one register, once per row
    # With E and squares or ranks: two registers per half of a row. With a softcap and temperatures
    # too it spills more; recomputing the logits would take a third more time.
    r"option_forward_kernelI13__nv_bfloat16LNS1_4ModeE1ELNS1_3SetE6E": 8,
    r"option_forward_kernelI13__nv_bfloat16LNS1_4ModeE1ELNS1_3SetE7E": 156,
    # With codes of f16 and sums: one more register per half of a row.
    r"option_forward_kernelI6__halfLNS1_4ModeE1ELNS1_3SetE4E": 8,
    r"option_forward_kernelI6__halfLNS1_4ModeE1ELNS1_3SetE6E": 8,
    # The factors of two rows' slopes.
    r"option_forward_kernel.*LNS1_4ModeE3ELNS1_3SetE7E": 8,
}
HGMMA = 0x9F0  # the low 12 bits of the 128-bit instruction
ARCHITECTURE = "sm_90a"


def products(code: bytes) -> int:
    return sum((low & 0xFFF) == HGMMA for low, _ in struct.iter_unpack("<QQ", code))


def listing(log: str) -> str:
    """The part of the log that is about ARCHITECTURE."""
    parts = re.split(r"(?m)^(?=.*Compiling entry function)", log)
    ours = [part for part in parts[1:] if f"for '{ARCHITECTURE}'" in part.splitlines()[0]]
    # Keeps warnings that precede the first kernel's name.
    return "".join([parts[0], *ours])


def spills(log: str) -> dict[str, int]:
    """Bytes stored, by kernel, from `ptxas -v`."""
    found, kernel = {}, ""
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = m.group(1)
        elif m := re.search(r"(\d+) bytes spill stores", line):
            found[kernel] = max(found.get(kernel, 0), int(m.group(1)))
    return found


def faults(log: str, object_file: bytes) -> list[str]:
    wrong = [line for line in log.splitlines() if re.search(r"\bC75\d\d\b|warning", line)]
    code: dict[str, bytes] = {}
    for image in images(object_file):
        if image.kind == ELF and image.architecture == ARCHITECTURE:
            code |= functions(image.data)
    if not code:
        raise Broken(f"no machine code for {ARCHITECTURE} in the object")
    spilled = spills(listing(log))
    if set(code) - set(spilled):
        raise Broken(f"ptxas says nothing of {sorted(set(code) - set(spilled))}")
    for name in sorted(code):
        allowed = max((n for pattern, n in ALLOWED.items() if re.search(pattern, name)), default=0)
        count = products(code[name])
        print(f"{name}: {spilled[name]} bytes spilled (allowed: {allowed}), {count} products")
        if spilled[name] > allowed:
            wrong.append(f"{name}: {spilled[name]} bytes are spilled; allowed: {allowed}")
        if MULTIPLIES.search(name) and count == 0:
            wrong.append(f"{name}: not one wgmma")
    return wrong


def main() -> int:
    if len(sys.argv) == 1:
        print("skipped: this build has no CUDA compiler, and so no machine code for Hopper")
        return SKIPPED
    target = Path(sys.argv[1])
    log = target.with_name(target.name + ".log").read_text(errors="replace")
    wrong = faults(log, target.read_bytes())
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
