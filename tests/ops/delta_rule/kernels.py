"""How the Triton kernels of delta rules are tested, in the interpreter, compiled and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from tests.ops.delta_rule.cases import GatedInputs, Inputs, KimiInputs
from tests.ops.recurrent_triton import on_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a launch depends on."""

    num_seqs: int
    num_tokens: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    channels: bool = False


def check_walks(op: Callable[..., Tensor], inputs: Inputs) -> None:
    """How a step is walked, which other sequences decide, shows in no bit of a sequence."""

    def walk(num_segments: int, is_even: int) -> tuple[Tensor, Tensor]:
        moved = on_device(inputs)
        planned = [torch.tensor([num_segments, is_even])]
        out = op(*moved.args(), **moved.options(), planned=planned, impl="chunk_triton")
        return out, moved.state[moved.state_indices.long()]  # other slots are NaN

    out, state = walk(1, 0)
    for walks in ((1, 1), (2, 0), (4, 0), (4, 1)):
        other_out, other_state = walk(*walks)
        assert torch.equal(out, other_out), walks
        assert torch.equal(state, other_state), walks


def check_many_chunks(op: Callable[..., Tensor], inputs: Inputs) -> None:
    """As the recurrent kernel, on enough programs for a race between threads to show."""
    inputs = on_device(inputs)
    stepped = inputs.copy()
    expected = op(*stepped.args(), **stepped.options(), impl="recurrent_triton")
    out = op(*inputs.args(), **inputs.options(), impl="chunk_triton")
    written = inputs.state_indices[inputs.cu_seqlens.diff() > 0].long()
    for name, actual, exact, most in (
        ("outputs", out, expected, 2**-6),
        ("states", inputs.state[written], stepped.state[written], 2**-19),
    ):
        error, scale = (actual - exact).abs().max(), exact.abs().max()
        assert error <= most * scale, f"{name} up to {scale:.1e} are off by {error:.1e}"


@contextmanager
def scanned_in_one_form(module: ModuleType, index: int) -> Iterator[None]:
    """Of the forms in which ``module`` launches its scan, one alone is launched, or none."""
    forms = module.scan_configs
    with mock.patch.object(module, "scan_configs", lambda *a, **k: forms(*a, **k)[index:][:1]):
        yield


def on_meta(shape: Shape) -> Inputs:
    """Inputs without memory, whose q, k and v are slices of one projection."""
    k_size, v_size = shape.num_k_heads * shape.k_dim, shape.num_v_heads * shape.v_dim
    qkv = torch.empty(shape.num_tokens, 2 * k_size + v_size, dtype=shape.dtype, device="meta")
    q, k, v = qkv.split([k_size, k_size, v_size], 1)
    per_head = torch.empty(shape.num_tokens, shape.num_v_heads, device="meta")
    indices = torch.empty(shape.num_seqs + 1, dtype=torch.int32, device="meta")
    return (KimiInputs if shape.channels else GatedInputs)(
        q=q.unflatten(1, (shape.num_k_heads, shape.k_dim)),
        k=k.unflatten(1, (shape.num_k_heads, shape.k_dim)),
        v=v.unflatten(1, (shape.num_v_heads, shape.v_dim)),
        g=per_head[..., None].repeat(1, 1, shape.k_dim) if shape.channels else per_head,
        beta=per_head,
        state=torch.empty(
            shape.num_seqs + 1, shape.num_v_heads, shape.v_dim, shape.k_dim, device="meta"
        ),
        cu_seqlens=indices,
        initial_indices=indices[1:],
        state_indices=indices[1:],
        scale=shape.k_dim**-0.5,
    )
