"""The paged_attention op against the memory, a large matrix product, and torch's own attention.

    python -m benchmarks.paged_attention [--threads N] [--seconds S] [--cpu-time]

Decode: the time to read the same keys and values is the floor; the rival is torch's attention
on keys and values already gathered, dense and padded. Prefill: the rate is compared with that of
a matrix product, and the rival is torch's causal attention on dense keys and values. Biases by
distance: the same op without. Contestants take turns and the fastest run of each counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import Peak, reader
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.paged_attention.cases import Case, Inputs, make_biases, make_inputs
from tests.ops.pages import slots_of
from torch_hybrid.ops.paged_attention import paged_attention

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads and head size of a model's attention, and the dtype."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = FP32

    def case(self, lengths: tuple[tuple[int, int], ...]) -> Case:
        return Case(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            lengths=lengths,
        )

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads} x {self.head_dim}"
        return f"{heads} {str(self.dtype).removeprefix('torch.')}"


QWEN3_NEXT = Shape(num_q_heads=16, num_kv_heads=2, head_dim=256)
WIDE_GROUP = Shape(num_q_heads=16, num_kv_heads=2, head_dim=128)
MULTI_HEAD = Shape(num_q_heads=8, num_kv_heads=8, head_dim=128)
DECODE = (
    *((shape, batch, 512, 1024) for batch in (8, 32) for shape in (WIDE_GROUP, QWEN3_NEXT)),
    (QWEN3_NEXT, 1, 8192, 8192),
    (MULTI_HEAD, 32, 512, 1024),
    (Shape(num_q_heads=16, num_kv_heads=2, head_dim=256, dtype=BF16), 32, 512, 1024),
)
PREFILL = (
    (Shape(num_q_heads=8, num_kv_heads=2, head_dim=128), 2048),
    (QWEN3_NEXT, 512),
    (QWEN3_NEXT, 2048),
    (MULTI_HEAD, 2048),
    (Shape(num_q_heads=16, num_kv_heads=2, head_dim=256, dtype=BF16), 2048),
)
# Sequences, new tokens and keys of each.
BIASED = ((1, 1, 1024), (8, 1, 1024), (1, 1, 8192), (1, 512, 512), (1, 256, 4096))
REACH = 1024


def op(
    inputs: Inputs, relative_bias: Tensor | None = None, impl: str = "cpp"
) -> Callable[[], Tensor]:
    """The op on one pool, which it rewrites with the same rows at each call."""
    args, scale = inputs.args(), inputs.q.shape[-1] ** -0.5
    return lambda: paged_attention(*args, scale=scale, relative_bias=relative_bias, impl=impl)


def padded_attention(inputs: Inputs) -> Callable[[], Tensor]:
    """torch's attention of one query per sequence, the heads of a group as its query rows."""
    _, _, page_size, num_kv_heads, head_dim = inputs.kv.shape
    num_seqs, longest = len(inputs.seq_lens), int(inputs.seq_lens.max())
    dense = torch.zeros(2, num_seqs, num_kv_heads, longest, head_dim, dtype=inputs.kv.dtype)
    for n, length in enumerate(inputs.seq_lens.tolist()):
        slots = slots_of(inputs.page_table[n], length, page_size)
        dense[:, n, :, :length] = inputs.kv.flatten(1, 2)[:, slots].transpose(1, 2)
        dense[0, n, :, length - 1], dense[1, n, :, length - 1] = inputs.k[n], inputs.v[n]
    visible = torch.arange(longest) < inputs.seq_lens[:, None, None, None]
    q = inputs.q.unflatten(1, (num_kv_heads, -1))
    return lambda: F.scaled_dot_product_attention(q, *dense, attn_mask=visible).flatten(1, 2)


def causal_attention(inputs: Inputs) -> Callable[[], Tensor]:
    """torch's causal attention of one sequence without a prefix."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q = inputs.q.transpose(0, 1)[None].contiguous()
    k, v = (
        x.repeat_interleave(group, 1).transpose(0, 1)[None].contiguous()
        for x in (inputs.k, inputs.v)
    )
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def check(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """No figure of a wrong result."""
    tolerance = 2e-2 if ours().dtype == BF16 else 1e-4
    torch.testing.assert_close(ours(), theirs(), rtol=tolerance, atol=tolerance)


def decode_line(shape: Shape, batch: int, shortest: int, longest: int, clock: Clock) -> str:
    torch.manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (batch,)).tolist()
    case = shape.case(tuple((1, length) for length in lengths))
    inputs = make_inputs(case, dtype=shape.dtype, unused=0.0)
    ours, theirs = op(inputs), padded_attention(inputs)
    check(ours, theirs)
    num_bytes = 2 * sum(lengths) * inputs.k[0].numel() * inputs.k.element_size()
    best = clock.fastest({"read": reader(num_bytes), "ours": ours, "theirs": theirs})
    return (
        f"| {shape} | {batch} | {shortest}-{longest} | {num_bytes / 1e6:.0f} "
        f"| {num_bytes / best['read'] / 1e9:.1f} | {best['ours'] * 1e3:.2f} "
        f"| {best['ours'] / best['read']:.2f} | {best['theirs'] / best['ours']:.2f} |"
    )


def prefill_line(shape: Shape, num_tokens: int, clock: Clock) -> str:
    inputs = make_inputs(shape.case(((num_tokens, num_tokens),)), dtype=shape.dtype, unused=0.0)
    ours, theirs = op(inputs), causal_attention(inputs)
    check(ours, theirs)
    peak = Peak(FP32)
    best = clock.fastest({"peak": peak, "ours": ours, "theirs": theirs})
    flops = 2 * shape.num_q_heads * shape.head_dim * num_tokens * (num_tokens + 1)
    rate, ceiling = flops / best["ours"], peak.flops / best["peak"]
    return (
        f"| {shape} | {num_tokens} | {ceiling / 1e9:.0f} | {best['ours'] * 1e3:.1f} "
        f"| {rate / 1e9:.0f} | {100 * rate / ceiling:.0f} "
        f"| {best['theirs'] / best['ours']:.2f} |"
    )


def biased_line(dtype: torch.dtype, batch: int, num_new: int, length: int, clock: Clock) -> str:
    shape = Shape(num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype)
    inputs = make_inputs(shape.case(((num_new, length),) * batch), dtype=dtype, unused=0.0)
    biases = make_biases(inputs, reach=REACH)
    ours, plain = op(inputs, biases), op(inputs)
    check(ours, op(inputs, biases, "torch"))
    best = clock.fastest({"ours": ours, "plain": plain})
    return (
        f"| {shape} | {batch} | {num_new} | {length} | {best['plain'] * 1e3:.2f} "
        f"| {best['ours'] * 1e3:.2f} | {best['ours'] / best['plain']:.2f} |"
    )


def main() -> None:
    """Print the tables."""
    clock = clock_of(clock_arguments(__doc__.partition("\n")[0]).parse_args())
    print("| decode | batch | length | MB | read GB/s | ms | / read | SDPA / ours |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape, batch, shortest, longest in DECODE:
        print(decode_line(shape, batch, shortest, longest, clock), flush=True)
    print("\n| prefill | tokens | fp32 FMA peak GF/s | ms | GF/s | % | SDPA / ours |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for shape, num_tokens in PREFILL:
        print(prefill_line(shape, num_tokens, clock), flush=True)
    print(f"\n| {REACH} biases | batch | new tokens | keys | plain ms | biased ms | / plain |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for dtype, lengths in product((FP32, BF16), BIASED):
        print(biased_line(dtype, *lengths, clock), flush=True)


if __name__ == "__main__":
    main()
