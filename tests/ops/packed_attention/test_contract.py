"""Attention within packed sequences, by torch's kernels, against one T x T mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hybrid.ops.packed_attention import _torch, packed_attention_forward
from torch_hybrid.ops.packed_attention.reference import masked_attention

OFFSETS = torch.tensor([0, 1, 1, 40, 47, 47], dtype=torch.int32)
SHAPES = {"grouped": (4, 2, 16, 16), "narrow values": (2, 2, 24, 16), "wide values": (2, 2, 8, 24)}


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor = OFFSETS,
    blocks: Tensor | None = None,
    impl: str = "torch",
    **options: Any,
) -> Tensor:
    options |= {"scale": 0.3, "impl": impl}
    return packed_attention_forward(q, k, v, cu_seqlens, blocks, None, **options)[0]


def make_blocks(offsets: Tensor = OFFSETS, num_tokens: int = 47) -> Tensor:
    """Pick blocks [T, 2] of 3 tokens, at random among those that are complete."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for length in offsets.diff().tolist():
        for complete in ((position + 1) // 3 for position in range(length)):
            best = torch.randperm(complete, generator=generator)[:2].sort().values
            rows.append([*best.tolist(), -1, -1][:2])
    rows += [[-1, -1]] * (num_tokens - len(rows))
    return torch.tensor(rows, dtype=torch.int32)


SEEN: dict[str, dict[str, Any]] = {
    "all": {},
    **{f"a window of {n}": {"window": n} for n in (1, 5, 7, 39, 100)},
    "blocks": {"blocks": make_blocks(), "block_size": 3},
}


@pytest.fixture(autouse=True)
def few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut queries that have masks into several calls of the kernel."""
    monkeypatch.setattr(_torch, "_QUERIES", 5)


def make_inputs(shape: str = "grouped", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Make q, k and v of 47 tokens in 3 sequences, two more are empty."""
    num_heads, num_kv_heads, k_dim, v_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = (num_heads, k_dim), (num_kv_heads, k_dim), (num_kv_heads, v_dim)
    return [
        torch.randn(47, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes
    ]


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_a_mask(shape: str, seen: str):
    q, k, v = make_inputs(shape)
    out = packed_attention(q, k, v, **SEEN[seen])
    masked = masked_attention(q, k, v, OFFSETS, scale=0.3, **SEEN[seen])
    torch.testing.assert_close(out, masked)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    for mine, other in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((masked * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("reach", [None, 4])
@pytest.mark.parametrize("seen", SEEN)
def test_gradients_of_outputs_and_log_sum_exps(seen: str, reach: int | None):
    inputs = make_inputs()
    options, blocks = {**SEEN[seen], "scale": 0.3, "impl": "torch"}, SEEN[seen].get("blocks")
    options.pop("blocks", None)
    if reach is not None:
        generator = torch.Generator().manual_seed(1)
        inputs.append(torch.randn(47, 4, reach, generator=generator, dtype=torch.float64))
        inputs[-1].requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        return packed_attention_forward(q, k, v, OFFSETS, blocks, bias, **options)

    torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("reach", [None, 4, 90])
@pytest.mark.parametrize("window", [None, 1, 7, 100, "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpp_rounds_no_more_than_torch(
    dtype: torch.dtype, shape: str, window: int | str | None, reach: int | None
):
    """Several tiles of a sequence, and padding behind the last one."""
    num_heads, num_kv_heads, k_dim, v_dim = SHAPES[shape]
    sizes = [(num_heads, k_dim), (num_kv_heads, k_dim), (num_kv_heads, v_dim)]
    sizes += [(num_heads, reach)] if reach is not None else []
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(160, *size, generator=generator).to(dtype) for size in sizes]
    offsets = torch.tensor([0, 1, 1, 131, 150], dtype=torch.int32)
    seen: dict[str, Any] = {"window": window}
    blocks = None
    if window == "blocks":
        seen, blocks = {"block_size": 3}, make_blocks(offsets, 160)
    weight = torch.randn(160, num_heads, v_dim, generator=generator).to(dtype)

    def made(impl: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in given]
        bias = inputs[3] if reach is not None else None
        options = {"scale": 0.3, "impl": impl, **seen}
        out, lse = packed_attention_forward(*inputs[:3], offsets, blocks, bias, **options)
        loss = (out * weight.to(dtype)).sum() + (0.0 if reach is None else lse.sin().sum())
        return [out, lse, *torch.autograd.grad(loss, inputs)]

    exact, by_torch = made("torch", torch.float64), made("torch", dtype)
    for got, rounded, want in zip(made("cpp", dtype), by_torch, exact, strict=True):
        bound = 2 * (rounded.double() - want).norm() + torch.finfo(dtype).eps * want.norm()
        assert (got.double() - want).norm() <= bound


@pytest.mark.parametrize("seen", ["all", "a window of 7", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_a_sequence_has_the_bits_that_it_has_alone(impl: str, dtype: torch.dtype, seen: str):
    q, k, v = make_inputs(dtype=dtype)
    options = {**SEEN[seen], "impl": impl}
    out = packed_attention(q, k, v, **options)
    alone = [x[1:40].detach().requires_grad_() for x in (q, k, v)]
    whole = torch.tensor([0, 39], dtype=torch.int32)
    if "blocks" in options:
        options = {**options, "blocks": options["blocks"][1:40]}
    out_alone = packed_attention(*alone, whole, **options)
    assert torch.equal(out[1:40], out_alone)
    packed = torch.autograd.grad(out[1:40].float().square().sum(), (q, k, v))
    single = torch.autograd.grad(out_alone.float().square().sum(), alone)
    assert all(torch.equal(x[1:40], y) for x, y in zip(packed, single, strict=True))


@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_threads_change_no_bits(impl: str, monkeypatch: pytest.MonkeyPatch):
    """Those would of products of one head of keys, and of parts of one query."""
    monkeypatch.setattr(_torch, "_QUERIES", 128)
    generator, before, made = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    sizes = (4, 64), (1, 64), (1, 64), (4, 50)
    inputs = [torch.randn(300, *size, generator=generator).requires_grad_() for size in sizes]
    q, k, v, bias = inputs
    offsets = torch.tensor([0, 257, 290, 300], dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.1, "impl": impl}
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            made += [packed_attention_forward(q, k, v, offsets, None, bias, **options)]
            out, lse = made[-1]
            made[-1] += torch.autograd.grad(out.square().sum() + lse.sin().sum(), inputs)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *made))


def test_second_derivatives_are_refused():
    q, k, v = make_inputs()
    out = packed_attention(q, k, v)
    grad = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="packed_attention can be differentiated once"):
        grad.sum().backward()


def bad(at: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    inputs = [*make_inputs(), OFFSETS]
    inputs[at] = change(inputs[at])
    return inputs


BAD = {
    "dtype": (bad(2, Tensor.float), "v must have dtype torch.float64, got torch.float32"),
    "heads": (bad(0, lambda q: q[:, :3]), "q must have a multiple of the 2 heads of k, got 3"),
    "offsets that fall": (bad(3, lambda x: x.flip(0)), "cu_seqlens must rise from 0 to at most 47"),
}


OPTIONS = {
    "window must be at least 1, got 0": {"window": 0},
    "window must be None and block_size at least 1, got 5": {**SEEN["blocks"], "window": 5},
    "blocks must be complete before": {"blocks": make_blocks() + 1, "block_size": 3},
}


@pytest.mark.parametrize("message", OPTIONS)
def test_bad_options_are_refused(message: str):
    with pytest.raises(ValueError, match=message):
        packed_attention(*make_inputs(), **OPTIONS[message])


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused(what: str):
    inputs, text = BAD[what]
    with pytest.raises(ValueError, match=text):
        packed_attention(*inputs)
