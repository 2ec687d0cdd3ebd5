#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/compare-kernels finds no difference between an object and itself or a copy with other
names. It names other code, registers, constants, parameters or relocations of a copy.
    kernels_test.py OBJECT, of a build with LOGITLESS_CUDA_LISTING that has Hopper's kernels."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))

from cubin import ELF, Image, Section, images, sections

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/compare-kernels"
ARCHITECTURE = "sm_90a"
KERNEL = "copy_kernel"
OTHER = "names_this_file"


def said(a: Path, b: Path) -> tuple[int, str]:
    ran = subprocess.run([SCRIPT, a, b], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


class Patched:
    """The object's bytes, with writes into the image for ARCHITECTURE."""

    def __init__(self, file: bytes) -> None:
        self.bytes = bytearray(file)
        self.image: Image = next(
            i for i in images(file) if i.kind == ELF and i.architecture == ARCHITECTURE
        )
        self.sections = sections(self.image.data)

    def section(self, prefix: str, kernel: str = KERNEL) -> Section:
        return next(s for s in self.sections if s.name.startswith(prefix) and kernel in s.name)

    def write(self, offset: int, form: str, value: int) -> None:
        struct.pack_into(form, self.bytes, self.image.offset + offset, value)

    def change_code(self) -> None:
        code = self.section(".text.")
        self.write(code.offset + 17, "<B", code.data[17] ^ 1)

    def change_registers(self) -> None:
        info = next(s for s in self.sections if s.name == ".nv.info")
        place = info.data.index(bytes((4, 0x2F, 8, 0)))
        self.write(info.offset + place + 8, "<I", 77)

    def change_constants(self) -> None:
        constants = self.section(".nv.constant0.")
        self.write(constants.offset + 3, "<B", constants.data[3] ^ 1)

    def change_parameters(self) -> None:
        info = self.section(".nv.info.")
        place = info.data.index(bytes((3, 0x19)))
        self.write(info.offset + place + 2, "<H", 1000)

    def relocate(self) -> None:
        """KERNEL's one relocation becomes the first of .rela.debug_frame, which has an address."""
        table = self.section(".rela.text.")
        self.write(table.header + 24, "<Q", self.section(".rela.debug_frame", "").offset)
        self.write(table.header + 32, "<Q", 24)

    def relocate_elsewhere(self) -> None:
        self.relocate()
        table = self.section(".rela.debug_frame", "")
        _, first, _, _, second, _ = struct.unpack_from("<QQqQQq", table.data)
        self.write(table.offset + 8, "<Q", second | (first & 0xFFFFFFFF))

    def rename(self) -> None:
        self.bytes = self.bytes.replace(KERNEL.encode(), KERNEL.upper().encode())

    def move(self) -> None:
        """As if compiled from another source file, whose name is part of mangled names."""
        self.bytes = self.bytes.replace(b"_13_copy_panel_cu_", b"_13_more_panel_cu_")

    def compress(self) -> None:
        self.write(0, "<I", 0xFD2FB528)


def main() -> int:
    file = Path(sys.argv[1]).read_bytes()
    failures = 0
    cases: list[tuple[Callable[[Patched], None], Callable[[Patched], None], int, tuple[str, ...]]]
    none: Callable[[Patched], None] = lambda _: None  # noqa: E731
    cases = [
        (none, none, 0, ("the same", f"2 of {ARCHITECTURE}")),
        (none, Patched.change_code, 1, ("differs", KERNEL, ARCHITECTURE, "code")),
        (none, Patched.change_registers, 1, ("differs", ARCHITECTURE, "registers", "77")),
        (none, Patched.change_constants, 1, ("differs", KERNEL, "constant0")),
        (none, Patched.change_parameters, 1, ("differs", KERNEL, "parameter bytes", "-> 1000")),
        (none, Patched.relocate, 1, ("differs", KERNEL, "relocation of .text")),
        (Patched.relocate, Patched.relocate, 0, ("the same",)),
        (Patched.relocate, Patched.relocate_elsewhere, 1, ("differs", KERNEL, OTHER, "itself")),
        (none, Patched.rename, 0, ("renamed", KERNEL.upper(), "the same")),
        (none, Patched.move, 0, ("the same",)),
        (none, Patched.compress, 2, ("LOGITLESS_CUDA_LISTING=ON",)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, (before, after, code, words) in enumerate(cases):
            paths: list[Path] = []
            for change in (before, after):
                patched = Patched(file)
                change(patched)
                paths.append(Path(folder, f"{number}.{len(paths)}"))
                paths[-1].write_bytes(patched.bytes)
            got, text = said(*paths)
            differing = text.count("differs: ")
            if got != code or differing != (code == 1) or not all(word in text for word in words):
                failures += 1
                print(f"FAILED: case {number}: {got}, not {code}; {words} in:\n{text}")
    print(f"{len(cases)} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
