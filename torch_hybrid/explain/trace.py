"""A timeline of a few steps, in the format that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torch_hybrid.explain.overlap_trace import add_halves
from torch_hybrid.graphs.runner import Runner

_PROMPT_LEN = 128  # run in two chunks
_NUM_SEQS = 4  # decoded together
_NUM_DECODES = 4


def write_trace(runner: Runner, path: str | Path) -> None:
    """Record a chunked prefill, decode steps and a mixed step, and write them to ``path``.

    Steps that run in halves get a track for each half, with the stages of the schedule, and one
    for the collectives in flight. The call takes sequences of the runner and frees them at the end.
    Warm up the runner first: else the timeline shows compilation.

    Args:
        runner: a runner with five free slots.
        path: the JSON file to write.

    Raises:
        ValueError: the file cannot be written.
        CapacityError: too few slots are free.
    """
    on_gpu = runner.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    chunk = [1] * (min(_PROMPT_LEN * _NUM_SEQS, runner.max_tokens) // (2 * _NUM_SEQS))
    seqs = runner.new_sequences(_NUM_SEQS + 1)
    decoding, late = seqs[:_NUM_SEQS], seqs[_NUM_SEQS]
    try:
        with profile(activities=activities) as recorded:
            for part in ("first", "second"):
                with record_function(f"extend: {part} chunks of {_NUM_SEQS} prompts"):
                    runner.extend(decoding, [chunk] * _NUM_SEQS)
            for _ in range(_NUM_DECODES):
                with record_function(f"decode: {_NUM_SEQS} sequences"):
                    runner.extend(decoding, [[1]] * _NUM_SEQS)
            with record_function(f"mixed: {_NUM_SEQS} decodes and a prompt"):
                runner.extend(seqs, [*[[1]] * _NUM_SEQS, chunk])
            with record_function("decode: 1 sequence"):
                runner.extend([late], [[1]])
            if on_gpu:
                torch.cuda.synchronize()
    finally:
        runner.free(seqs)
    schedules = [graph.schedule for graph in runner.report().graphs.values() if graph.schedule]
    text = _chrome_trace(recorded)
    if schedules:
        text = json.dumps(add_halves(json.loads(text), schedules))
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def _chrome_trace(recorded: profile) -> str:
    """Export a profile as JSON text.

    The profiler can only write to a file, and reports no error if it cannot write to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        return file.read_text()
