# SPDX-License-Identifier: Apache-2.0
"""What the machine code of GPU kernels takes: local memory, from the object files alone, and instructions, from a
disassembly."""
import re
import struct

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M)
TARGET = re.compile(r"(?:^|[\s,`(])0x([0-9a-f]+)\)?$")
ARCHITECTURE = re.compile(r"^\s*code for sm_(\d+)$", re.M)
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.M)


def parts(heading, text):
    """(name, text) of what each heading begins, up to the next one."""
    cut = heading.split(text)[1:]
    return list(zip(cut[::2], cut[1::2]))


class Instruction:
    def __init__(self, address, guard, name, operands):
        self.address, self.guard, self.name, self.operands = address, guard, name, operands
        target = TARGET.search(operands)
        self.target = int(target[1], 16) if name.startswith("BRA") and target else None

    def follows(self):
        """Can the instruction behind this one be next?"""
        ends = self.name.startswith(("BRA", "EXIT", "RET", "BRX", "JMP"))
        return not ends or self.guard is not None or "P" in self.operands.split(",")[0]


class Function:
    """The instructions of one function for one architecture, without what fills up its end."""

    def __init__(self, text):
        self.all = [Instruction(int(address, 16), guard or None, name, operands)
                    for address, guard, name, operands in INSTRUCTION.findall(text) if name != "NOP"]
        self.at = {one.address: i for i, one in enumerate(self.all)}

    def next_of(self, i):
        one = self.all[i]
        found = [self.at[one.target]] if one.target in self.at else []
        return found + [i + 1] * (one.follows() and i + 1 < len(self.all))

    def loops(self):
        """(first, last) of the instructions of each loop, by their number: a branch back to an earlier one. The branch
        to itself that ends every function is none."""
        return [(self.at[one.target], i) for i, one in enumerate(self.all)
                if one.target in self.at and self.at[one.target] < i]

    def longest(self, first=0, last=None):
        """The most instructions between two of them, if no branch leads back. Called subroutines count as one."""
        last = len(self.all) - 1 if last is None else last
        length = [0] * (last + 2)
        for i in range(last, first - 1, -1):
            length[i] = 1 + max((length[n] for n in self.next_of(i) if i < n <= last), default=0)
        return length[first]

    def works_in_loops(self):
        """Does a loop read or write global memory?"""
        return any(one.name.startswith(("LDG", "STG")) for first, last in self.loops() for one in self.all[first:last])

    def loop_with(self, name, least):
        """The longest path through the shortest loop that has so many instructions of this name; None if none has."""
        return min((self.longest(*loop) for loop in self.loops()
                    if sum(one.name == name for one in self.all[loop[0]:loop[1] + 1]) >= least), default=None)


def functions(disassembly):
    """{(architecture, name): Function} of cuobjdump's or nvdisasm's text."""
    return {(int(architecture), name): Function(text)
            for architecture, code in parts(ARCHITECTURE, disassembly) for name, text in parts(FUNCTION, code)}


# Returns the stack frames: the local memory of a function, from the section .nv.info of its code. Spilled registers are
# included. binutils' files for CUDA describe the attributes; see EIATTR_FRAME_SIZE.
FRAME_SIZE, SIZED = 0x11, 0x04


def elf_sections(elf):
    """(name, bytes, number of the linked section) of every section of a 64-bit ELF file."""
    at, size, count, names = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<IIQQQQII", elf, at + size * i) for i in range(count)]
    begin = headers[names][4]
    for name, _, _, _, offset, length, link, _ in headers:
        end = elf.index(b"\0", begin + name)
        yield elf[begin + name:end].decode(), elf[offset:offset + length], link


def frames(elf):
    """{function: bytes of local memory} of a cubin."""
    sections = list(elf_sections(elf))
    symbols = next(data for name, data, _ in sections if name == ".symtab")
    strings = next(data for name, data, _ in sections if name == ".strtab")
    info = next(data for name, data, _ in sections if name == ".nv.info")
    found, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == SIZED and attribute == FRAME_SIZE:
            symbol, frame = struct.unpack_from("<II", info, at + 4)
            name, = struct.unpack_from("<I", symbols, 24 * symbol)
            found[strings[name:strings.index(b"\0", name)].decode()] = frame
        at += 4 + (size if form == SIZED else 0)
    return found
