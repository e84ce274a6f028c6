"""The ragged_attention op against a matrix product, and against torch's attention.

    python -m benchmarks.ragged_attention [--threads N] [--seconds S] [--cpu-time]

The heads are those of expanded multi-head latent attention, k and v slices of wider rows. torch's
attention gets dense, contiguous copies in the layout that it likes best; it is fast only where
values are as wide as keys, so that it is timed with values padded to that width too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import Peak
from benchmarks.timing import Clock, clock_arguments, clock_of
from tests.ops.ragged_attention.cases import Case, Inputs, make_inputs
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse

FP32, BF16 = torch.float32, torch.bfloat16
HEADS, HEAD_DIM, V_HEAD_DIM = 16, 192, 128
# Sequences, queries and keys of each, whether causal, dtype.
CALLS = (
    (1, 512, 512, True, FP32),
    (1, 2048, 2048, True, FP32),
    (8, 256, 256, True, FP32),
    (1, 512, 4096, False, FP32),
    (4, 64, 2048, False, FP32),
    (1, 2048, 2048, True, BF16),
    (1, 512, 4096, False, BF16),
)


def op(inputs: Inputs, causal: bool) -> Callable[[], Tensor]:
    """The op on k and v that lie side by side in one tensor."""
    k, v = torch.cat([inputs.k, inputs.v], 2).split([HEAD_DIM, V_HEAD_DIM], 2)
    args = (inputs.q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return lambda: ragged_attention_with_lse(
        *args, causal=causal, scale=HEAD_DIM**-0.5, impl="cpp"
    )[0]


def dense(inputs: Inputs, num_seqs: int, causal: bool, padded: bool) -> Callable[[], Tensor]:
    """torch's attention of sequences of equal lengths."""
    q, k, v = (
        x.unflatten(0, (num_seqs, -1)).transpose(1, 2).contiguous()
        for x in (inputs.q, inputs.k, inputs.v)
    )
    if padded:
        v = F.pad(v, (0, HEAD_DIM - V_HEAD_DIM)).contiguous()
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def line(
    num_seqs: int, num_q: int, num_k: int, causal: bool, dtype: torch.dtype, clock: Clock
) -> str:
    case = Case(
        num_heads=HEADS,
        num_k_heads=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=V_HEAD_DIM,
        lengths=((num_q, num_k),) * num_seqs,
    )
    inputs = make_inputs(case, dtype=dtype)
    ours = op(inputs, causal)
    sdpa, padded = (dense(inputs, num_seqs, causal, wide) for wide in (False, True))
    expected = sdpa().transpose(1, 2).flatten(0, 1)
    tolerance = 2e-2 if dtype == BF16 else 1e-4
    torch.testing.assert_close(ours(), expected, rtol=tolerance, atol=tolerance)
    peak = Peak(FP32)
    best = clock.fastest({"peak": peak, "ours": ours, "sdpa": sdpa, "padded": padded})
    pairs = num_q * (num_q + 1) / 2 if causal else num_q * num_k
    rate = 2 * num_seqs * HEADS * pairs * (HEAD_DIM + V_HEAD_DIM) / best["ours"]
    ceiling = peak.flops / best["peak"]
    kind = f"{'causal' if causal else 'all keys'} {str(dtype).removeprefix('torch.')}"
    return (
        f"| {kind} | {num_seqs} | {num_q} | {num_k} | {ceiling / 1e9:.0f} "
        f"| {best['ours'] * 1e3:.1f} | {rate / 1e9:.0f} | {100 * rate / ceiling:.0f} "
        f"| {best['sdpa'] / best['ours']:.2f} | {best['padded'] / best['ours']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    clock = clock_of(clock_arguments(__doc__.partition("\n")[0]).parse_args())
    print(
        "| 16 heads of 192 and 128 | sequences | queries | keys | fp32 FMA GF/s | ms | GF/s | %"
        " | SDPA / ours | padded SDPA / ours |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for call in CALLS:
        print(line(*call, clock), flush=True)


if __name__ == "__main__":
    main()
