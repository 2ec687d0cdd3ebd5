# SPDX-License-Identifier: Apache-2.0
"""Device code inside a host's file (an object, an archive, a shared library), for the tests and the
scripts that look at what the compiler made: fat binaries, the ELF files in them, their sections."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

# Magic number, version and length of the header.
FAT_BINARY = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, ELF = 1, 2  # kinds of a fat binary's entries
NOBITS = 8  # type of a section without bytes in the file


class Broken(Exception):
    """A file cannot be read or has not what is needed, so nothing can be said of its code."""


class Image(NamedTuple):
    """What was compiled for one architecture from one source."""

    kind: int
    architecture: str  # "sm_90a", or "compute_80" for PTX
    offset: int  # where its bytes start in the file
    data: bytes


class Section(NamedTuple):
    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    header: int  # offset of its header in the ELF file
    offset: int
    data: bytes


class Symbol(NamedTuple):
    name: str
    section: int


class Entry(NamedTuple):
    """An image as its fat binary's header has it, whether compressed or not."""

    kind: int
    number: int  # the architecture without its letter
    offset: int
    size: int


def entries(file: bytes) -> Iterator[Entry]:
    """Every entry of every fat binary in the file, in the order of the file."""
    start = -1
    while (start := file.find(FAT_BINARY, start + 1)) != -1:
        (length,) = struct.unpack_from("<Q", file, start + 8)
        place = start + 16
        end = place + length
        while place < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", file, place)
            (number,) = struct.unpack_from("<I", file, place + 28)
            yield Entry(kind, number, place + header, size)
            place += header + size


def images(file: bytes) -> Iterator[Image]:
    """Every image in the file, in the order of the file."""
    for kind, number, offset, size in entries(file):
        data = file[offset : offset + size]
        if kind == ELF and data.startswith(b"\x7fELF"):
            named = re.search(rb"-arch (sm_\w+)", data)
            name = named[1].decode() if named else f"sm_{number}"
        elif kind == PTX and b".version" in data[:64]:
            named = re.search(rb"\.target sm_(\w+)", data)
            name = f"compute_{named[1].decode() if named else number}"
            data = data.rstrip(b"\0")
        else:
            raise Broken(
                "its device code is compressed; configure with -D LOGITLESS_CUDA_LISTING=ON"
            )
        yield Image(kind, name, offset, data)


def text_at(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def sections(elf: bytes) -> list[Section]:
    """The sections of an ELF file of 64 bits, whose index is their place in the list."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    places = [table + i * size for i in range(count)]
    headers = [struct.unpack_from("<IIQQQQII", elf, place) for place in places]
    strings = headers[names][4]
    found = []
    for place, header in zip(places, headers, strict=True):
        name, kind, flags, _, offset, length, link, info = header
        data = b"" if kind == NOBITS else elf[offset : offset + length]
        name = text_at(elf, strings + name)
        found.append(Section(name, kind, flags, length, link, info, place, offset, data))
    return found


def symbols(all_sections: list[Section]) -> list[Symbol]:
    """The symbols, by their index; one without a name has its section's."""
    for table in all_sections:
        if table.name != ".symtab":
            continue
        names = all_sections[table.link].data
        found = []
        for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table.data):
            inside = 0 < section < len(all_sections)
            text = text_at(names, name) or (all_sections[section].name if inside else "")
            found.append(Symbol(text, section))
        return found
    return []


def functions(elf: bytes) -> dict[str, bytes]:
    """The machine code of each kernel, by its mangled name."""
    found = {
        section.name.removeprefix(".text."): section.data
        for section in sections(elf)
        if section.name.startswith(".text.")
    }
    if not found:
        raise Broken("no kernel in what was compiled")
    return found
