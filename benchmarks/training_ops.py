"""Forward and backward of delta rules and experts on a CPU, beside transformers' in torch.

    python -m benchmarks.training_ops [--repeats N] [--device cuda [--ops selective_scan ...]]

Heads are those of the 225M models (models.py); q and k are normalised within. Times are CPU times
of one thread, user and system together, the least of a few runs by turns: other work on the machine
moves them little. Gradients of both are compared first.

On a GPU: heads of Qwen3-Next and Kimi-Linear, the other recurrences that train, and experts, in
bfloat16, beside flash-linear-attention, attention-gym, mamba-ssm and causal-conv1d where these are
installed, and transformers' experts by ``torch._grouped_mm``; fla's gated rule is FlashQLA's where
that is. Times are those in which a kernel runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

import torch_hybrid as th
from benchmarks.gpu.steps import kernels_of
from tests.functional.recurrence import offsets, packing
from tests.functional.rules import GATED, KIMI, Rule
from torch_hybrid.functional import (
    causal_conv1d,
    fused_experts,
    lightning_attention,
    mlstm,
    rg_lru,
    selective_scan,
    ssd,
    wkv,
)

# 2 x 512 and 8 x 128 tokens; heads of Qwen3-Next and of Kimi-Linear.
LENGTHS = ((512,) * 2, (128,) * 8)
RULES = {
    "gated delta rule, 8/16 x 128": Rule(
        function=GATED.function, op=GATED.op, by_channel=False,
        num_k_heads=8, num_v_heads=16, k_dim=128, v_dim=128,
    ),
    "Kimi delta attention, 8 x 128": Rule(
        function=KIMI.function, op=KIMI.op, by_channel=True,
        num_k_heads=8, num_v_heads=8, k_dim=128, v_dim=128,
    ),
}  # fmt: skip
LENGTHS_ON_A_GPU = ((8192,), (32768,), (1024,) * 8)
RULES_ON_A_GPU = {
    "gated delta rule, 16/32 x 128": Rule(
        function=GATED.function, op=GATED.op, by_channel=False,
        num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128,
    ),
    "Kimi delta attention, 32 x 128": Rule(
        function=KIMI.function, op=KIMI.op, by_channel=True,
        num_k_heads=32, num_v_heads=32, k_dim=128, v_dim=128,
    ),
}  # fmt: skip
# Experts, those of a token, D and I; on a GPU those of Qwen3-Next and Qwen3-30B-A3B.
EXPERTS = ((32, 4, 512, 256), (128, 8, 512, 64))
EXPERTS_ON_A_GPU = ((512, 10, 2048, 512), (128, 8, 2048, 768))
Step = Callable[[], list[Tensor]]
Outputs = Callable[..., Tensor]


def cpu_ms(step: Step) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def steps(rule: Rule, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, Step]:
    """Make a step of each contestant: transformers' takes sequences of one length as a batch."""
    xs = [x.requires_grad_() for x in rule.inputs(lengths, dtype)[:5]]
    weight = torch.randn(xs[2].shape).to(dtype)
    packed = packing(lengths)

    def ours() -> list[Tensor]:
        o, _ = rule.function(*xs, packed, qk_l2norm=True, output_final_state=False)
        return list(torch.autograd.grad((o * weight).sum(), xs))

    def theirs() -> list[Tensor]:
        batch = [x.unflatten(0, (len(lengths), -1)) for x in xs]
        o, _ = rule.chunks()(*batch, use_qk_l2norm_in_kernel=True)
        return list(torch.autograd.grad((o.flatten(0, 1) * weight).sum(), xs))

    return {"torch_hybrid": ours, "transformers": theirs}


def expert_steps(sizes: tuple[int, ...], num_tokens: int, dtype: torch.dtype) -> dict[str, Step]:
    """Make a step of each contestant."""
    inputs, by_whom = experts(sizes, num_tokens, dtype, "cpu")
    xs, dout = [x.requires_grad_() for x in inputs], torch.randn_like(inputs[0])

    def step(run: Outputs) -> list[Tensor]:
        return list(backward(run, xs, dout))

    return {who: partial(step, run) for who, run in by_whom.items()}


def experts(
    sizes: tuple[int, ...], num_tokens: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], dict[str, Outputs]]:
    """Make tokens, weights of a router, gate and up, and down; and functions of these."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    E, k, D, I = sizes  # noqa: E741 (the letter of the formulas)
    kinds = {"dtype": dtype, "device": device}
    x, gate_up, down = (
        torch.randn(shape, **kinds) * shape[-1] ** -0.5
        for shape in ((num_tokens, D), (E, 2 * I, D), (E, D, I))
    )
    weights, ids = torch.rand(num_tokens, E, **kinds).topk(k)

    def theirs(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        layer = SimpleNamespace(gate_up_proj=gate_up, down_proj=down, num_experts=E, has_gate=True)
        layer.has_bias = layer.is_transposed = layer.has_post_expert_norm = False
        layer._is_expert_parallel = False
        layer._apply_gate = lambda each: silu(each.chunk(2, -1)[0]) * each.chunk(2, -1)[1]
        return grouped_mm_experts_forward(layer, x, ids, weights)

    def ours(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return fused_experts(x, ids, weights, gate_up, down)

    return [x, weights, gate_up, down], {"torch_hybrid": ours, "transformers": theirs}


def contestants(rule: Rule, lengths: tuple[int, ...], device: str) -> dict[str, Outputs]:
    """Make functions of q, k, v, g and beta [T, ...]."""
    cu_seqlens = offsets(lengths).to(device, torch.int32)
    packed = th.Packing(cu_seqlens, len(lengths), num_tokens=sum(lengths))

    def ours(*xs: Tensor) -> Tensor:
        return rule.function(*xs, packed, qk_l2norm=True, output_final_state=False)[0]

    by_whom: dict[str, Outputs] = {"torch_hybrid": ours}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        rules = partial(
            chunk_kda if rule.by_channel else chunk_gated_delta_rule,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens.long() if len(lengths) > 1 else None,
        )
        by_whom["fla"] = lambda *xs: rules(*(x[None] for x in xs))[0][0]
    if importlib.util.find_spec("attn_gym") is not None:
        by_whom["attention-gym"] = of_attention_gym(rule, cu_seqlens if len(lengths) > 1 else None)
    return by_whom


def of_attention_gym(rule: Rule, cu_seqlens: Tensor | None) -> Outputs:
    """Make its function of q, k, v, g and beta, whose unit rows are an op before the rule."""
    from attn_gym.linear import chunk_gdn, chunk_kda, l2norm

    chunks = chunk_kda if rule.by_channel else chunk_gdn

    def theirs(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        xs = l2norm(q[None]), l2norm(k[None]), *(x[None] for x in rest)
        return chunks(*xs, cu_seqlens=cu_seqlens)[0][0]

    return theirs


def device_us(run: Callable[[], object], repeats: int) -> float:
    """Measure how long any kernel of a run is busy, which is not the sum where two overlap."""
    for _ in range(3):
        run()
    return min(kernels_of(run).busy_ms for _ in range(repeats)) * 1e3


def backward(run: Outputs, xs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*xs), xs, dout)


def on_a_gpu(repeats: int, ops: list[str]) -> None:
    print(torch.cuda.get_device_name())
    print("| op | tokens | by | forward, us | with backward, us |")
    print("|---|---|---|---|---|")
    for lengths in LENGTHS_ON_A_GPU:
        for name, inputs, like, by_whom in ops_on(lengths, "cuda"):
            if ops and not name.startswith(tuple(ops)):
                continue
            xs = [x.cuda().requires_grad_() for x in inputs]
            dout = torch.randn_like(xs[like])
            for who, run in by_whom.items():
                with torch.no_grad():
                    forward = f"{device_us(partial(run, *xs), repeats):.0f}"
                try:
                    whole = f"{device_us(partial(backward, run, xs, dout), repeats):.0f}"
                except RuntimeError as refusal:  # fla's, on Hopper before Triton 3.7.1
                    whole = str(refusal)
                tokens = f"{len(lengths)} x {lengths[0]}"
                print(f"| {name} | {tokens} | {who} | {forward} | {whole} |", flush=True)


def ops_on(
    lengths: tuple[int, ...], device: str
) -> Iterator[tuple[str, list[Tensor], int, dict[str, Outputs]]]:
    """Yield each op's name and inputs, which of them its outputs are like, and who computes it."""
    for name, rule in RULES_ON_A_GPU.items():
        inputs = rule.inputs(lengths, torch.bfloat16)[:5]
        g = logsigmoid(torch.rand_like(inputs[3]))  # without extremes, as peers time theirs
        rates = {"": 1.0, ", states last": 1e-3, ", a state lasts": torch.ones(rule.num_v_heads)}
        rates[", a state lasts"][0] = 1e-3
        for kind, rate in ({"": 1.0} if rule.by_channel else rates).items():
            xs = [*inputs[:3], g * rate, inputs[4]]
            yield name + kind, xs, 2, contestants(rule, lengths, device)
    packed = th.Packing(offsets(lengths).to(device), len(lengths), num_tokens=sum(lengths))
    T, H, P, G, N = sum(lengths), 64, 64, 8, 128
    x, B, C = (torch.randn(T, *dims).bfloat16() for dims in ((H, P), (G, N), (G, N)))
    heads = -4 * torch.rand(H), B, C, torch.rand(H), torch.randn(H) - 2

    def by(function: Callable[..., tuple[Tensor, Tensor | None]]) -> dict[str, Outputs]:
        return {"torch_hybrid": lambda *xs: function(*xs, packed, output_final_state=False)[0]}

    inputs = [x, torch.randn(T, H).bfloat16(), *heads]
    yield f"ssd, {H} x {P}, {G} groups of {N}", inputs, 0, by(ssd)
    # Heads of MiniMax-01, and of xLSTM-7b.
    for H, K, V, function in ((64, 128, 128, lightning_attention), (8, 256, 512, mlstm)):
        qkv = [torch.randn(T, H, width).bfloat16() for width in (K, K, V)]
        gates = [torch.randn(T, H), torch.randn(T, H) + 4]
        if function is lightning_attention:
            gates = [torch.logspace(-3, 0, H)]
        yield f"{function.__name__}, {H} x {K}, V {V}", [*qkv, *gates], 2, by(function)
    E, N = 8192, 16
    x, dt, z = (torch.randn(T, E).bfloat16() for _ in range(3))
    B, C = (torch.randn(T, 1, N).bfloat16() for _ in range(2))
    A = -torch.arange(1, N + 1, dtype=torch.float32, device="cpu").repeat(E, 1)
    inputs = [x, dt, A, B, C, torch.rand(E), z, torch.randn(E) - 4]
    yield f"selective_scan, {E} channels of {N}", inputs, 0, scans(packed)
    inputs = [x, torch.randn(E, 4).bfloat16(), torch.randn(E).bfloat16()]
    yield f"causal_conv1d, {E} channels", inputs, 0, convolutions(packed)
    # Channels of RecurrentGemma-2B and of RWKV-4-7B.
    E, num_heads = 2560, 10
    x, gates = (
        torch.randn(T, E).bfloat16(),
        torch.randn(T, num_heads, 2 * E // num_heads).bfloat16(),
    )
    yield f"rg_lru, {E} channels", [x, gates, -8 * softplus(torch.randn(E))], 0, by(rg_lru)
    E = 4096
    k, v = torch.randn(2, T, E).bfloat16()
    yield f"wkv, {E} channels", [k, v, -torch.randn(E).exp(), torch.randn(E)], 0, by(wkv)
    for sizes in EXPERTS_ON_A_GPU:
        inputs, by_whom = experts(sizes, T, torch.bfloat16, device)
        by_whom["transformers, compiled"] = torch.compile(by_whom["transformers"])
        yield "experts, {} of {}, {} to {}".format(*sizes[1::-1], *sizes[2:]), inputs, 0, by_whom


def scans(packed: th.Packing) -> dict[str, Outputs]:
    """Make functions of x, dt, A, B, C, D, z and dt_bias [T, ...]; mamba-ssm takes one sequence."""

    def ours(*xs: Tensor) -> Tensor:
        return selective_scan(*xs, packing=packed, output_final_state=False)[0]

    if importlib.util.find_spec("mamba_ssm") is None:
        return {"torch_hybrid": ours}
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def theirs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *own: Tensor) -> Tensor:
        D, z, bias = own
        x, dt, z, B, C = (each.movedim(0, -1)[None] for each in (x, dt, z, B, C))
        return selective_scan_fn(x, dt, A, B, C, D, z, bias, delta_softplus=True)[0].T

    return {"torch_hybrid": ours, "mamba-ssm": theirs}


def convolutions(packed: th.Packing) -> dict[str, Outputs]:
    """Make functions of x, weight and bias."""

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = (x, weight, bias, packed, None, "silu")
        return causal_conv1d(*given, output_final_state=False)[0]

    if importlib.util.find_spec("causal_conv1d") is None:
        return {"torch_hybrid": ours}
    from causal_conv1d import causal_conv1d_fn

    ends = packed.cu_seqlens[1:]
    token = torch.arange(int(ends[-1]), device="cuda")
    seq_idx = None if len(ends) == 1 else torch.searchsorted(ends, token, right=True).int()[None]

    def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv1d_fn(x.T[None], weight, bias, seq_idx, activation="silu")[0].T

    return {"torch_hybrid": ours, "causal-conv1d": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ops", nargs="*", default=[], help="beginnings of names; all by default")
    options = parser.parse_args()
    repeats: int = options.repeats
    if options.device == "cuda":
        on_a_gpu(repeats, options.ops)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| op | tokens | dtype | torch_hybrid, ms | transformers, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for name, tokens, dtype, each in contests():
        rtol = 1e-3 if dtype == torch.float32 else 3e-2
        for a, b in zip(*(step() for step in each.values()), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())
        times: dict[str, list[float]] = {who: [] for who in each}
        for _ in range(repeats):
            for who, step in each.items():
                times[who].append(cpu_ms(step))
        a, b = (min(times[who]) for who in each)
        short = str(dtype).removeprefix("torch.")
        print(f"| {name} | {tokens} | {short} | {a:.0f} | {b:.0f} | {b / a:.1f} |", flush=True)


def contests() -> Iterator[tuple[str, str, torch.dtype, dict[str, Step]]]:
    """Yield what is computed, of how many tokens, in what dtype, and a step of each contestant."""
    dtypes = torch.float32, torch.bfloat16
    for (name, rule), lengths, dtype in product(RULES.items(), LENGTHS, dtypes):
        yield name, f"{len(lengths)} x {lengths[0]}", dtype, steps(rule, lengths, dtype)
    for sizes, num_tokens, dtype in product(EXPERTS, (256, 1024), dtypes):
        name = "experts, {} of {}, {} to {}".format(*sizes[1::-1], *sizes[2:])
        yield name, str(num_tokens), dtype, expert_steps(sizes, num_tokens, dtype)


if __name__ == "__main__":
    main()
