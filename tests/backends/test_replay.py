"""Drafts of ops that are called twice: what they leave, against plain decoding, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.replay import plan_replay, walk
from torch_hybrid.batch import make_batch, pad_to
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.gated_pooling import gated_pooling
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.rg_lru import rg_lru
from torch_hybrid.ops.selective_scan import selective_scan

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason="needs a C++ compiler")
DRAFTS, SLOTS, CHANNELS, BLOCK = 3, 5, 40, 4
# Of three sequences, step by step: new tokens, and the drafts among them that turn out right.
ROUNDS = (
    ((4, 1, 2), (3, 0, 0)),
    ((1, 4, 3), (0, 2, 1)),
    ((0, 2, 4), (0, 1, 3)),
    ((3, 4, 1), (0, 3, 0)),
    ((0, 0, 0), (0, 0, 0)),
)
Run = Callable[[Sequence[Tensor], Sequence[Tensor], Any], Tensor]


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def where(at: Any) -> tuple[Tensor, Tensor, Tensor]:
    return at.cu_seqlens, at.initial_indices, at.state_indices


def convolution(state: Tensor) -> Run:
    weight = some(CHANNELS, 4)

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: Any) -> Tensor:
        gate = {"output_gate": reading[0]}
        return causal_conv1d(
            advancing[0], weight, None, state, *where(at), activation="silu", impl="cpp", **gate
        )

    return run


def pooling(state: Tensor) -> Run:
    bias = some(BLOCK, CHANNELS)

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: Any) -> Tensor:
        cu_seqlens, *slots = where(at)
        return gated_pooling(*advancing, bias, state, cu_seqlens, at.seq_lens, *slots, impl="cpp")

    return run


def unit(state: Tensor) -> Run:
    log_a = -some(CHANNELS).abs()

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: Any) -> Tensor:
        return rg_lru(*advancing, log_a, state, *where(at), impl="cpp")

    return run


def scan(state: Tensor) -> Run:
    A_log, D = some(CHANNELS, state.shape[2]), some(CHANNELS)

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: Any) -> Tensor:
        (x, dt, B), (C, z) = advancing, reading
        rest = C[:, None], z, A_log, D, state
        return selective_scan(x, dt, B[:, None], *rest, *where(at), impl="recurrent_cpp")

    return run


# What calls the op, its state, and of a token what it depends on and what outputs alone do.
OPS: dict[str, tuple[Callable[[Tensor], Run], tuple[int, ...], Any, Any]] = {
    "causal_conv1d": (convolution, (3, CHANNELS), [(CHANNELS,)], [(CHANNELS,)]),
    "gated_pooling": (pooling, (BLOCK - 1, 2, CHANNELS), [(CHANNELS,)] * 2, []),
    "rg_lru": (unit, (CHANNELS,), [(CHANNELS,), (2, CHANNELS)], []),
    "selective_scan": (
        scan,
        (CHANNELS, 16),
        [(CHANNELS,), (CHANNELS,), (16,)],
        [(16,), (CHANNELS,)],
    ),
}


@pytest.mark.parametrize(
    ("mode", "most_certain"), [(Mode.verify(DRAFTS), 1), (Mode.mixed(DRAFTS), 2)], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_states_and_outputs_are_those_of_plain_decoding(op: str, mode: Mode, most_certain: int):
    make, state_shape, advancing, reading = OPS[op]
    shapes = [*advancing, *reading]
    tokens = [some(64, *shape, seed=i) for i, shape in enumerate(shapes, 1)]
    state, plain_state = torch.zeros(2, SLOTS, *state_shape)
    run, plain_run = make(state), make(plain_state)
    width = sum(x[0].numel() for x in tokens[: len(advancing)])
    cache = {"records": torch.full((SLOTS, DRAFTS, width), torch.nan)}
    slots, held = [2, 4, 1], [0, 0, 0]

    def batch_of(lengths: Sequence[int], at: Sequence[int], **options: Any) -> Any:
        return make_batch(
            [[0] * n for n in lengths],
            prefix_lens=[held[n] for n in at],
            page_table=torch.zeros(len(at), 8, dtype=torch.int32),
            state_indices=[slots[n] for n in at],
            page_size=16,
            **options,
        )

    def split(rows: slice) -> tuple[list[Tensor], list[Tensor]]:
        given = [x[rows] for x in tokens]
        return given[: len(advancing)], given[len(advancing) :]

    first, accepted = 0, [0, 0, 0]
    for lengths, right in ROUNDS:
        drafts = [max(n - most_certain, m) for n, m in zip(lengths, right, strict=True)]
        batch = batch_of(lengths, range(3), accepted=accepted, num_drafts=drafts)
        batch = pad_to(batch, num_seqs=4, num_tokens=sum(lengths) + 1)
        step = SimpleNamespace(replay=plan_replay(batch, mode))
        out = walk(run, *split(slice(first, first + batch.num_tokens)), step, cache)
        assert not out[-1].any()
        place = first
        for n, (length, count) in enumerate(zip(lengths, right, strict=True)):
            for i in range(length - drafts[n] + count):
                expected = plain_run(*split(slice(place + i, place + i + 1)), batch_of([1], [n]))
                assert torch.equal(out[place - first + i], expected[0])
                held[n] += 1
            place += length
        first, accepted = place % 40, list(right)
    for n, slot in enumerate(slots):
        # Of a block, what lies after the tokens that it has so far is nobody's.
        live = slice(held[n] % BLOCK if op == "gated_pooling" else None)
        assert torch.equal(state[slot, live], plain_state[slot, live])
