#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of a CUDA source for Hopper: no registers spilled to memory, no warning of
ptxas (C75xx: products that wait for each other), and tensor core instructions where they are meant.
    sass_test.py SOURCE -- COMPILER [OPTION...]
Without a compiler: one line and exit code 77."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
# Of a kernel's mangled name: whose products are wgmma's.
MULTIPLIES = re.compile(r"sm90.*(forward|product)_kernel")
# Bytes of spilled stores that are known and stay for now: by name, why.
ALLOWED = {
    r"gather_cu_.*6gatherI": 4,  # one register, once a row
}
HGMMA = 0x9F0  # the low 12 bits of the 128-bit instruction


class Broken(Exception):
    """No verdict."""


def functions(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each kernel: sections .text.NAME of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, offset, length in headers:
        start = strings + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            found[text.removeprefix(".text.")] = cubin[offset : offset + length]
    if not found:
        raise Broken("no kernel in what was compiled")
    return found


def products(code: bytes) -> int:
    return sum((low & 0xFFF) == HGMMA for low, _ in struct.iter_unpack("<QQ", code))


def spills(log: str) -> dict[str, int]:
    """Bytes stored, by kernel, from `ptxas -v`."""
    found, kernel = {}, ""
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = m.group(1)
        elif m := re.search(r"(\d+) bytes spill stores", line):
            found[kernel] = max(found.get(kernel, 0), int(m.group(1)))
    return found


def faults(log: str, cubin: bytes) -> list[str]:
    wrong = [line for line in log.splitlines() if re.search(r"\bC75\d\d\b|warning", line)]
    code, spilled = functions(cubin), spills(log)
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
    split = sys.argv.index("--")
    source, command = Path(sys.argv[split - 1]), sys.argv[split + 1 :]
    if not command:
        print("skipped: this build has no CUDA compiler, and so no machine code for Hopper")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command += ["-arch=sm_90a", "-cubin", "-Xptxas=-v", "-o", str(cubin), str(source)]
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        if done.returncode != 0:
            raise Broken(f"{' '.join(command)}\n{done.stdout[-4000:]}")
        wrong = faults(done.stdout, cubin.read_bytes())
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
