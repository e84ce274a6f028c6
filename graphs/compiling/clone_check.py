"""Search of compiled code for copies of state pools.

If the compiler cannot mutate a pool in place, Inductor allocates a buffer of the pool's size. It
fills the buffer, passes it to the op and copies it back. That costs a pass over the whole pool at
every step, and does not show in the results, so the check reads the code itself:

    for every allocation in the code:
        if its number of elements is that of a pool: report it with the first op that receives it
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

_ALLOCATION = re.compile(r"(\w+) = empty_strided\w*\(\((?P<size>[^)]*)\)")
_OP_CALL = re.compile(r"torch\.ops\.(?P<op>\w+\.\w+)(\.\w+)?\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClone:
    """One pool-sized buffer: its size in elements and the op it was made for."""

    buffer: str
    num_elements: int
    op: str

    def __str__(self) -> str:
        return f"{self.buffer} ({self.num_elements} elements) made for {self.op}"


def find_pool_clones(source: str, pool_sizes: Collection[int]) -> list[PoolClone]:
    """Find the pool-sized allocations in Inductor's generated wrapper ``source``.

    Args:
        source: the generated Python code of one compiled graph.
        pool_sizes: the number of elements of each pool.

    Returns:
        One entry for each allocation whose static size equals that of a pool.
    """
    clones = []
    for match in _ALLOCATION.finditer(source):
        sizes = [size.strip() for size in match["size"].split(",") if size.strip()]
        if not all(size.isdecimal() for size in sizes):
            continue  # pools have static shapes: a symbolic buffer is an activation
        num_elements = math.prod(int(size) for size in sizes)
        if num_elements in pool_sizes:
            op = _first_use(source[match.end() :], match[1])
            clones.append(PoolClone(buffer=match[1], num_elements=num_elements, op=op))
    return clones


def _first_use(source: str, buffer: str) -> str:
    for line in source.splitlines():
        if re.search(rf"\b{buffer}\b", line) and (call := _OP_CALL.search(line)):
            return call["op"]
    return "a fused kernel"
