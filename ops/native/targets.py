"""Kinds of CPU that wheels bring built kernels for, and which of them this machine is.

Linux says in /proc/cpuinfo what a CPU has and the system lets a process use, so no compiler is
asked. AMX is not looked for: kernels ask the system for it, and run without where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))
_V4 = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of CPU.

    Attributes:
        march: its instructions, as a compiler's -march takes them, with options after it.
        needs: what a CPU must have for it, by the names of /proc/cpuinfo.
    """

    march: str
    needs: frozenset[str]


# The first that a machine has is the one it takes.
TARGETS = (
    Target(
        march="x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
        needs=_V3 | _V4 | {"avx512_bf16"},
    ),
    Target(march="x86-64-v4", needs=_V3 | _V4),
    Target(march="x86-64-v3", needs=_V3),
)


@cache
def cpu_flags() -> frozenset[str]:
    """Read what this machine's CPU has; nothing where no /proc/cpuinfo tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return frozenset(
        next((x.partition(":")[2] for x in lines if x.startswith("flags")), "").split()
    )


def targets_here(march: str | None) -> list[Target]:
    """List the targets that this machine can run, the best first; of ``march`` alone if given."""
    return [
        target
        for target in TARGETS
        if target.needs <= cpu_flags() and march in (None, "", target.march)
    ]


def lacking() -> frozenset[str]:
    """List what this CPU lacks for the target that asks for least."""
    return TARGETS[-1].needs - cpu_flags()
