"""The k best of short rows, as routers choose experts: the Triton op beside torch.topk.

    python -m benchmarks.triton_top_k

A time is that of one call in a captured graph; the fastest replay counts. Nothing is printed for a
shape unless both find the same.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.triton_kernels import microseconds
from torch_hybrid.ops.top_k import top_k

SHAPES = ((512, 10), (256, 8), (64, 6))  # experts, and how many of them each token takes
NUM_TOKENS = (1, 32, 256, 8192)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, float32\n")
    print("| experts | of a token | tokens | us | torch.topk us |\n|---:|---:|---:|---:|---:|")
    for num_experts, k in SHAPES:
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, num_experts, device="cuda").softmax(-1)
            assert torch.equal(top_k(x, k, impl="triton")[0], x.topk(k)[0])
            time = microseconds([partial(top_k, x, k, impl="triton")])
            torch_time = microseconds([partial(torch.topk, x, k)])
            print(f"| {num_experts} | {k} | {num_tokens} | {time:.1f} | {torch_time:.1f} |")


if __name__ == "__main__":
    main()
