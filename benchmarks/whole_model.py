"""A published model of 80 billion parameters on one GPU: Qwen3-Next's real configuration, with
random weights of 8 bits that are made on the device.

    python -m benchmarks.whole_model [--layers 48] [--json FILE] [--markdown FILE]

Needs a CUDA device with 110 GB or more. First the parts of a layer are compared with their
dequantized twins; then logits must be finite. A step's floor is the larger of two times: of the
bytes that it must move at the rate of a large pass through memory, and of its FLOPs at the rate of
a bfloat16 product of 8192^3 (of 8 bits, tensor cores do twice as many). Tokens per second are those
of an engine, its host's time within.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.floor import step_bytes, step_flops
from benchmarks.fp8_models import make_fp8_model
from benchmarks.gpu.clock import Rates, measure_rates
from benchmarks.gpu.steps import CONFIG, device_ms, engine_decode_ms, random_prompts
from benchmarks.mixers import Row
from benchmarks.results import Results, Target
from torch_hybrid import Engine, HybridModel, Runner
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.ops.formats.block_scales import dequantized
from torch_hybrid.ops.fused_experts import fused_experts

NUM_LAYERS = 48
BATCHES = (1, 8, 32, 128)
PREFILLS = (1024, 8192, 32768)
CONTEXT, ROOM = 1024, 128  # tokens of a sequence that decodes, and that it may grow by
MAX_TOKENS = 8192
# Of the largest result. Where rows are rounded to 8 bits too, they keep 4 significant bits.
TOLERANCES = {"triton_fp8": 0.08, "triton": 0.02, "torch": 0.02}
GOALS = {1: 250.0, 32: 3000.0}  # tokens per second


def make_model(num_layers: int) -> HybridModel:
    """All of its weights random, most of them in 8 bits."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(**CONFIG | {"num_hidden_layers": num_layers})
    return make_fp8_model(config, torch.device("cuda"))


def twin_errors(model: HybridModel) -> Iterator[tuple[str, str, float]]:
    """Of parts of the first layer: name, implementation, and the error against what weights are
    worth in bfloat16, of the largest result."""
    layer = model.layers[0]
    parts: dict[str, nn.Module] = {
        "input": layer.linear_attn.mixer.in_proj.parts[0],  # type: ignore[union-attr, index]
        "output": layer.linear_attn.mixer.out_proj,  # type: ignore[union-attr]
        "experts": layer.mlp.experts,  # type: ignore[union-attr]
    }
    for num_rows in (1, 32, 1024):
        for name, part in parts.items():
            given = _inputs(part, num_rows)
            exact = _twin(part)(*given).float()
            error = (part(*given).float() - exact).abs().max() / exact.abs().max()
            yield f"{name}, {num_rows} rows", part.choice.impl, error.item()  # type: ignore[union-attr]


def _inputs(part: Any, num_rows: int) -> list[Tensor]:
    depth = part.in_features if isinstance(part, ScaledLinear) else part.down_proj.shape[1]
    x = torch.randn(num_rows, depth, device="cuda", dtype=part.dtype)
    if isinstance(part, ScaledLinear):
        return [x]
    scores = torch.randn(num_rows, part.down_proj.shape[0], device="cuda")
    weights, ids = scores.softmax(1).topk(CONFIG["num_experts_per_tok"])
    return [x, ids, weights]


def _twin(part: Any) -> Callable[..., Tensor]:
    if isinstance(part, ScaledLinear):
        weight = dequantized(part.weight, part.scales, part.dtype)
        return lambda x: nn.functional.linear(x, weight)
    assert isinstance(part, FusedExperts)
    gate_up = torch.stack(
        [
            dequantized(weight, scales, part.dtype, num_parts=2)
            for weight, scales in zip(part.gate_up_proj, part.gate_up_scales, strict=True)
        ]
    )
    down = dequantized(part.down_proj, part.down_scales, part.dtype)
    return partial(_bf16_experts, gate_up, down)


def _bf16_experts(gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return fused_experts(x, ids, weights, gate_up, down, activation="silu", impl="triton")


def measure(model: HybridModel, results: Results, rates: Rates) -> None:
    """Add a line for each kind of step."""
    start = time.perf_counter()
    runner = Runner(
        model,
        max_seqs=BATCHES[-1] + 1,
        max_tokens=MAX_TOKENS,
        kv_tokens=BATCHES[-1] * (CONTEXT + ROOM) + PREFILLS[-1],
        cuda_graphs="on",
    )
    runner.warm_up()
    _say(f"warm after {time.perf_counter() - start:.0f} s")
    for count in BATCHES:
        floor = rates.floor(*_costs(model, [Row(1, CONTEXT)] * count)) / 1e3
        with Engine(runner, eos_token_ids=[]) as engine:
            prompts = random_prompts(count, CONTEXT, runner.vocab_size)
            took = engine_decode_ms(engine, prompts, rounds=64)
        rate = count / took * 1e3
        _line(results, f"decode {count}", took, floor, rate)
        if count in GOALS:
            name = f"tokens/s of {count} together"
            goal = Target(
                name=name, measured=rate, limit=GOALS[count], at_least=True, unit=" tokens/s"
            )
            results.targets.append(goal)
    for length in PREFILLS:
        chunks = [Row(min(MAX_TOKENS, length - a), a) for a in range(0, length, MAX_TOKENS)]
        floor = sum(rates.floor(*_costs(model, [chunk])) for chunk in chunks) / 1e3
        [prompt] = random_prompts(1, length, runner.vocab_size)
        if not prefill(runner, prompt).isfinite().all():
            raise ValueError(f"prefill {length}: logits are not finite")
        took = device_ms(partial(prefill, runner, prompt))
        _line(results, f"prefill {length}", took, floor, length / took * 1e3)


def _costs(model: HybridModel, rows: Sequence[Row]) -> tuple[float, float]:
    return step_bytes(model, rows), step_flops(model, rows)


def _line(results: Results, name: str, took: float, floor: float, rate: float) -> None:
    results.add(name, took, floor, took / floor, rate)
    _say(f"{name}: {took:.2f} ms, floor {floor:.2f} ms, {rate:.0f} tokens/s")


def prefill(runner: Runner, prompt: list[int]) -> Tensor:
    [seq] = runner.new_sequences(1)
    for first in range(0, len(prompt), MAX_TOKENS):
        logits = runner.extend([seq], [prompt[first : first + MAX_TOKENS]])
    runner.free([seq])
    return logits


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Build, compare, measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_model", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    rates, start = measure_rates(), time.perf_counter()
    model = make_model(options.layers)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    _say(f"{num_bytes / 1e9:.1f} GB of weights made in {time.perf_counter() - start:.0f} s")
    with torch.inference_mode():
        for name, impl, error in twin_errors(model):
            _say(f"against its twin, {name}: {error:.1e} of the largest, {impl}")
            if not error <= TOLERANCES[impl]:
                raise ValueError(f"{name} differs from its twin by {error:.1e} of the largest")
    torch.cuda.empty_cache()
    results = Results(
        title=f"Qwen3-Next, {options.layers} layers in 8 bits; {torch.cuda.get_device_name()}",
        columns=["step", "ms", "floor ms", "over the floor", "tokens/s"],
    )
    measure(model, results, rates)
    results.notes.append(str(rates))
    results.notes.append(f"most memory: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    results.emit(options)


if __name__ == "__main__":
    main()
