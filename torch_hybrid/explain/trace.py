"""A timeline of a few steps, in the format that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torch_hybrid.explain.overlap_trace import add_halves
from torch_hybrid.graphs.runner import Runner


def write_trace(
    runner: Runner,
    path: str | Path,
    *,
    prompt_len: int = 128,
    num_seqs: int = 4,
    num_decodes: int = 4,
) -> None:
    """Record a chunked prefill, decode steps and a mixed step, and write them to ``path``.

    Steps that run in halves get a track for each half, with the stages of the schedule, and one
    for the collectives in flight. The call takes sequences of the runner and frees them at the end.
    Warm up the runner first: else the timeline shows compilation.

    Args:
        runner: a runner with ``num_seqs + 1`` free slots.
        path: the JSON file to write.
        prompt_len: tokens of each prompt, run in two chunks.
        num_seqs: sequences that are decoded together.
        num_decodes: decode steps.

    Raises:
        ValueError: the file cannot be written.
        CapacityError: too few slots are free.
    """
    on_gpu = runner.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    chunk = [1] * (min(prompt_len * num_seqs, runner.max_tokens) // (2 * num_seqs))
    seqs = runner.new_sequences(num_seqs + 1)
    decoding, late = seqs[:num_seqs], seqs[num_seqs]
    try:
        with profile(activities=activities) as recorded:
            for part in ("first", "second"):
                with record_function(f"extend: {part} chunks of {num_seqs} prompts"):
                    runner.extend(decoding, [chunk] * num_seqs)
            for _ in range(num_decodes):
                with record_function(f"decode: {num_seqs} sequences"):
                    runner.extend(decoding, [[1]] * num_seqs)
            with record_function(f"mixed: {num_seqs} decodes and a prompt"):
                runner.extend(seqs, [*[[1]] * num_seqs, chunk])
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
