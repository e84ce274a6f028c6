"""The Triton kernels against the memory of the GPU they run on, and against torch's attention.

    python -m benchmarks.triton_kernels

The floor of a call is the bytes that it must move, at the rate of a large pass through memory
measured first. A time is that of one call among several in a captured graph, which take turns on
different states or pages, so that the L2 cache holds none of them; the fastest replay counts.
Nothing is printed for a shape unless the result agrees with implementation "torch" on the same
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_hybrid.ops.gated_delta_rule import recurrent_gated_delta_rule
from torch_hybrid.ops.kimi_delta_attention import recurrent_kimi_delta_attention
from torch_hybrid.ops.paged_attention import paged_attention
from torch_hybrid.ops.ssd import recurrent_ssd

BF16 = torch.bfloat16
# What a round of calls touches at least, to leave nothing in L2 for the next round.
ROUND_BYTES = 400_000_000

# (key heads, value heads, K, V), sequences, tokens of each
DELTA_RULE = [
    *(((16, 32, 128, 128), num_seqs, 1) for num_seqs in (1, 8, 64, 256)),
    ((16, 32, 128, 128), 64, 4),
    ((30, 30, 96, 192), 64, 1),
]
KIMI = [
    *(((32, 32, 128, 128), num_seqs, 1) for num_seqs in (1, 8, 64, 256)),
    ((32, 32, 128, 128), 64, 4),
]
# (groups, heads, K, V), sequences, tokens of each
SSD = [
    *(((1, 128, 128, 64), num_seqs, 1) for num_seqs in (1, 8, 64)),
    ((1, 128, 128, 64), 64, 4),
    ((1, 24, 256, 64), 64, 1),
]
# (query heads, key heads, D), sequences, length, new tokens of each
ATTENTION = [
    *(
        ((16, 2, 256), num_seqs, length, 1)
        for num_seqs, length in ((1, 8192), (1, 65536), (8, 1024), (8, 8192), (64, 1024))
    ),
    ((16, 2, 256), 64, 8192, 1),
    ((16, 2, 256), 256, 2048, 1),
    ((32, 8, 128), 64, 2048, 1),
    ((16, 2, 256), 64, 1024, 4),
]
EXTEND = [((16, 2, 256), 1, 2048), ((16, 2, 256), 4, 2048), ((32, 8, 128), 4, 2048)]
PAGE_SIZE = 16

Call = Callable[..., Tensor]


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one call, of as many in a captured graph."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    rounds = math.ceil(8 / len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / (rounds * len(calls))


def copy_rate() -> float:
    """Bytes read and written per microsecond by a kernel that passes 2 GB through."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([partial(torch.neg, source, out=target)])


def offsets(num_seqs: int, num_tokens: int) -> Tensor:
    return torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * num_tokens


def delta_rule_calls(
    op: Call, heads: tuple[int, int, int, int], num_seqs: int, num_new: int
) -> tuple[list[Call], float]:
    """Calls that take turns on different slots, each ``call(impl=...)``; bytes of one."""
    num_k_heads, num_v_heads, k_dim, v_dim = heads
    num_tokens, k_size, v_size = num_seqs * num_new, num_k_heads * k_dim, num_v_heads * v_dim
    state_bytes = 2 * 4 * num_seqs * v_size * k_dim
    num_calls = math.ceil(ROUND_BYTES / state_bytes)
    state = torch.randn(num_calls * num_seqs + 1, num_v_heads, v_dim, k_dim, device="cuda")
    qkv = torch.randn(num_tokens, 2 * k_size + v_size, device="cuda", dtype=BF16)
    q, k, v = qkv.split([k_size, k_size, v_size], 1)
    channels = (k_dim,) if op is recurrent_kimi_delta_attention else ()
    g = -torch.rand(num_tokens, num_v_heads, *channels, device="cuda")
    slots = torch.randperm(num_calls * num_seqs, device="cuda").int() + 1
    calls = [
        partial(
            op,
            q.unflatten(1, (num_k_heads, k_dim)),
            k.unflatten(1, (num_k_heads, k_dim)),
            v.unflatten(1, (num_v_heads, v_dim)),
            g,
            torch.rand(num_tokens, num_v_heads, device="cuda"),
            state,
            offsets(num_seqs, num_new),
            indices,
            indices,
            scale=k_dim**-0.5,
            qk_l2norm=True,
        )
        for indices in slots.split(num_seqs)
    ]
    return calls, state_bytes + 2 * (qkv.numel() + num_tokens * v_size) + g.nbytes


def ssd_calls(
    heads: tuple[int, int, int, int], num_seqs: int, num_new: int
) -> tuple[list[Call], float]:
    """Calls that take turns on different slots, each ``call(impl=...)``; bytes of one."""
    num_groups, num_heads, k_dim, v_dim = heads
    num_tokens, k_size, v_size = num_seqs * num_new, num_groups * k_dim, num_heads * v_dim
    state_bytes = 2 * 4 * num_seqs * v_size * k_dim
    num_calls = math.ceil(ROUND_BYTES / state_bytes)
    state = torch.randn(num_calls * num_seqs + 1, num_heads, v_dim, k_dim, device="cuda")
    vkq = torch.randn(num_tokens, v_size + 2 * k_size, device="cuda", dtype=BF16)
    v, k, q = vkq.split([v_size, k_size, k_size], 1)
    dt = torch.rand(num_tokens, num_heads, device="cuda")
    slots = torch.randperm(num_calls * num_seqs, device="cuda").int() + 1
    calls = [
        partial(
            recurrent_ssd,
            q.unflatten(1, (num_groups, k_dim)),
            k.unflatten(1, (num_groups, k_dim)),
            v.unflatten(1, (num_heads, v_dim)),
            -dt,
            dt,
            torch.ones(num_heads, device="cuda"),
            state,
            offsets(num_seqs, num_new),
            indices,
            indices,
            scale=k_dim**-0.5,
        )
        for indices in slots.split(num_seqs)
    ]
    return calls, state_bytes + 2 * (vkq.numel() + num_tokens * v_size)


def attention_calls(
    heads: tuple[int, int, int], num_seqs: int, length: int, num_new: int
) -> tuple[list[Call], float]:
    """Calls that take turns on different pages, each ``call(impl=...)``; bytes of one."""
    num_q_heads, num_kv_heads, head_dim = heads
    pages = math.ceil(length / PAGE_SIZE)
    kv_bytes = 4 * num_seqs * length * num_kv_heads * head_dim
    num_calls = math.ceil(ROUND_BYTES / kv_bytes)
    num_pages = num_calls * num_seqs * pages
    kv = torch.randn(2, num_pages + 1, PAGE_SIZE, num_kv_heads, head_dim, device="cuda", dtype=BF16)
    num_heads = num_q_heads + 2 * num_kv_heads
    qkv = torch.randn(num_seqs * num_new, num_heads, head_dim, device="cuda", dtype=BF16)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    tables = (torch.randperm(num_pages, device="cuda") + 1).view(num_calls, num_seqs, pages)
    position = torch.arange(length - num_new, length, device="cuda")
    slots = tables[:, :, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    calls = [
        partial(
            paged_attention,
            q,
            k,
            v,
            kv,
            offsets(num_seqs, num_new),
            torch.full((num_seqs,), length, dtype=torch.int32, device="cuda"),
            table.int(),
            slot.flatten().int(),
            scale=head_dim**-0.5,
        )
        for table, slot in zip(tables, slots, strict=True)
    ]
    return calls, kv_bytes


def check(call: Call, *, state: int | None = None) -> None:
    """The kernel agrees with the torch form, from the same state where the call changes one."""
    args = list(call.args)
    if state is not None:
        args[state] = args[state].clone()
    expected = call.func(*args, **call.keywords, impl="torch")
    out = call(impl="triton")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def timed(calls: Sequence[Call]) -> float:
    return microseconds([partial(call, impl="triton") for call in calls])


def extend_rates(heads: tuple[int, int, int], num_seqs: int, length: int) -> tuple[float, float]:
    """Microseconds of the kernels, and of torch's causal attention on dense tensors."""
    num_q_heads, num_kv_heads, head_dim = heads
    calls, _ = attention_calls(heads, num_seqs, length, length)
    check(calls[0])
    q, k, v = (
        torch.randn(num_seqs, count, length, head_dim, device="cuda", dtype=BF16)
        for count in (num_q_heads, num_kv_heads, num_kv_heads)
    )
    dense = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return timed(calls), microseconds([dense])


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, read and write at {rate / 1e6:.2f} TB/s\n")
    print("| decode, bfloat16 | sequences | tokens each | length | us | floor us | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    rules = [
        *(("delta rule", recurrent_gated_delta_rule, *shape) for shape in DELTA_RULE),
        *(("Kimi delta attention", recurrent_kimi_delta_attention, *shape) for shape in KIMI),
    ]
    for rule, op, heads, num_seqs, num_new in rules:
        calls, num_bytes = delta_rule_calls(op, heads, num_seqs, num_new)
        check(calls[0], state=5)
        time, floor = timed(calls), num_bytes / rate
        name = f"{rule} H {heads[0]} HV {heads[1]} K {heads[2]} V {heads[3]}"
        print(f"| {name} | {num_seqs} | {num_new} | - | {time:.1f} | {floor:.1f} "
              f"| {time / floor:.2f} |")  # fmt: skip
    for heads, num_seqs, num_new in SSD:
        calls, num_bytes = ssd_calls(heads, num_seqs, num_new)
        check(calls[0], state=6)
        time, floor = timed(calls), num_bytes / rate
        name = f"ssd G {heads[0]} H {heads[1]} K {heads[2]} V {heads[3]}"
        print(f"| {name} | {num_seqs} | {num_new} | - | {time:.1f} | {floor:.1f} "
              f"| {time / floor:.2f} |")  # fmt: skip
    for heads, num_seqs, length, num_new in ATTENTION:
        calls, num_bytes = attention_calls(heads, num_seqs, length, num_new)
        check(calls[0])
        time, floor = timed(calls), num_bytes / rate
        name = f"attention {heads[0]}/{heads[1]} x {heads[2]}"
        print(f"| {name} | {num_seqs} | {num_new} | {length} | {time:.1f} | {floor:.1f} "
              f"| {time / floor:.2f} |")  # fmt: skip
    print("\n| extend, bfloat16 | sequences | tokens each | us | TFLOP/s | SDPA us |")
    print("|---|---:|---:|---:|---:|---:|")
    for heads, num_seqs, length in EXTEND:
        time, dense = extend_rates(heads, num_seqs, length)
        tflops = 2 * num_seqs * heads[0] * heads[2] * length**2 / time / 1e6
        name = f"attention {heads[0]}/{heads[1]} x {heads[2]}"
        print(f"| {name} | {num_seqs} | {length} | {time:.0f} | {tflops:.0f} | {dense:.0f} |")


if __name__ == "__main__":
    main()
