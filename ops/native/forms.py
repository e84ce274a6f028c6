"""In which forms products run on this machine: measured once, and kept beside the built kernels.

CPUs with the same instructions differ in what they like. One hands over four far-apart streams of
memory faster than one, another is faster with one row after the other; and where a library has a
better product of many rows than ours (of bf16 in tiles of AMX, say), it is taken.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.build import BuildError, cache_folder, key_of_source, load_library
from torch_hybrid.ops.native.call import kernel

_SOURCE = Path(__file__).with_name("forms.cpp")
_MULTIPLY = kernel("multiply", _SOURCE, tensors="x W y", integers="M K N in_turn is_bf16")

_DEPTH, _BYTES = 1024, 128 << 20  # of weights that no cache holds
_NUM_ROWS, _WIDTH = 512, 1024  # of x, and of the weight that many rows meet
_TURNS = 7
# Ours is the same for every size of batch, which is worth more than a few percent.
_LIBRARY_GAIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """How products are done here, with the figures that decided.

    Attributes:
        in_turn: for one or two rows of x, rows of a weight are read one after the other, rather
            than as four streams. The result is the same.
        many_by_torch: many rows are multiplied by torch rather than by ``lane_rows.h``.
        streams_rate, in_turn_rate: bytes per second of a weight that one row of x meets.
        ours_rate, torch_rate: FLOPs per second of many rows.
    """

    in_turn: bool
    many_by_torch: bool
    streams_rate: float
    in_turn_rate: float
    ours_rate: float
    torch_rate: float

    def __str__(self) -> str:
        if self == _UNMEASURED:
            return "forms not measured: what measures them cannot be built"
        one, other = self.streams_rate / 1e9, self.in_turn_rate / 1e9
        ours, torchs = self.ours_rate / 1e9, self.torch_rate / 1e9
        return (
            f"one row: {'in turn' if self.in_turn else 'four streams'} "
            f"(four streams {one:.3g} GB/s, in turn {other:.3g})\n"
            f"many rows: {'torch' if self.many_by_torch else 'own'} "
            f"(own {ours:.3g} GFLOP/s, torch {torchs:.3g})"
        )


# Of a process without a compiler, whose kernels came from elsewhere without what measures them.
_UNMEASURED = Forms(
    in_turn=False,
    many_by_torch=False,
    streams_rate=0.0,
    in_turn_rate=0.0,
    ours_rate=0.0,
    torch_rate=0.0,
)


@cache
def forms(dtype: torch.dtype) -> Forms:
    """The forms for weights of a dtype: from the cache, or measured now, in half a second.

    One thread measures, by its own time, so that what else runs on the machine counts little.
    """
    try:  # loaded in any case: an artefact has the libraries that were
        load_library(_SOURCE.parent.name, _SOURCE)
    except BuildError:
        return _UNMEASURED
    file = _file(dtype)
    try:
        return Forms(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there yet, or cut off, or of other fields
        found = _measure(dtype)
    _keep(file, found)
    return found


def figures(dtype: torch.dtype) -> str:
    """What was measured, for a reader."""
    return str(forms(dtype))


def _file(dtype: torch.dtype) -> Path:
    known = (key_of_source("forms", _SOURCE), _cpu(), torch.__version__, str(dtype))
    digest = hashlib.sha256(" ".join(known).encode()).hexdigest()[:20]
    return cache_folder() / f"forms-{digest}.json"


def _cpu() -> str:
    """Which CPU this is: a cache folder may be shared by machines of several kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    kind = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU part")
    found = dict.fromkeys(line for line in lines if line.partition(":")[0].strip() in kind)
    return " ".join(found) or platform.processor()


def _keep(file: Path, found: Forms) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            unit = Path(folder, "forms.json")
            unit.write_text(json.dumps(asdict(found)), encoding="utf-8")
            unit.replace(file)
    except OSError:
        pass  # measured anew by the next process


def _measure(dtype: torch.dtype) -> Forms:
    memory = torch.ones(_BYTES // (_DEPTH * dtype.itemsize), _DEPTH, dtype=dtype)
    row, rows = memory[:1].clone(), memory[:_NUM_ROWS].clone()
    weight, y = memory[:_WIDTH], torch.empty(_NUM_ROWS, _WIDTH)
    y_of_row, y_of_torch = torch.empty(1, len(memory)), rows.new_empty(_NUM_ROWS, _WIDTH)
    streams, in_turn = _fastest(
        lambda: _run(row, memory, y_of_row, in_turn=False),
        lambda: _run(row, memory, y_of_row, in_turn=True),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, torchs = _fastest(
            lambda: _run(rows, weight, y, in_turn=False),
            lambda: torch.mm(rows, weight.T, out=y_of_torch),
        )
    finally:
        torch.set_num_threads(threads)
    flops = 2 * _NUM_ROWS * weight.numel()
    return Forms(
        in_turn=in_turn < streams,
        many_by_torch=_LIBRARY_GAIN * torchs < ours,
        streams_rate=memory.nbytes / streams,
        in_turn_rate=memory.nbytes / in_turn,
        ours_rate=flops / ours,
        torch_rate=flops / torchs,
    )


def _run(x: Tensor, weight: Tensor, y: Tensor, *, in_turn: bool) -> None:
    is_bf16 = x.dtype is torch.bfloat16
    _MULTIPLY(x, weight, y, x.shape[0], x.shape[1], weight.shape[0], in_turn, is_bf16)


def _fastest(*contestants: Callable[[], object]) -> list[float]:
    """Seconds of this thread for the fastest run of each, by turns."""
    best = [float("inf")] * len(contestants)
    for turn in range(_TURNS + 1):
        for i, run in enumerate(contestants):
            start = time.thread_time()
            run()
            if turn:
                best[i] = min(best[i], time.thread_time() - start)
    return best
