"""Moves of vectors to and from the stack in the hot loops of the C++ kernels, by disassembly.

    python -m benchmarks.spills [--march x86-64-v3 ...] [--only NAME ...] [--all]

A kernel whose sums do not fit into registers moves them between registers and the stack around its
multiply-adds: nothing is wrong but the time. A hot loop is an innermost one with multiply-adds, and
without calls.
By default, loops are shown that store more than MOST vectors for a multiply-add; with ``--all``,
every one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid.ops.native.build import build_for
from torch_hybrid.ops.native.wheel import sources

MARCHES = ("x86-64-v3", "x86-64-v4", "sapphirerapids")
MOST = 0.75  # vectors stored for a multiply-add
FEWEST = 12  # multiply-adds of a loop that is looked at: a tile of AVX2 has no more

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\s+(\S+)\s*(.*)$")
_MULTIPLY_ADD = re.compile(r"vfn?m(?:add|sub)\S*ps|vdpbf16ps|tdp\S+")
_ON_STACK = re.compile(r"(?:0x[0-9a-f]+)?\(%rsp\)|-0x[0-9a-f]+\(%rbp\)")
_VECTOR = re.compile(r"%[xyz]mm")
_SCALAR = re.compile(r"vmov(?:ss|sd|d|q)$|.*(?:ss|sd)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """An innermost loop of a kernel.

    Attributes:
        function: whose it is.
        multiply_adds: how many instructions add products.
        stores: how many instructions write vectors to the stack.
        loads: how many read them there; constants of a loop are loaded from anywhere.
    """

    function: str
    multiply_adds: int
    stores: int
    loads: int

    @property
    def ratio(self) -> float:
        """Vectors that are stored for a multiply-add."""
        return self.stores / self.multiply_adds


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: int
    name: str
    operands: str


def hot_loops(library: Path) -> list[Loop]:
    """The innermost loops with multiply-adds of a built library."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [loop for name, body in _functions(text) for loop in _loops(name, body)]


def objdump_missing() -> bool:
    """Whether there is no program that disassembles."""
    return shutil.which("objdump") is None


def _functions(text: str) -> Iterator[tuple[str, list[_Instruction]]]:
    name, body = "", list[_Instruction]()
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            yield name, body
            name, body = found[1], []
        elif found := _INSTRUCTION.match(line):
            body.append(_Instruction(int(found[1], 16), found[2], found[3]))
    yield name, body


def _loops(function: str, body: Sequence[_Instruction]) -> Iterator[Loop]:
    for begin, end in _innermost(_stretches(body)):
        inside = [each for each in body if begin <= each.address <= end]
        multiply_adds = sum(_MULTIPLY_ADD.match(each.name) is not None for each in inside)
        if multiply_adds >= FEWEST and not any(each.name == "call" for each in inside):
            moves = [each for each in inside if _is_move(each)]
            stores = sum(each.operands.endswith(")") for each in moves)
            yield Loop(
                function=function,
                multiply_adds=multiply_adds,
                stores=stores,
                loads=len(moves) - stores,
            )


def _stretches(body: Sequence[_Instruction]) -> Iterator[tuple[int, int]]:
    """Addresses from the target of a backward jump to the jump."""
    first = body[0].address if body else 0
    for each in body:
        found = re.match(r"([0-9a-f]+) ", each.operands) if each.name.startswith("j") else None
        if found and first <= (target := int(found[1], 16)) < each.address:
            yield target, each.address


def _innermost(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    known = set(stretches)
    for begin, end in known:
        if not any((a, b) != (begin, end) and begin <= a and b <= end for a, b in known):
            yield begin, end


def _is_move(each: _Instruction) -> bool:
    on_stack = _ON_STACK.search(each.operands) and _VECTOR.search(each.operands)
    return bool(on_stack) and not _SCALAR.match(each.name)


def main() -> None:
    """Build the kernels for each target, and print the loops that move too much."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--march", nargs="+", default=MARCHES)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    print("march            kernel                  multiply-adds  stores  loads  a loop of")
    with tempfile.TemporaryDirectory() as folder:
        for source in sources():
            if not any(part in str(source) for part in options.only):
                continue
            for march in options.march:
                library = Path(folder, "kernel.so")
                build_for(march, source, library)
                for loop in sorted(hot_loops(library), key=lambda each: -each.ratio):
                    if options.all or loop.ratio > MOST:
                        counts = f"{loop.multiply_adds:6} {loop.stores:6} {loop.loads:6}"
                        name = f"{source.parent.name}/{source.stem}"
                        print(f"{march:16} {name:30} {counts}  {loop.function[:150]}", flush=True)


if __name__ == "__main__":
    main()
