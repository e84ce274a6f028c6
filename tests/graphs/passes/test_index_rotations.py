"""The pass that takes the cat out of rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from tests.graphs.passes.test_passes import run
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass
from torch_hybrid.graphs.passes.index_rotations import index_rotations

PASSES = (Pass("index_rotations", partial(index_rotations, devices=("cpu",))),)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def test_text():
    _, graph, _ = run(rotate_half, torch.randn(3, 2, 8), passes=PASSES)
    assert_expected_inline(
        graph,
        """\
getitem = getitem(x, (Ellipsis, slice(4, None, None)))
neg = neg(getitem)
getitem_1 = getitem(x, (Ellipsis, slice(None, 4, None)))
arange_start_step = arange.start_step(-1, 2, 2)
unflatten = unflatten(x, -1, (2, -1))
flip = flip(unflatten, -2)
unsqueeze = unsqueeze(arange_start_step, -1)
mul = mul(flip, unsqueeze)
flatten = flatten(mul, -2)""",
    )


def of_part(x: Tensor) -> Tensor:
    """As models that rotate some of a head's dims."""
    rotated, passed = x[..., :4], x[..., 4:]
    return torch.cat([rotated + rotate_half(rotated), passed], dim=-1)


def test_a_cpu_keeps_the_cat():
    _, graph, _ = run(rotate_half, torch.randn(3, 8), passes=DEFAULT_PASSES)
    assert "cat(" in graph


@pytest.mark.parametrize("shape", [(3, 2, 8), (8,), (0, 8)])
@pytest.mark.parametrize("fn", [rotate_half, of_part])
def test_same_bits(fn: Callable[[Tensor], Tensor], shape: tuple[int, ...]):
    x = torch.randn(shape)
    out, graph, _ = run(fn, x, passes=PASSES)
    assert "flip(" in graph
    assert torch.equal(out, fn(x))
    across = torch.randn(8, 5, 3).permute(2, 1, 0)
    assert torch.equal(run(fn, across, passes=PASSES)[0], fn(across))


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_as_transformers_writes_it(rotary_dim: int):
    """Of whole heads and of a part."""
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    angles = torch.randn(2, 1, 5, rotary_dim)

    def fn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(q, k, cos, sin)
        return rotated

    out, graph, _ = run(fn, q, k, *angles, passes=PASSES)
    assert graph.count("flip(") == 2
    assert all(map(torch.equal, out, fn(q, k, *angles)))


def lower_negated(x: Tensor) -> Tensor:
    return torch.cat((-x[..., :4], x[..., 4:]), dim=-1)


def of_rows(x: Tensor) -> Tensor:
    return torch.cat((-x[4:], x[:4]))


def of_columns(x: Tensor) -> Tensor:
    return torch.cat((-x[4:], x[:4]), dim=-1)


def of_unlike_parts(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 2:], x[..., :2]), dim=-1)


def of_less(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 2:4], x[..., :2]), dim=-1)


def of_others(x: Tensor) -> Tensor:
    return torch.cat((-(x + 1)[..., 4:], x[..., :4]), dim=-1)


def of_three(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4], x), dim=-1)


def along_an_axis(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), axis=-1)


def with_every_other(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)


@pytest.mark.parametrize(
    "fn",
    [
        lower_negated,
        of_rows,
        of_columns,
        of_unlike_parts,
        of_less,
        of_others,
        of_three,
        along_an_axis,
        with_every_other,
    ],
)
def test_what_is_no_rotation_is_left_alone(fn: Callable[[Tensor], Tensor]):
    x = torch.randn(8, 8)
    out, graph, _ = run(fn, x, passes=PASSES)
    assert "flip(" not in graph
    assert torch.equal(out, fn(x))
