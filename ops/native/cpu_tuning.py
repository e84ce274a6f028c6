"""Choice of the C++ kernels' variants on this machine: measured once, and kept in the cache.

CPUs with one instruction set prefer different access patterns. Some read memory fastest in four or
eight far-apart streams, others one row after the other. Where torch's GEMM of many rows is faster
than ours (BF16 in tiles of AMX, say), it is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.host.memory import weight_memory
from torch_hybrid.ops.native.build import BuildError, cache_folder, key_of_source, load_library
from torch_hybrid.ops.native.call import kernel

_SOURCE = Path(__file__).with_name("cpu_tuning.cpp")
_ADVANCE = kernel("advance", _SOURCE, tensors="state", integers="num_heads streams")

_DEPTH, _BYTES = 1024, 128 << 20  # of weights that no cache holds
_NUM_ROWS, _WIDTH = 512, 1024  # of x, and of the weight that many rows meet
_FEW_ROWS = 8  # of x: of a step of so many sequences
_STATE_STREAMS = (1, 8)
_STATE_BYTES = 64 * 128 * 4  # of a head, as cpu_tuning.cpp has it
_TURNS = 7
_NAMES = {1: "in turn", 4: "four streams", 8: "eight streams"}
# Ours is the same for every size of batch, which is worth more than a few percent.
_LIBRARY_GAIN = 1.1
# Four streams are never far behind. A row after the other, as fast in one measurement by AVX2 on
# Zen 4, took 1.4 times as long in a model's step.
_STREAMS_GAIN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTuning:
    """Choices for the GEMMs and states of this CPU, with the figures that decided.

    Attributes:
        streams: as how many streams a weight is read for one or two rows of x: 4, or 1 (its rows in
            turn) or 8 where that is clearly faster. The result is the same.
        by_hardware: for 5 to 16 rows, the hardware is left to fetch a weight ahead of its use;
            else the kernel does, line by line. The result is the same.
        state_streams: in how many streams a decode step goes through the rows of a state that it
            reads and writes: 1 (its rows in turn) or 8. The result is the same.
        many_by_torch: many rows are multiplied by torch rather than by ``lane_rows.h``.
        in_turn_rate, four_rate, eight_rate: bytes per second of a weight that one row of x meets.
        kernel_rate, hardware_rate: the same of a weight that eight rows of x meet.
        state_rate, state_streams_rate: bytes per second of states, each way, in both forms.
        ours_rate, torch_rate: FLOPs per second of many rows.
    """

    streams: int
    by_hardware: bool
    state_streams: int
    many_by_torch: bool
    in_turn_rate: float
    four_rate: float
    eight_rate: float
    kernel_rate: float
    hardware_rate: float
    state_rate: float
    state_streams_rate: float
    ours_rate: float
    torch_rate: float

    def of_products(self) -> str:
        """Describe the choices for GEMMs, and their figures."""
        if self == _UNMEASURED:
            return _NOT_MEASURED
        in_turn, four, eight = (
            rate / 1e9 for rate in (self.in_turn_rate, self.four_rate, self.eight_rate)
        )
        of_kernel, of_hardware = self.kernel_rate / 1e9, self.hardware_rate / 1e9
        ours, torchs = self.ours_rate / 1e9, self.torch_rate / 1e9
        return (
            f"one row: {_NAMES[self.streams]} "
            f"(in turn {in_turn:.3g} GB/s, four streams {four:.3g}, eight streams {eight:.3g})\n"
            f"eight rows: fetched by the {'hardware' if self.by_hardware else 'kernel'} "
            f"(kernel {of_kernel:.3g} GB/s, hardware {of_hardware:.3g})\n"
            f"many rows: {'torch' if self.many_by_torch else 'own'} "
            f"(own {ours:.3g} GFLOP/s, torch {torchs:.3g})"
        )

    def of_states(self) -> str:
        """Describe the choice for states, and its figures."""
        if self == _UNMEASURED:
            return _NOT_MEASURED
        in_turn, in_streams = self.state_rate / 1e9, self.state_streams_rate / 1e9
        return (
            f"states: {_NAMES[self.state_streams]} "
            f"(in turn {in_turn:.3g} GB/s each way, eight streams {in_streams:.3g})"
        )


_NOT_MEASURED = "forms not measured: what measures them cannot be built"
# Of a process without a compiler, whose kernels came from elsewhere without what measures them.
_UNMEASURED = CpuTuning(
    streams=4,
    by_hardware=False,
    state_streams=1,
    many_by_torch=False,
    in_turn_rate=0.0,
    four_rate=0.0,
    eight_rate=0.0,
    kernel_rate=0.0,
    hardware_rate=0.0,
    state_rate=0.0,
    state_streams_rate=0.0,
    ours_rate=0.0,
    torch_rate=0.0,
)


@cache
def tuning(dtype: torch.dtype) -> CpuTuning:
    """Get the choices for weights of a dtype: from the cache, or measured now, in a second.

    One thread measures, by its own time, so that what else runs on the machine counts little.
    """
    try:  # loaded in any case: an artefact has the libraries that were
        for source in _sources():
            load_library(source.parent.name, source)
    except BuildError:
        return _UNMEASURED
    file = _file(dtype)
    try:
        return CpuTuning(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there yet, or cut off, or of other fields
        found = _measure(dtype)
    _keep(file, found)
    return found


def is_bf16_slow() -> bool:
    """Tell whether torch multiplies BF16 slower than C++ float32: for want of instructions."""
    return tuning(torch.bfloat16).torch_rate < tuning(torch.float32).ours_rate


def figures(dtype: torch.dtype) -> str:
    """Describe what this machine measured of GEMMs."""
    return tuning(dtype).of_products()


def state_figures(dtype: torch.dtype) -> str:
    """Describe what this machine measured of states."""
    return tuning(dtype).of_states()


def _sources() -> tuple[Path, Path]:
    """List the C++ files whose forms are measured: of products and of states."""
    from torch_hybrid.ops.linear._cpu import SOURCE  # a module that imports this one

    return SOURCE, _SOURCE


def _file(dtype: torch.dtype) -> Path:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")  # torch's products keep to it
    keys = (key_of_source("forms", source) for source in _sources())
    known = (*keys, _cpu(), torch.__version__, str(dtype), limit)
    digest = hashlib.sha256(" ".join(known).encode()).hexdigest()[:20]
    return cache_folder() / f"forms-{digest}.json"


def _cpu() -> str:
    """Identify the CPU's model: machines of several kinds may share a cache folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    kind = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU part")
    found = dict.fromkeys(line for line in lines if line.partition(":")[0].strip() in kind)
    return " ".join(found) or platform.processor()


def _keep(file: Path, found: CpuTuning) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            unit = Path(folder, "forms.json")
            unit.write_text(json.dumps(asdict(found)), encoding="utf-8")
            unit.replace(file)
    except OSError:
        pass  # measured anew by the next process


def _measure(dtype: torch.dtype) -> CpuTuning:
    from torch_hybrid.ops.linear._cpu import multiply

    shape = (_BYTES // (_DEPTH * dtype.itemsize), _DEPTH)
    [memory] = weight_memory([(shape, dtype)], torch.device("cpu"))  # in pages as a model's
    memory.fill_(1)
    row, rows = memory[:1].clone(), memory[:_NUM_ROWS].clone()
    weight, y = memory[:_WIDTH], rows.new_empty(_NUM_ROWS, _WIDTH)
    y_of_row, y_of_few = (rows.new_empty(count, len(memory)) for count in (1, _FEW_ROWS))
    times = _fastest(
        *(partial(multiply, row, memory, y_of_row, streams=streams) for streams in _NAMES)
    )
    seconds = dict(zip(_NAMES, times, strict=True))
    in_turn, four, eight = (memory.nbytes / each for each in times)
    fastest = min(seconds, key=seconds.__getitem__)
    streams = fastest if seconds[fastest] * _STREAMS_GAIN <= seconds[4] else 4
    kernel_seconds, hardware_seconds = _fastest(
        *(
            partial(multiply, rows[:_FEW_ROWS], memory, y_of_few, by_hardware=by)
            for by in (False, True)
        )
    )
    state_seconds = _fastest(*(partial(_advance, memory, streams) for streams in _STATE_STREAMS))
    state_rate, state_streams_rate = (memory.nbytes / each for each in state_seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, torchs = _fastest(
            lambda: multiply(rows, weight, y),
            lambda: torch.mm(rows, weight.T, out=y),
        )
    finally:
        torch.set_num_threads(threads)
    flops = 2 * _NUM_ROWS * weight.numel()
    return CpuTuning(
        streams=streams,
        by_hardware=hardware_seconds < kernel_seconds,
        state_streams=_STATE_STREAMS[state_streams_rate > state_rate],
        many_by_torch=_LIBRARY_GAIN * torchs < ours,
        in_turn_rate=in_turn,
        four_rate=four,
        eight_rate=eight,
        kernel_rate=memory.nbytes / kernel_seconds,
        hardware_rate=memory.nbytes / hardware_seconds,
        state_rate=state_rate,
        state_streams_rate=state_streams_rate,
        ours_rate=flops / ours,
        torch_rate=flops / torchs,
    )


def _advance(memory: Tensor, streams: int) -> None:
    _ADVANCE(memory, memory.nbytes // _STATE_BYTES, streams)


def _fastest(*contestants: Callable[[], object]) -> list[float]:
    """Time the contestants by turns: return the CPU seconds of each one's fastest run."""
    best = [float("inf")] * len(contestants)
    for turn in range(_TURNS + 1):
        for i, run in enumerate(contestants):
            start = time.thread_time()
            run()
            if turn:
                best[i] = min(best[i], time.thread_time() - start)
    return best
