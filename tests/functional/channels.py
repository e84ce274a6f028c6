"""Recurrences of single channels, and the short convolution, to train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.functional.recurrence import LENGTHS, Recurrence, Results, Tensors
from torch_hybrid.functional import causal_conv1d, rg_lru, wkv

HEADS, HEAD_DIM = 3, 23
C = HEADS * HEAD_DIM
# Borders of segments of 64.
SEGMENTS = LENGTHS | {"borders": (63, 64, 65, 128, 129)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Channels(Recurrence):
    """A recurrence whose arguments are two of rows, numbers of channels, then states."""

    apart: int = -1
    starts_from_zeros: bool = False
    decay_slack: float = 5e-6

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        work = torch.promote_types(dtype, torch.float32)
        made = self.draw(sum(lengths))
        states = [self.draw_state() for _ in lengths]
        every = [*made, torch.stack(states) if states else self.draw_state()[None][:0]]
        return [x.to(dtype if at < 2 else work) for at, x in enumerate(every)]

    def draw(self, num_tokens: int) -> Tensors:
        """Make rows and numbers of channels."""
        raise NotImplementedError

    def draw_state(self) -> Tensor:
        """Make one state."""
        return torch.randn(C)


class RgLru(Channels):
    """The gated linear recurrence of Griffin."""

    def draw(self, num_tokens: int) -> Tensors:
        rows = [torch.randn(num_tokens, C), torch.randn(num_tokens, HEADS, 2 * HEAD_DIM)]
        return [*rows, -torch.logspace(-3, 1.3, C)]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        x, (i, r), out = rows[0], (g.flatten(1) for g in rows[1].sigmoid().chunk(2, -1)), []
        for t in range(len(x)):
            log_decay = r[t] * shared[0]
            h = i[t] * x[t]
            if state is not None:
                h = log_decay.exp() * state + (-torch.expm1(2 * log_decay)).sqrt() * h
            out.append(h)
            state = h
        return torch.stack(out), out[-1]

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        from transformers.models.recurrent_gemma import modeling_recurrent_gemma as theirs

        x, (i, r) = rows[0], (g.flatten(1) for g in rows[1].sigmoid().chunk(2, -1))
        log_decay = r * shared[0]
        reset = torch.zeros_like(x[None, :, :1], dtype=torch.bool)
        reset[:, 0] = state is None
        scale = theirs.SqrtBoundDerivative.apply(1 - (2 * log_decay).exp())
        scale = reset + ~reset * scale
        scan: Any = theirs.RecurrentGemmaRglru._rnn_scan
        given = x.new_zeros(1, C) if state is None else state[None]
        out, final = scan(None, scale * i * x, log_decay.exp()[None], reset, given, x.dtype)
        return out[0], final[0]


class Wkv(Channels):
    """The recurrence of RWKV-4."""

    def draw(self, num_tokens: int) -> Tensors:
        """Make keys of weights far apart, and of decays from almost 1 to e^-20."""
        k, v = torch.randn(2, num_tokens, C)
        return [3 * k, v, -torch.logspace(-3, 1.3, C), torch.randn(C)]

    def draw_state(self) -> Tensor:
        return torch.stack([torch.randn(C), 1 + torch.rand(C), 3 * torch.randn(C)])

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        (k, v), (log_decay, bonus), out = rows, shared, []
        n, d, m = (0 * v[0], 0 * v[0], k[0] - 1e30) if state is None else state
        for t in range(len(k)):
            largest = torch.maximum(m, k[t] + bonus)
            before, own = (m - largest).exp(), (k[t] + bonus - largest).exp()
            out.append((before * n + own * v[t]) / (before * d + own))
            largest = torch.maximum(m + log_decay, k[t])
            before, own = (m + log_decay - largest).exp(), (k[t] - largest).exp()
            n, d, m = before * n + own * v[t], before * d + own, largest
        return torch.stack(out), torch.stack([n, d, m])

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

        (k, v), (log_decay, bonus) = rows, shared
        given = None if state is None else [each[None] for each in state]
        out, final = rwkv_linear_attention_cpu(
            (-log_decay).log(), bonus, k[None], v[None], state=given, return_state=True
        )
        return out[0], torch.cat(final)


@dataclass(frozen=True, kw_only=True, eq=False)
class Convolution(Recurrence):
    """The short convolution, whose oracle is torch's own; all tensors have one dtype."""

    width: int = 4
    channels: int = 19

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        T, C, W = sum(lengths), self.channels, self.width
        shapes = (T, C), (C, W), (C,), (len(lengths), W - 1, C)
        return [torch.randn(shape).to(dtype) for shape in shapes]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Call torch's convolution."""
        (x,), (weight, bias) = rows, shared
        row = torch.cat([state, x])
        y = F.conv1d(row.T[None], weight[:, None], bias, groups=len(bias))[0].T
        return F.silu(y) if self.options["activation"] else y, row[len(x) :]

    def op_arguments(self, xs: Tensors, cu_seqlens: Tensor) -> tuple[Tensors, dict[str, object]]:
        return [*xs[:-1], cu_seqlens, xs[-1]], {"activation": "silu"}


RG_LRU = RgLru(
    function=rg_lru,
    op="rg_lru",
    names=("x", "gates", "log_a", "initial_state"),
    shared=("log_a",),
    decay="log_a",
    decays=(-1e-5, -1e3),
    lengths=SEGMENTS,
)
WKV = Wkv(
    function=wkv,
    op="wkv",
    names=("k", "v", "log_decay", "bonus", "initial_state"),
    shared=("log_decay", "bonus"),
    decay="log_decay",
    decays=(-1e-6, -1e30),
    lengths=SEGMENTS,
)
CONVOLUTION = Convolution(
    function=causal_conv1d,
    op="causal_conv1d",
    names=("x", "weight", "bias", "initial_state"),
    shared=("weight", "bias"),
    num_optional=1,
    options={"activation": "silu"},
    lengths={"mixed": (5, 1, 0, 33, 2, 70)},
)
