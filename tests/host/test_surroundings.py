"""What a caller set before, or has open around, changes no token and no logit of ours.

Each surrounding is there while a thing is made, or while it runs, and the results are those of calm
surroundings, bit by bit. A layer of one's own rounds its products under autocast, as it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import run as run_layer
from tests.tiny_models import make_hybrid, make_model
from torch_hybrid.layers import GatedDeltaNet
from torch_hybrid.models.adapt import adapt
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.serving.engine import Engine

FAMILIES = ("qwen3_next_dense", "kimi_linear", "bamba", "minimax")
SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 192, "page_size": 16}
PROMPTS = [list(range(2, 43)), [5, 7, 11]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    """Memory that nothing was written to yet is filled with NaN here."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "with meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
calm = nullcontext


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@cache
def model_of(family: str) -> HybridModel:
    if family == "qwen3_next_dense":
        return make_hybrid(family)
    return adapt(make_model(family))


def logits_of(runner: th.Runner) -> list[Tensor]:
    """Prefill of two prompts, the longer one in two pieces, then a decode step."""
    seqs = runner.new_sequences(2)
    out = [runner.extend(seqs, [PROMPTS[0][:33], PROMPTS[1]], logits="all").clone()]
    out += [runner.extend(seqs[:1], [PROMPTS[0][33:]]).clone()]
    out += [runner.extend(seqs, [[9], [4]]).clone()]
    runner.free(seqs)
    return out


def tokens_of(engine: Engine) -> list[list[int]]:
    samplings = [
        th.Sampling(max_new_tokens=4, ignore_eos=True),
        th.Sampling(max_new_tokens=4, temperature=0.9, top_k=20, seed=1, ignore_eos=True),
    ]
    outputs = sorted(engine.generate(PROMPTS, samplings), key=lambda output: output.index)
    return [output.tokens for output in outputs]


def outputs_of(layer: GatedDeltaNet, x: Tensor) -> list[Tensor]:
    return [run_layer(layer, x, [33, 7, 1])]


@cache
def calm_logits(family: str) -> list[Tensor]:
    return logits_of(th.Runner(model_of(family), compile=False, **SIZES))


@cache
def calm_tokens(family: str) -> list[list[int]]:
    return tokens_of(Engine(th.Runner(model_of(family), compile=False, **SIZES)))


def assert_same_bits(outputs: list[Tensor], expected: list[Tensor]) -> None:
    for out, wanted in zip(outputs, expected, strict=True):
        assert out.dtype is wanted.dtype
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("when", ["making", "running", "both"])
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_runner(family: str, surrounding: str, when: str) -> None:
    model, expected = model_of(family), calm_logits(family)
    hostile = SURROUNDINGS[surrounding]
    with calm() if when == "running" else hostile():
        runner = th.Runner(model, compile=False, **SIZES)
    with calm() if when == "making" else hostile():
        outputs = logits_of(runner)
    assert_same_bits(outputs, expected)
    assert (runner.free_slots, runner.free_pages) == (3, 12)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("family", ["qwen3_next_dense", "bamba"])
def test_engine(family: str, surrounding: str) -> None:
    model, expected = model_of(family), calm_tokens(family)
    with SURROUNDINGS[surrounding]():
        outputs = tokens_of(Engine(th.Runner(model, compile=False, **SIZES)))
    assert outputs == expected


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_layer_of_ones_own(surrounding: str) -> None:
    spec = th.DeltaRuleSpec(
        num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16, conv_width=4
    )
    layer = GatedDeltaNet(32, spec, dtype=torch.float32, device=torch.device("cpu"))
    for weight in layer.parameters():
        weight.requires_grad_(False).normal_(std=0.3)
    x = torch.randn(41, 32)
    expected = outputs_of(layer, x)
    with SURROUNDINGS[surrounding]():
        outputs = outputs_of(layer, x)
    if surrounding == "autocast":
        assert (outputs[0] - expected[0]).abs().max() < 0.05 * expected[0].abs().max()
    else:
        assert_same_bits(outputs, expected)
