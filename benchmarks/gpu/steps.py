"""Whole steps at Qwen3-Next's real widths, with fewer layers and random weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.floor import step_bytes, step_flops
from benchmarks.fp8_models import make_fp8_model
from benchmarks.gpu.clock import Rates
from benchmarks.mixers import Row
from benchmarks.models import fill
from torch_hybrid import Backends, Engine, HybridModel, Runner, Sampling, adapt, quantize
from torch_hybrid import Sequence as Held
from torch_hybrid.models.quantize import WEIGHTS
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing
from torch_hybrid.ops.triton.devices import fp8_products_missing

NUM_LAYERS = 8
CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 32768,
}
CONTEXT = 1024  # tokens of each sequence that decodes
ROOM = 128  # tokens that each of them may grow by
DECODES = (1, 8, 32, 128)  # sequences
PREFILLS = ((1, 2048), (1, 8192), (8, 1024))  # prompts, tokens of each
VERIFIES = (1, 8, 64)  # sequences, of which each tries so many drafts after a certain token
NUM_DRAFTS = 3
MAX_TOKENS = 8192
ROUNDS = 15

# Who computes the steps of a part; FlashInfer all that it has for this model's layers.
PARTS = {
    "steps": Backends(),
    "fp8_steps": Backends(),
    "int8_steps": Backends(),
    "int4_steps": Backends(),
    "mxfp4_steps": Backends(),
    "nvfp4_steps": Backends(),
    "flashinfer_steps": Backends(full="flashinfer", ops={"extend gated_delta_rule": "flashinfer"}),
    "verify_steps": Backends(),
}

# Groups of kernels by what their names contain; the first that fits counts.
GROUPS = (
    ("generated", ("triton_",)),  # by Inductor, of names that have every op's in them
    ("experts", ("gate_up", "_down_", "_scaled_kernel", "_hidden_kernel", "_out_kernel",
                 "_combine_kernel", "_count_kernel", "_add_up", "_place_kernel", "_cut_kernel",
                 "grouped", "moe")),
    ("recurrence", ("_recurrent_kernel", "_prepare_kernel", "_scan_kernel", "_chunk_kernel",
                    "_segment_kernel", "_decay_kernel",
                    "_walk_kernel", "_norm_kernel", "delta", "gdn", "ssd", "ssm")),
    ("convolution", ("conv",)),
    ("attention", ("attend", "attention", "_long_kernel", "_write_kernel", "_store_kernel",
                   "_merge_kernel", "fmha", "flash", "cudnn")),
    ("rounding", ("_round_kernel",)),
    ("routers and sort", ("_route_kernel", "top_k", "topk", "sort", "radix")),
    ("products", ("_linear_kernel", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk")),
    ("copies", ("memcpy", "memset")),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Those of one step."""

    busy_ms: float  # in which any ran
    groups: Mapping[str, tuple[float, int]]  # microseconds of all together, and how many
    longest: Mapping[str, tuple[float, int]]  # the same by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was measured of one kind of step, in milliseconds."""

    name: str
    floor_ms: float
    device_ms: float
    synchronised_ms: float  # from the call, on a device at rest, until it rests again
    host_ms: float  # until the call returns
    kernels: Kernels
    engine_ms: float | None = None  # of an engine's steps, one of them planned while one runs


def make_config(**sizes: int) -> Any:
    """The config of transformers, with fields that differ."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**CONFIG | sizes)


def make_empty(device: str = "meta", **sizes: int) -> Any:
    """The model of transformers on a device, its weights without values."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(make_config(**sizes), dtype=torch.bfloat16)


def make_model(device: str = "cuda", **sizes: int) -> HybridModel:
    """Made on the device: on the host its experts alone would take minutes."""
    hf_model = make_empty(device, **sizes)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in hf_model.named_parameters():
            fill(name, weight, generator)
    return adapt(hf_model.eval().requires_grad_(False))


def _model_of(part: str) -> HybridModel:
    """The same, most of its weights in the format of a part."""
    if part == "fp8_steps":
        return make_fp8_model(make_config(), torch.device("cuda"))
    model, weights = make_model(), part.removesuffix("_steps")
    if weights in WEIGHTS:
        quantize(model, weights)
    return model


def why_not(part: str) -> str | None:
    """Why a part cannot run here, or None when it can."""
    if part == "fp8_steps":
        return fp8_products_missing()
    if part != "flashinfer_steps":
        return None
    kinds = (flashinfer_missing(capabilities=HOPPER, cutlass_dsl=dsl) for dsl in (False, True))
    return next((reason for missing in kinds if (reason := missing())), None)


def measure_steps(rates: Rates, part: str = "steps") -> Iterator[Step]:
    """Captured steps of a warm runner, as a user calls it: from lists of tokens to logits."""
    if part == "verify_steps":
        yield from _measure_verify_steps(rates)
        return
    model = _model_of(part)
    runner = Runner(
        model,
        # Those of the steps, and as many of an engine's requests.
        max_seqs=2 * DECODES[-1],
        max_tokens=MAX_TOKENS,
        kv_tokens=2 * DECODES[-1] * (CONTEXT + ROOM) + MAX_TOKENS,
        cuda_graphs="on",
        backends=PARTS[part],
    )
    runner.warm_up()
    suffix = "" if part == "steps" else f", {part.removesuffix('_steps')}"
    for kind, rows, run in _runs(runner):
        name = kind + suffix
        step = measure(name, floor_ms(rates, model, rows), run)
        yield replace(step, engine_ms=_engine_ms(runner, rows))


def _measure_verify_steps(rates: Rates) -> Iterator[Step]:
    """Steps that verify drafts beside those that decode, of one runner."""
    model = make_model()
    most = max(VERIFIES)
    runner = Runner(
        model,
        max_seqs=most,
        max_tokens=MAX_TOKENS,
        kv_tokens=most * (CONTEXT + 2 * ROOM) + MAX_TOKENS,
        cuda_graphs="on",
        max_drafts=NUM_DRAFTS,
    )
    runner.warm_up()
    for name, rows, run in _verify_runs(runner):
        yield measure(name, floor_ms(rates, model, rows), run)


def _verify_runs(runner: Runner) -> Iterator[tuple[str, list[Row], Callable[[], Tensor]]]:
    """As ``_runs``; where drafts are accepted, the next step replays them."""
    for count in VERIFIES:
        seqs, prompts = decoding(runner, count)
        one, all_tokens = ([prompt[:n] for prompt in prompts] for n in (1, 1 + NUM_DRAFTS))
        rows = [Row(1, CONTEXT)] * count
        yield f"decode {count}", rows, partial(runner.extend, seqs, one)
        for right in (0, NUM_DRAFTS):
            name = f"verify {count}x{1 + NUM_DRAFTS}, {right} right"
            rows = [Row(1 + NUM_DRAFTS, CONTEXT)] * count
            yield name, rows, partial(_verify, runner, seqs, all_tokens, right)
        runner.free(seqs)


def _verify(
    runner: Runner, seqs: Sequence[Held], tokens: Sequence[list[int]], right: int
) -> Tensor:
    logits = runner.verify(seqs, tokens)
    runner.accept(seqs, [right] * len(seqs))
    return logits


def _runs(runner: Runner) -> Iterator[tuple[str, list[Row], Callable[[], Tensor]]]:
    """Name, what the floor is of, and the step."""
    for count, length in PREFILLS:
        name = f"prefill {count}x{length}"
        yield name, [Row(length, 0)] * count, prefilling(runner, count, length)
    seqs, prompts = decoding(runner, DECODES[-1])
    for count in DECODES:
        chosen, tokens = seqs[:count], [prompt[:1] for prompt in prompts[:count]]
        rows = [Row(1, CONTEXT)] * count
        yield f"decode {count}", rows, partial(runner.extend, chosen, tokens)


def decoding(
    runner: Runner, count: int, adapters: Sequence[str] = ()
) -> tuple[list[Held], list[list[int]]]:
    """Sequences that have CONTEXT tokens, and these; with adapters in turn."""
    names = islice(cycle(adapters or [None]), count)
    seqs = [runner.new_sequences(1, adapter=name)[0] for name in names]
    prompts = random_prompts(count, CONTEXT, runner.vocab_size)
    for first in range(0, count, 8):
        some = slice(first, first + 8)
        runner.extend(seqs[some], prompts[some])
    return seqs, prompts


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Each of other tokens: sequences that are alike would all be sent to the same experts."""
    rng = torch.Generator("cpu").manual_seed(count)
    drawn = torch.randint(vocab_size, (count, length), generator=rng, device="cpu")
    made: list[list[int]] = drawn.tolist()
    return made


def prefilling(
    runner: Runner, count: int, length: int, adapters: Sequence[str] = ()
) -> Callable[[], Tensor]:
    """One step of fresh prompts, with the first of the adapters."""
    adapter = next(iter(adapters), None)
    prompts = random_prompts(count, length, runner.vocab_size)

    def run() -> Tensor:
        seqs = runner.new_sequences(count, adapter=adapter)
        logits = runner.extend(seqs, prompts)
        runner.free(seqs)
        return logits

    return run


def _engine_ms(runner: Runner, rows: Sequence[Row]) -> float | None:
    """A step of an engine that has more of such steps to do; None for prefills that it would put
    together into one."""
    with Engine(runner, eos_token_ids=[]) as engine:
        if rows[0].num_new == 1:
            return engine_decode_ms(engine, random_prompts(len(rows), CONTEXT, runner.vocab_size))
        if sum(row.num_new for row in rows) < MAX_TOKENS:
            return None
        prompts = random_prompts(len(rows), rows[0].num_new, runner.vocab_size)
        return min(_engine_prefill_ms(engine, prompts) for _ in range(3))


def engine_decode_ms(engine: Engine, prompts: Sequence[list[int]], *, rounds: int = 32) -> float:
    """A step that decodes one token of each prompt."""
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_new_tokens=ROOM))
    while len(engine.step()) < len(prompts):  # prompts, and what decodes beside them
        pass
    for _ in range(8):
        engine.step()
    start = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    return (time.perf_counter() - start) / rounds * 1e3


def _engine_prefill_ms(engine: Engine, prompts: Sequence[list[int]]) -> float:
    """Each step is all of these prompts; a request ends with its first token."""
    num_steps = 6
    for prompt in [*prompts] * num_steps:
        engine.submit(prompt, Sampling(max_new_tokens=1))
    engine.step()  # starts two, and waits for one
    start = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return (time.perf_counter() - start) / (num_steps - 1) * 1e3


def floor_ms(rates: Rates, model: HybridModel, rows: Sequence[Row]) -> float:
    """The least time of a step of these rows."""
    return rates.floor(step_bytes(model, rows), step_flops(model, rows)) / 1e3


def measure(name: str, floor_ms: float, run: Callable[[], Tensor]) -> Step:
    """Time a step, which is warm."""
    if not run().isfinite().all():
        raise ValueError(f"{name}: logits are not finite")
    host, whole = float("inf"), float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        host = min(host, time.perf_counter() - start)
        torch.cuda.synchronize()
        whole = min(whole, time.perf_counter() - start)
    kernels = min((kernels_of(run) for _ in range(3)), key=lambda seen: seen.busy_ms)
    return Step(
        name=name,
        floor_ms=floor_ms,
        device_ms=device_ms(run),
        synchronised_ms=whole * 1e3,
        host_ms=host * 1e3,
        kernels=kernels,
    )


def device_ms(run: Callable[[], object]) -> float:
    """From the first kernel of a step to its last, of steps that the host is ahead of if it can be.

    The first of them waits for a long product, so that the host's time is not in it.
    """
    wait = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(4):
            wait @ wait
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best


def kernels_of(run: Callable[[], object]) -> Kernels:
    """By torch's profiler, which slows the host and not the kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events: list[Any] = [
        event
        for event in seen.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, last = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    by_name: dict[str, tuple[float, int]] = {}
    for event in events:
        took, count = by_name.get(event.name, (0.0, 0))
        elapsed = event.time_range.end - event.time_range.start
        by_name[event.name] = (took + elapsed, count + 1)
    longest = dict(sorted(by_name.items(), key=lambda item: -item[1][0])[:25])
    return Kernels(busy_ms=busy / 1e3, groups=in_groups(by_name), longest=longest)


def in_groups(by_name: Mapping[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """Time and number of kernels by what they do, the longest first."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, (took, count) in by_name.items():
        group = group_of(name)
        times[group] += took
        counts[group] += count
    return {group: (took, counts[group]) for group, took in times.most_common()}


def group_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    lower = kernel.lower()
    fits = (group for group, parts in GROUPS if any(part in lower for part in parts))
    return next(fits, "other")
