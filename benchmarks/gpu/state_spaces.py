"""Mamba2's recurrence (SSD) and lightning attention, the same with a constant decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.gpu.case import (
    Case,
    Choice,
    Contestant,
    Inputs,
    Turns,
    installed,
    offsets,
    own,
    randn,
)
from tests.ops.step_lengths import step_lengths
from torch_hybrid.ops.core.planning import Planned, Planner
from torch_hybrid.ops.core.recurrence import of_form
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.ops.ssd.op import IMPLEMENTATIONS

CHUNK = 64  # of the usual form, whose FLOPs are counted
# groups, heads, K, V
MAMBA2 = {
    "Bamba": (1, 128, 128, 64),
    "Nemotron-H": (8, 128, 128, 64),
    "Falcon-H1": (1, 24, 256, 64),
}
LIGHTNING = {"Ling": (32, 32, 128, 128), "MiniMax-01": (64, 64, 96, 96)}
MLSTM = {"xLSTM-7b": (8, 8, 256, 528)}  # with the ones behind its values
PREFILLS = ((1, 8192), (8, 1024), (16, 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace(Inputs):
    """v, k and q are slices of one projection; ``D`` is Mamba2's alone, and lightning has no dt."""

    changed: ClassVar[tuple[str, ...]] = ("state",)

    sizes: tuple[int, int, int, int]
    vkq: Tensor  # [T, H V + 2 G K]
    g: Tensor  # [T, H]; of lightning one row that all tokens share
    dt: Tensor | None
    D: Tensor | None
    state: Tensor  # [N + 1, H, V, K]
    cu_seqlens: Tensor
    indices: Tensor

    @classmethod
    def make(
        cls, kind: str, sizes: tuple[int, int, int, int], num_seqs: int, num_new: int
    ) -> StateSpace:
        num_groups, num_heads, k_dim, v_dim = sizes
        num_tokens = num_seqs * num_new
        dt = torch.rand(num_tokens, num_heads) / 4
        slopes = 2 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
        return cls(
            sizes=sizes,
            vkq=randn(num_tokens, num_heads * v_dim + 2 * num_groups * k_dim),
            g=-slopes[None] if kind == "lightning" else -dt,
            dt=None if kind == "lightning" else dt,
            D=torch.rand(num_heads) if kind == "SSD" else None,
            state=randn(num_seqs + 1, num_heads, v_dim, k_dim).float(),
            cu_seqlens=offsets(num_seqs, num_new),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    def plan(self, planner: Planner) -> Planned:
        slots = {"initial_indices": self.indices, "state_indices": self.indices}
        return planner(step_lengths(self.cu_seqlens, self.num_tokens, **slots))

    @property
    def scale(self) -> float:
        return self.sizes[2] ** -0.5

    @property
    def num_tokens(self) -> int:
        return self.vkq.shape[0]

    def qkv_views(self) -> tuple[Tensor, Tensor, Tensor]:
        num_groups, num_heads, k_dim, v_dim = self.sizes
        k_size = num_groups * k_dim
        v, k, q = self.vkq.split([num_heads * v_dim, k_size, k_size], 1)
        return (
            q.unflatten(1, (num_groups, k_dim)),
            k.unflatten(1, (num_groups, k_dim)),
            v.unflatten(1, (num_heads, v_dim)),
        )

    @property
    def num_bytes(self) -> float:
        _, num_heads, _, v_dim = self.sizes
        per_head = 0 if self.dt is None else self.dt.nbytes + self.g.nbytes
        out = 2 * self.num_tokens * num_heads * v_dim
        return self.vkq.nbytes + out + per_head + 2 * self.state[1:].nbytes

    @property
    def flops(self) -> float:
        if self.num_tokens == self.indices.shape[0]:
            return 0.0
        num_groups, num_heads, k, v = self.sizes
        per_head = 4 * CHUNK * k * v + 2 * CHUNK**2 * v
        per_chunk = num_heads * per_head + num_groups * 2 * CHUNK**2 * k
        return self.num_tokens / CHUNK * per_chunk


def call(op: Callable[..., Tensor], inputs: StateSpace, impl: str, **options: Any) -> Tensor:
    """One call of this package's op."""
    return op(
        *inputs.qkv_views(),
        inputs.g.expand(inputs.num_tokens, -1),
        inputs.dt,
        inputs.D,
        inputs.state,
        inputs.cu_seqlens,
        inputs.indices,
        inputs.indices,
        scale=inputs.scale,
        impl=impl,
        **options,
    )


def _fla(function: str, inputs: Sequence[StateSpace]) -> Turns:
    """simple_gla, on q and k of every head and on values times dt; without D, which is added after
    what is timed. Sequences of one length are a batch to it: its ragged form reads from the device,
    and cannot be captured."""
    op = getattr(installed("fla", "fla.ops.simple_gla"), function)
    calls = [partial(op, **_of_simple_gla(each)) for each in inputs]
    skip = 0.0 if inputs[0].D is None else inputs[0].D[:, None] * inputs[0].qkv_views()[2].float()
    return Turns(calls=calls, output=lambda result: result[0].flatten(0, 1).float() + skip)


def _of_simple_gla(inputs: StateSpace) -> dict[str, Any]:
    num_groups, num_heads, _, _ = inputs.sizes
    q, k, v = inputs.qkv_views()
    times = num_heads // num_groups
    scaled = v if inputs.dt is None else (v * inputs.dt[..., None]).to(v.dtype)
    rows = {
        "q": q.repeat_interleave(times, 1),
        "k": k.repeat_interleave(times, 1),
        "v": scaled.contiguous(),
    } | ({} if inputs.dt is None else {"g": inputs.g})
    num_seqs = inputs.indices.shape[0]
    batch = {name: tensor.unflatten(0, (num_seqs, -1)) for name, tensor in rows.items()}
    return batch | {
        "g_gamma": inputs.g[0] if inputs.dt is None else None,
        "scale": inputs.scale,
        "initial_state": inputs.state[1:],
        "output_final_state": True,
        "state_v_first": True,
    }


def _flashinfer_decode(inputs: Sequence[StateSpace]) -> Turns:
    """selective_state_update, a rate of -1 for each head; it has no scale, so q comes scaled."""
    op = installed("flashinfer", "flashinfer.mamba").selective_state_update
    _, num_heads, k_dim, v_dim = inputs[0].sizes
    rates = inputs[0].g.new_full((num_heads, 1, 1), -1.0).expand(-1, v_dim, k_dim)
    calls = []
    for each in inputs:
        assert each.dt is not None
        assert each.D is not None
        q, k, v = (tensor.contiguous() for tensor in each.qkv_views())
        calls.append(
            partial(
                op,
                each.state,
                v,
                each.dt[..., None].expand(-1, -1, v_dim),
                rates,
                k,
                q * each.scale,
                each.D[:, None].expand(-1, v_dim),
                state_batch_indices=each.indices,
            )
        )
    return Turns(calls=calls)


def cases() -> Iterator[Case]:
    """Decode of 1 to 64 sequences, prefill of 8192 tokens."""
    for model, sizes in MAMBA2.items():
        for num_seqs in (1, 8, 64):
            yield _case("SSD", model, sizes, num_seqs, 1)
        for num_seqs, length in PREFILLS:
            yield _case("SSD", model, sizes, num_seqs, length)
    for model, sizes in LIGHTNING.items():
        yield _case("lightning", model, sizes, 64, 1)
        for num_seqs, length in PREFILLS[:2]:
            yield _case("lightning", model, sizes, num_seqs, length)
    for model, sizes in MLSTM.items():
        for num_seqs in (1, 8, 64):
            yield _case("mLSTM", model, sizes, num_seqs, 1)
        for num_seqs, length in PREFILLS:
            yield _case("mLSTM", model, sizes, num_seqs, length)


def _case(
    kind: str, model: str, sizes: tuple[int, int, int, int], num_seqs: int, num_new: int
) -> Case:
    prefill = num_new > 1
    form = "chunk" if prefill else "recurrent"
    ours = partial(call, ssd)
    others: dict[str, Contestant] = {
        "fla": partial(_fla, "chunk_simple_gla" if prefill else "fused_recurrent_simple_gla")
    }
    if not prefill and kind == "SSD":
        others["flashinfer"] = _flashinfer_decode
    return Case(
        op=f"{kind} {'prefill' if prefill else 'decode'}",
        model=model,
        shape=f"{num_seqs}x{num_new}",
        make=partial(StateSpace.make, kind, sizes, num_seqs, num_new),
        reference=partial(ours, impl=f"{form}_torch"),
        own=own(of_form(IMPLEMENTATIONS, form), ours),
        choice=Choice(
            op="ssd",
            form=form,
            sizes={"head_k_dim": sizes[2], "head_v_dim": sizes[3]},
        ),
        others=others,
    )
