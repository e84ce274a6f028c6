"""The Triton kernels of an extend step, and of latents, against the floors of their GPU.

    python -m benchmarks.triton_extend

The floor of a call is the larger of two times: of the bytes that it must move, at the rate of a
large pass through memory, and of the floating point operations of the usual form at chunks of 64,
at the rate of a bfloat16 product of 8192^3; both rates are measured first. A time is that of one
call in a captured graph; the fastest replay counts. Nothing is printed for a shape unless the
result agrees with implementation "torch" on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.triton_kernels import BF16, Call, copy_rate, microseconds, offsets
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.gated_delta_rule import chunk_gated_delta_rule
from torch_hybrid.ops.kimi_delta_attention import chunk_kimi_delta_attention
from torch_hybrid.ops.latent_attention import latent_attention
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse
from torch_hybrid.ops.ssd import chunk_ssd

NUM_TOKENS = 8192
CHUNK = 64
PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A call, its state argument if it has one, and what it must move and compute."""

    name: str
    num_seqs: int
    call: Call
    state: int | None = None
    num_bytes: float
    flops: float = 0.0


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda")


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def slots(num_seqs: int) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens, initial_indices and state_indices of sequences of equal lengths."""
    indices = torch.arange(1, num_seqs + 1, dtype=torch.int32, device="cuda")
    return offsets(num_seqs, NUM_TOKENS // num_seqs), indices, indices


def delta_rule(num_seqs: int, *, channels: bool) -> Task:
    """Qwen3-Next's layer, or Kimi-Linear's."""
    num_k_heads, num_heads, dim = 32 if channels else 16, 32, 128
    qkv = randn(NUM_TOKENS, 2 * num_k_heads + num_heads, dim)
    state = randn(num_seqs + 1, num_heads, dim, dim, dtype=torch.float32)
    decays = (NUM_TOKENS, num_heads, *([dim] if channels else []))
    op = chunk_kimi_delta_attention if channels else chunk_gated_delta_rule
    call = partial(
        op,
        *qkv.split([num_k_heads, num_k_heads, num_heads], 1),
        -rand(*decays),
        rand(NUM_TOKENS, num_heads),
        state,
        *slots(num_seqs),
        scale=dim**-0.5,
        qk_l2norm=True,
        chunk_size=CHUNK,
    )
    per_chunk = 6 * CHUNK * dim**2 + 10 * CHUNK**2 * dim + 2 / 3 * CHUNK**3
    name = "KDA H 32 K 128 V 128" if channels else "GDN H 16 HV 32 K 128 V 128"
    num_bytes = 2 * (qkv.numel() + NUM_TOKENS * num_heads * dim) + 8 * state[1:].numel()
    return Task(
        name=name,
        num_seqs=num_seqs,
        call=call,
        state=5,
        num_bytes=num_bytes + 4 * NUM_TOKENS * num_heads * (dim if channels else 2),
        flops=NUM_TOKENS // CHUNK * num_heads * per_chunk,
    )


def ssd(num_seqs: int, name: str, num_groups: int, num_heads: int, k_dim: int, v_dim: int) -> Task:
    """Mamba2's recurrence."""
    sizes = [num_heads * v_dim, num_groups * k_dim, num_groups * k_dim]
    vkq = randn(NUM_TOKENS, sum(sizes))
    v, k, q = vkq.split(sizes, 1)
    state = randn(num_seqs + 1, num_heads, v_dim, k_dim, dtype=torch.float32)
    dt = rand(NUM_TOKENS, num_heads)
    call = partial(
        chunk_ssd,
        q.unflatten(1, (num_groups, k_dim)),
        k.unflatten(1, (num_groups, k_dim)),
        v.unflatten(1, (num_heads, v_dim)),
        -dt,
        dt,
        rand(num_heads),
        state,
        *slots(num_seqs),
        scale=k_dim**-0.5,
        chunk_size=CHUNK,
    )
    per_head = 4 * CHUNK * k_dim * v_dim + 2 * CHUNK**2 * v_dim
    flops = num_heads * per_head + num_groups * 2 * CHUNK**2 * k_dim
    return Task(
        name=f"SSD {name} G {num_groups} H {num_heads} K {k_dim} V {v_dim}",
        num_seqs=num_seqs,
        call=call,
        state=6,
        num_bytes=2 * (vkq.numel() + v.numel()) + 8 * dt.numel() + 8 * state[1:].numel(),
        flops=NUM_TOKENS // CHUNK * flops,
    )


def lightning(num_seqs: int, num_heads: int, dim: int) -> Task:
    """Ring-2.5's or MiniMax-01's: each head decays at a constant rate."""
    qkv = randn(NUM_TOKENS, 3 * num_heads, dim)
    slopes = 2 ** (-8 * torch.arange(1, num_heads + 1, device="cuda") / num_heads)
    state = randn(num_seqs + 1, num_heads, dim, dim, dtype=torch.float32)
    call = partial(
        chunk_ssd,
        *qkv.split(num_heads, 1),
        -slopes.expand(NUM_TOKENS, num_heads),
        None,
        None,
        state,
        *slots(num_seqs),
        scale=dim**-0.5,
        chunk_size=CHUNK,
    )
    return Task(
        name=f"lightning H {num_heads} K {dim} V {dim}",
        num_seqs=num_seqs,
        call=call,
        state=6,
        num_bytes=2 * 4 * NUM_TOKENS * num_heads * dim + 8 * state[1:].numel(),
        flops=NUM_TOKENS // CHUNK * num_heads * (4 * CHUNK * dim**2 + 4 * CHUNK**2 * dim),
    )


def convolution(num_seqs: int) -> Task:
    """That of Qwen3-Next, on a slice of its projection."""
    channels, width = 8192, 4
    conv_state = randn(num_seqs + 1, width - 1, channels)
    call = partial(
        causal_conv1d,
        randn(NUM_TOKENS, channels + 4096)[:, :channels],
        randn(channels, width),
        None,
        conv_state,
        *slots(num_seqs),
        activation="silu",
    )
    num_bytes = 4 * NUM_TOKENS * channels + 4 * conv_state[1:].numel()
    name = "convolution C 8192 W 4"
    return Task(name=name, num_seqs=num_seqs, call=call, state=3, num_bytes=num_bytes)


def latents(num_seqs: int, num_heads: int, length: int, num_new: int) -> Task:
    """Absorbed attention to pages of latents."""
    pages, num_tokens = length // PAGE_SIZE, num_seqs * num_new
    table = 1 + torch.randperm(num_seqs * pages, device="cuda").view(num_seqs, pages)
    position = torch.arange(length - num_new, length, device="cuda")
    slot_mapping = table[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    pool = randn(num_seqs * pages + 1, PAGE_SIZE, 576)
    call = partial(
        latent_attention,
        randn(num_tokens, num_heads, 512),
        randn(num_tokens, num_heads, 64),
        randn(num_tokens, 512),
        randn(num_tokens, 64),
        pool,
        offsets(num_seqs, num_new),
        torch.full((num_seqs,), length, dtype=torch.int32, device="cuda"),
        table.int(),
        slot_mapping.flatten().int(),
        scale=192**-0.5,
    )
    return Task(
        name=f"latents H {num_heads}, {num_new} of {length}",
        num_seqs=num_seqs,
        call=call,
        num_bytes=2 * (pool[1:].numel() + num_tokens * num_heads * 1088),
        flops=2 * num_tokens * num_heads * 1088 * length,
    )


def ragged(num_seqs: int, num_heads: int) -> Task:
    """Expanded latent attention of whole sequences."""
    length = NUM_TOKENS // num_seqs
    kv = randn(NUM_TOKENS, num_heads, 320)

    def call(*, impl: str) -> Tensor:
        q, k, v, index = query, kv[..., :192], kv[..., 192:], offsets_of
        return ragged_attention_with_lse(
            q, k, v, index, index, causal=True, scale=192**-0.5, impl=impl
        )[0]

    query, offsets_of = randn(NUM_TOKENS, num_heads, 192), offsets(num_seqs, length)
    return Task(
        name=f"ragged H {num_heads} 192 / 128",
        num_seqs=num_seqs,
        call=call,
        num_bytes=2 * NUM_TOKENS * num_heads * (192 + 320 + 128),
        flops=num_seqs * num_heads * 320 * length**2,
    )


def tasks() -> Iterator[Task]:
    for num_seqs in (1, 8, 16):
        yield convolution(num_seqs)
        yield delta_rule(num_seqs, channels=False)
        yield delta_rule(num_seqs, channels=True)
        yield ssd(num_seqs, "Bamba", 1, 128, 128, 64)
        yield ssd(num_seqs, "Falcon-H1", 1, 24, 256, 64)
        yield lightning(num_seqs, 32, 128)
        yield lightning(num_seqs, 64, 96)
    for num_heads, num_seqs, length, num_new in (
        (16, 32, 16384, 1),
        (16, 1, 16384, 1),
        (32, 64, 8192, 1),
        (32, 1, 65536, 1),
        (64, 32, 16384, 1),
        (128, 32, 16384, 1),
        (32, 4, 8192, 256),
    ):
        yield latents(num_seqs, num_heads, length, num_new)
    yield ragged(1, 32)
    yield ragged(4, 32)


def check(task: Task) -> None:
    """The kernel agrees with the torch form, from the same state where the call changes one."""
    if task.state is None:
        out, expected = task.call(impl="triton"), task.call(impl="torch")
    else:
        args = list(task.call.args)
        args[task.state] = args[task.state].clone()
        expected = task.call.func(*args, **task.call.keywords, impl="torch")
        out = task.call(impl="triton")
    error, scale = (out - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 2e-2 * scale, f"{task.name}: error {error:.1e}, outputs up to {scale:.1e}"


def product_rate() -> float:
    """Floating point operations per microsecond of a large bfloat16 product."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    return 2 * 8192**3 / microseconds([partial(torch.mm, a, b)])


def measure_ceilings() -> tuple[float, float]:
    """Bytes and floating point operations per microsecond, measured now and printed."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.manual_seed(0)
    bytes_rate, flops_rate = copy_rate(), product_rate()
    print(f"{torch.cuda.get_device_name()}, {bytes_rate / 1e6:.2f} TB/s and "
          f"{flops_rate / 1e6:.0f} TFLOP/s\n")  # fmt: skip
    return bytes_rate, flops_rate


def main() -> None:
    bytes_rate, flops_rate = measure_ceilings()
    print("| bfloat16 | sequences | us | bytes us | FLOPs us | ratio to the larger |")
    print("|---|---:|---:|---:|---:|---:|")
    for task in tasks():
        check(task)
        time = microseconds([partial(task.call, impl="triton")])
        moving, computing = task.num_bytes / bytes_rate, task.flops / flops_rate
        print(f"| {task.name} | {task.num_seqs} | {time:.1f} | {moving:.1f} | {computing:.1f} "
              f"| {time / max(moving, computing):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
