"""The latent_attention op against its floor, and where its expanded form overtakes it.

    python -m benchmarks.latent_attention [--threads N] [--seconds S] [--cpu-time]

Decode: the floor is the longer of a read of the same latents and a float32 matrix product of the
same FLOPs. Expanded: a suffix of q tokens against a prefix, as absorbed attention to the latents,
and as attention to keys and values that are first expanded from the latents; both from the same
queries to the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ceilings import Peak, reader
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.latent_attention.cases import Case, Inputs, make_inputs
from tests.ops.pages import offsets, slots_of
from torch_hybrid.ops.latent_attention import gather_latents, latent_attention
from torch_hybrid.ops.merge_states import merge_states
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse

FP32, BF16 = torch.float32, torch.bfloat16
V_DIM = 128
DECODE = (
    *((16, batch, length, FP32) for batch in (1, 8, 32) for length in (512, 2048)),
    (16, 1, 8192, FP32),
    (16, 8, 8192, FP32),
    (32, 1, 512, FP32),
    (32, 8, 2048, FP32),
    (128, 1, 2048, FP32),
    (16, 8, 2048, BF16),
    (32, 8, 2048, BF16),
)
SUFFIXES = (1, 16, 64, 128, 160, 192, 256, 512)
PREFIXES = (0, 256, 1024, 4096)


def op(inputs: Inputs, scale: float, impl: str = "cpp") -> Callable[[], Tensor]:
    """The op on one pool, which it rewrites with the same rows at each call."""
    args = inputs.args()
    return lambda: latent_attention(*args, scale=scale, impl=impl)


def decode_line(heads: int, batch: int, length: int, dtype: torch.dtype, clock: Clock) -> str:
    """One new token for each sequence."""
    case = Case(num_heads=heads, lengths=((1, length),) * batch)
    inputs = make_inputs(case, dtype=dtype, unused=0.0)
    ours, theirs = op(inputs, case.scale), op(inputs, case.scale, "torch")
    tolerance = 2e-2 if dtype == BF16 else 1e-4
    torch.testing.assert_close(ours(), theirs(), rtol=tolerance, atol=tolerance)
    width = case.rank + case.rope_dim
    num_bytes = batch * length * width * dtype.itemsize
    flops = 2 * batch * length * heads * (width + case.rank)
    peak = Peak(FP32)
    read = reader(num_bytes)
    best = clock.fastest({"read": read, "peak": peak, "ours": ours, "theirs": theirs})
    matrix = best["peak"] * flops / peak.flops
    floor = max(best["read"], matrix)
    return (
        f"| {heads} {str(dtype).removeprefix('torch.')} | {batch} | {length} "
        f"| {best['read'] * 1e3:.3f} | {matrix * 1e3:.3f} | {best['ours'] * 1e3:.3f} "
        f"| {best['ours'] / floor:.2f} | {best['theirs'] / best['ours']:.1f} |"
    )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's queries and projections of one sequence: a suffix after a prefix in pages."""

    inputs: Inputs
    q_nope: Tensor  # [q, H, nope]
    kv_b: Tensor  # [H * (nope + v), R]
    scale: float

    def projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, nope, R] and W_UV [H, v, R]."""
        heads, nope = self.q_nope.shape[1:]
        w_uk, w_uv = self.kv_b.unflatten(0, (heads, -1)).split([nope, V_DIM], 1)
        return w_uk, w_uv

    def absorbed(self) -> Callable[[], Tensor]:
        """Attention to the latents between the two projections."""
        w_uk, w_uv = (w.contiguous() for w in self.projections())
        w_uv = w_uv.transpose(1, 2)
        _, *args = self.inputs.args()

        def run() -> Tensor:
            q_latent = torch.bmm(self.q_nope.transpose(0, 1), w_uk).transpose(0, 1)
            out = latent_attention(q_latent, *args, scale=self.scale, impl="cpp")
            return torch.bmm(out.transpose(0, 1), w_uv).transpose(0, 1)

        return run

    def expanded(self) -> Callable[[], Tensor]:
        """Causal over the suffix, over the prefix gathered and expanded, and merged."""
        inputs = self.inputs
        num_new, length = len(inputs.latent), int(inputs.seq_lens)
        q = torch.cat([self.q_nope, inputs.q_rope], 2)
        prefix = slots_of(inputs.page_table[0], length - num_new, inputs.pool.shape[1]).int()

        def attend(rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            latent, k_rope = rows.split([self.kv_b.shape[1], inputs.k_rope.shape[1]], 1)
            kv = (latent @ self.kv_b.T).unflatten(1, (q.shape[1], -1))
            k_nope, v = kv.split([self.q_nope.shape[2], V_DIM], 2)
            k = torch.cat([k_nope, k_rope[:, None].expand(-1, q.shape[1], -1)], 2)
            ends = (offsets([len(q)]), offsets([len(rows)]))
            return ragged_attention_with_lse(
                q, k, v, *ends, causal=causal, scale=self.scale, impl="cpp"
            )

        def run() -> Tensor:
            new = attend(torch.cat([inputs.latent, inputs.k_rope], 1), True)
            if not len(prefix):
                return new[0]
            old = attend(gather_latents(inputs.pool, prefix, impl="cpp"), False)
            return merge_states(*new, *old, impl="cpp")[0]

        return run


def make_layer(heads: int, num_new: int, prefix: int) -> Layer:
    case = Case(num_heads=heads, lengths=((num_new, prefix + num_new),))
    generator = torch.Generator().manual_seed(0)
    kv_b = torch.randn(heads * (case.nope_dim + V_DIM), case.rank, generator=generator)
    return Layer(
        inputs=make_inputs(case, unused=0.0),
        q_nope=torch.randn(num_new, heads, case.nope_dim, generator=generator),
        kv_b=kv_b * case.rank**-0.5,
        scale=case.scale,
    )


def crossover_line(heads: int, prefix: int, clock: Clock) -> str:
    """Expanded time / absorbed time for each length of the suffix."""
    ratios = []
    for num_new in SUFFIXES:
        layer = make_layer(heads, num_new, prefix)
        absorbed, expanded = layer.absorbed(), layer.expanded()
        torch.testing.assert_close(absorbed(), expanded(), rtol=1e-3, atol=1e-4)
        best = clock.fastest({"absorbed": absorbed, "expanded": expanded})
        ratios.append(f"{best['expanded'] / best['absorbed']:.2f}")
    return f"| {heads} | {prefix} | {' | '.join(ratios)} |"


def main() -> None:
    """Print both tables."""
    clock = clock_of(clock_arguments(__doc__.partition("\n")[0]).parse_args())
    print("| decode | batch | length | read ms | product ms | ms | / floor | torch / ours |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for heads, batch, length, dtype in DECODE:
        print(decode_line(heads, batch, length, dtype, clock), flush=True)
    print("\nexpanded / absorbed, float32, one sequence")
    print(f"| heads | prefix | {' | '.join(f'q = {q}' for q in SUFFIXES)} |")
    print(f"|---:|---:|{'---:|' * len(SUFFIXES)}")
    for heads in (16, 32):
        for prefix in PREFIXES:
            print(crossover_line(heads, prefix, clock), flush=True)


if __name__ == "__main__":
    main()
