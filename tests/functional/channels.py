"""Recurrences of single channels to train with: inputs, their definition, and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.functional.rules import Tensors, offsets
from torch_hybrid.functional import rg_lru, wkv

HEADS, HEAD_DIM = 3, 23
C = HEADS * HEAD_DIM
# Takes the arguments with a row for each token, the others, and a state or None; returns outputs
# [T, C] and the last state.
Walk = Callable[[Tensors, Tensors, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """A recurrence whose arguments are rows of tokens, numbers of channels, then states.

    Attributes:
        function: of ``torch_hybrid.functional``.
        names: of all tensors that are given, states last.
        num_rows: how many of them have a row for each token.
        draw: makes rows and numbers of channels for so many tokens.
        draw_state: makes one state.
        extremes: what numbers of channels may be at most and at least.
        exact: walks token by token, in the dtype of the rows.
        theirs: computes as transformers does.
    """

    function: Callable[..., tuple[Tensor, Tensor | None]]
    names: tuple[str, ...]
    num_rows: int
    draw: Callable[[int], Tensors]
    draw_state: Callable[[], Tensor]
    extremes: tuple[float, float]
    exact: Walk
    theirs: Walk

    @property
    def forward(self) -> Any:
        """The op that autograd sees."""
        name = f"{self.function.__name__}_forward"
        return getattr(torch.ops.torch_hybrid, name).default

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make all tensors; those without a row for each token have the dtype of sums."""
        work = torch.promote_types(dtype, torch.float32)
        made = self.draw(sum(lengths))
        states = [self.draw_state() for _ in lengths]
        every = [*made, torch.stack(states) if states else self.draw_state()[None][:0]]
        return [x.to(dtype if at < self.num_rows else work) for at, x in enumerate(every)]

    def by_sequence(
        self, walk: Walk, xs: Tensors, lengths: Sequence[int], *, has_states: bool
    ) -> tuple[Tensor, Tensor]:
        """Walk sequence by sequence; the last state of an empty one is its first."""
        rows, rest = xs[: self.num_rows], xs[self.num_rows : -1]
        out, final = [xs[0].new_empty(0, C)], []
        for n, (begin, end) in enumerate(pairwise(offsets(lengths).tolist())):
            state = xs[-1][n]
            if begin < end:
                given = state if has_states else None
                o, state = walk([x[begin:end] for x in rows], rest, given)
                out.append(o)
            final.append(state)
        return torch.cat(out), torch.stack(final)


def _rg_lru_inputs(num_tokens: int) -> Tensors:
    rows = [torch.randn(num_tokens, C), torch.randn(num_tokens, HEADS, 2 * HEAD_DIM)]
    return [*rows, -torch.logspace(-3, 1.3, C)]


def _walk_rg_lru(rows: Tensors, rest: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    x, (i, r), out = rows[0], (g.flatten(1) for g in rows[1].sigmoid().chunk(2, -1)), []
    for t in range(len(x)):
        log_decay = r[t] * rest[0]
        h = i[t] * x[t]
        if state is not None:
            h = log_decay.exp() * state + (-torch.expm1(2 * log_decay)).sqrt() * h
        out.append(h)
        state = h
    return torch.stack(out), out[-1]


def _transformers_rg_lru(
    rows: Tensors, rest: Tensors, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    from transformers.models.recurrent_gemma import modeling_recurrent_gemma as theirs

    x, (i, r) = rows[0], (g.flatten(1) for g in rows[1].sigmoid().chunk(2, -1))
    log_decay = r * rest[0]
    reset = torch.zeros_like(x[None, :, :1], dtype=torch.bool)
    reset[:, 0] = state is None
    scale = theirs.SqrtBoundDerivative.apply(1 - (2 * log_decay).exp())
    scale = reset + ~reset * scale
    scan: Any = theirs.RecurrentGemmaRglru._rnn_scan
    given = x.new_zeros(1, C) if state is None else state[None]
    out, final = scan(None, scale * i * x, log_decay.exp()[None], reset, given, x.dtype)
    return out[0], final[0]


RG_LRU = Channels(
    function=rg_lru,
    names=("x", "gates", "log_a", "initial_state"),
    num_rows=2,
    draw=_rg_lru_inputs,
    draw_state=lambda: torch.randn(C),
    extremes=(-1e-5, -1e3),
    exact=_walk_rg_lru,
    theirs=_transformers_rg_lru,
)


def _wkv_inputs(num_tokens: int) -> Tensors:
    """Make keys of weights far apart, and of decays from almost 1 to e^-20."""
    k, v = torch.randn(2, num_tokens, C)
    return [3 * k, v, -torch.logspace(-3, 1.3, C), torch.randn(C)]


def _walk_wkv(rows: Tensors, rest: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    (k, v), (log_decay, bonus), out = rows, rest, []
    n, d, m = (0 * v[0], 0 * v[0], k[0] - 1e30) if state is None else state
    for t in range(len(k)):
        largest = torch.maximum(m, k[t] + bonus)
        before, own = (m - largest).exp(), (k[t] + bonus - largest).exp()
        out.append((before * n + own * v[t]) / (before * d + own))
        largest = torch.maximum(m + log_decay, k[t])
        before, own = (m + log_decay - largest).exp(), (k[t] - largest).exp()
        n, d, m = before * n + own * v[t], before * d + own, largest
    return torch.stack(out), torch.stack([n, d, m])


def _transformers_wkv(rows: Tensors, rest: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    (k, v), (log_decay, bonus) = rows, rest
    given = None if state is None else [each[None] for each in state]
    out, final = rwkv_linear_attention_cpu(
        (-log_decay).log(), bonus, k[None], v[None], state=given, return_state=True
    )
    return out[0], torch.cat(final)


def _wkv_state() -> Tensor:
    return torch.stack([torch.randn(C), 1 + torch.rand(C), 3 * torch.randn(C)])


WKV = Channels(
    function=wkv,
    names=("k", "v", "log_decay", "bonus", "initial_state"),
    num_rows=2,
    draw=_wkv_inputs,
    draw_state=_wkv_state,
    extremes=(-1e-6, -1e30),
    exact=_walk_wkv,
    theirs=_transformers_wkv,
)
CHANNELS = {"rg_lru": RG_LRU, "wkv": WKV}
