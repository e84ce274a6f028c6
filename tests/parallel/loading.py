"""What the processes of ``test_loading`` run: a checkpoint that the ranks load together."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_hybrid as th
from tests.models.oracle import make_texts, serve
from tests.parallel.jobs import LENGTHS, SIZES, STEPS
from torch_hybrid.models.checkpoint import together
from torch_hybrid.models.shard import Experts


@dataclass(frozen=True)
class Loaded:
    """What came of a model that the ranks loaded together."""

    digest: str  # of the logits
    error: float | None = None  # against the model whole, of the largest logit; on the first rank


def load_together(folders: dict[str, Path], experts: Experts = "tensor") -> dict[str, Loaded]:
    """Serve the same texts with each model shared and, on the first rank, whole."""
    return {family: _load_together(folder, experts) for family, folder in folders.items()}


def _load_together(folder: Path, experts: Experts) -> Loaded:
    logits = _logits(th.from_pretrained(folder, ranks=dist.group.WORLD, experts=experts))
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    if dist.get_rank() != 0:
        return Loaded(digest)
    expected = _logits(th.from_pretrained(folder))
    return Loaded(digest, ((logits - expected).abs().max() / expected.abs().max()).item())


def draft_together(folders: dict[str, Path]) -> dict[str, bool]:
    """Whether a head that is shared drafts what it does whole, and its engine serves the same."""
    return {family: _draft_together(folder) for family, folder in folders.items()}


def _draft_together(folder: Path) -> bool:
    shared = th.from_pretrained(folder, ranks=dist.group.WORLD, mtp=True)
    return _drafted(shared) == _drafted(th.from_pretrained(folder, mtp=True))


def _drafted(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts after some texts, and the tokens that an engine gives with drafts."""
    runner = th.Runner(model, **SIZES, max_drafts=3, compile=False)
    texts = make_texts(LENGTHS)
    seqs = runner.new_sequences(len(texts))
    for seq, text in zip(seqs, texts, strict=True):
        runner.extend([seq], [text[:-1]])
    drafts = runner.draft(seqs, [text[-1] for text in texts], [3] * len(texts))
    runner.free(seqs)
    engine = th.Engine(runner, speculate=th.Speculation("mtp", num_drafts=3))
    sampling = th.Sampling(max_new_tokens=12, ignore_eos=True)
    outputs = sorted(engine.generate(texts, sampling), key=lambda output: output.index)
    assert engine.stats().drafts.drafted
    return drafts, [output.tokens for output in outputs]


def _logits(model: Any) -> Tensor:
    runner = th.Runner(model, **SIZES, compile=False)
    return torch.cat(serve(runner, make_texts(LENGTHS), STEPS))


def load_from(folders: list[Path]) -> str:
    """What a rank is told, each of which loads from a folder of its own."""
    try:
        th.from_pretrained(folders[dist.get_rank()], ranks=dist.group.WORLD)
    except (ValueError, th.UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def load_and_die(folder: Path) -> str:
    """The same where the second rank ends as soon as it reads."""
    if dist.get_rank() == 1:
        os.preadv = lambda *_: os._exit(1)
    try:
        th.from_pretrained(folder, ranks=dist.group.WORLD)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def load_with_room_for_one(folder: Path, host: str) -> str:
    """The same where each rank alone would find room; of another ``host`` than the others' if it
    has one of its own."""
    num_bytes = (folder / "model.safetensors").stat().st_size * 3 // 4
    together.free_bytes = lambda _: num_bytes
    if host == "own":
        together.platform.node = lambda: str(dist.get_rank())
    try:
        th.from_pretrained(folder, ranks=dist.group.WORLD)
    except th.CapacityError as error:
        return str(error)
    return "loaded"
