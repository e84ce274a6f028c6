"""Logits of a batch-invariant runner have the same bits however their tokens came to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.ops.triton_interpreter import needs_triton
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, VOCAB_SIZE, make_model
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.select import impls_of, select
from torch_hybrid.backends.step import make_backends
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.graphs.options.check_options import check_invariant
from torch_hybrid.graphs.passes.row_sums import row_sums
from torch_hybrid.graphs.stepping import model_choices, steps
from torch_hybrid.graphs.two_batch import OverlapPolicy
from torch_hybrid.models.families import architecture_of
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Need
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.formats.stored_weights import FEATURES

LENGTH = 75  # more than a chunk of a recurrence, a block of keys, a stretch of tokens
CUTS = [1, 32, 2, 33, 7]
STORED = ("int8", "int4", "mxfp4", "nvfp4")
IN_HALVES = ("qwen3_next", "falcon_h1", "deepseek_v3", "glm5_next")  # norms, softmaxes, streams
IN_BF16 = ("qwen3_next", "falcon_h1", "bailing_hybrid", "lfm3")  # of different mixers


def make_runner(
    family: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    layers: dict[str, Any] | None = None,
    stored: str | None = None,
    **options: object,
) -> th.Runner:
    sizes = {"max_seqs": 5, "max_tokens": 192, "kv_tokens": 640, "page_size": 8, "compile": False}
    model = th.adapt(make_model(family, **(layers or FEWEST_LAYERS[family])).to(device, dtype))
    if stored is not None:
        th.quantize(model, stored)
    return th.Runner(model, **{**sizes, "batch_invariant": True, **options})


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def in_pieces(runner: th.Runner, prompt: list[int], cuts: Sequence[int]) -> Tensor:
    """The logits after each token of a prompt that comes in pieces."""
    (seq,) = runner.new_sequences(1)
    ends = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
    assert ends[-1] == len(prompt)
    pieces = [prompt[a:b] for a, b in pairwise(ends)]
    logits = [runner.extend([seq], [piece], logits="all") for piece in pieces]
    runner.free([seq])
    return torch.cat(logits)


def among_others(runner: th.Runner, prompt: list[int], cuts: Sequence[int]) -> Tensor:
    """The same, while other sequences come, decode and go."""
    (seq, *others) = runner.new_sequences(4)
    logits, first = [], 0
    for step, size in enumerate(cuts):
        lengths = [(5 * step + 11 * i) % 29 + 1 for i in range(len(others))]
        pieces = [tokens(length, seed=length) for length in lengths]
        given = [pieces[0], prompt[first : first + size], *pieces[1:]]
        out = runner.extend([others[0], seq, *others[1:]], given, logits="all")
        logits.append(out[lengths[0] :][:size])
        first += size
    runner.free([seq, *others])
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in sorted(BUILDERS)),
        *((family, torch.bfloat16) for family in IN_BF16),
    ],
    ids=str,
)
def test_any_cut_in_any_company_has_the_same_bits(family: str, dtype: torch.dtype):
    assert_same_bits(make_runner(family, dtype))


@pytest.mark.parametrize("stored", ["int8", "nvfp4"])
def test_quantized_weights_too(stored: str):
    assert_same_bits(make_runner("qwen3_next", stored=stored))


def assert_same_bits(runner: th.Runner) -> None:
    prompt = tokens(LENGTH)
    whole = in_pieces(runner, prompt, [LENGTH])
    assert torch.equal(in_pieces(runner, prompt, CUTS), whole)
    assert torch.equal(in_pieces(runner, prompt[:9], [1] * 9), whole[:9])
    assert torch.equal(among_others(runner, prompt, CUTS), whole)


@needs_triton
def test_an_op_of_every_family_can_serve_on_a_gpu():
    wanted = th.Backends(batch_invariant=True)
    cuda: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    sizes = PoolSizes(num_pages=80, page_size=8, num_slots=5, **cuda)
    for family, build in BUILDERS.items():
        with torch.device("meta"):
            table = architecture_of(build().config).table
        backends = make_backends(table, sizes, wanted, [Mode.DECODE, Mode.EXTEND])
        assert backends.keys() == set(table.kinds), family
        for backend in backends.values():  # a token of a decode step is as any other
            decode, extend = (impls_of(backend.choices[m]) for m in (Mode.DECODE, Mode.EXTEND))
            assert decode == extend, family
    need = Need(**cuda, features=wanted.features)
    assert select("head_linear", REGISTERED["head_linear"], need).impl == "triton"
    for features in ({BATCH_INVARIANT}, *({BATCH_INVARIANT, each} for each in FEATURES)):
        need = Need(**cuda, features=frozenset(features))
        for op in ("linear", "fused_experts"):
            assert select(op, REGISTERED[op], need).impl == "triton_invariant"


def test_products_of_torch_are_refused():
    runner = make_runner("qwen3")
    mlp = next(each for name, each in runner.model.named_modules() if name.endswith(".mlp"))
    mlp.forward = lambda x: torch.einsum("btd,bsd->bts", x, x)
    with pytest.raises(th.UnsupportedError, match="calls einsum, whose order of additions"):
        in_pieces(runner, tokens(4), [4])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_on_a_gpu(family: str, dtype: torch.dtype):
    runner = make_runner(family, dtype, "cuda", compile=True)
    assert_same_bits(runner)
    names = {name.partition(",")[0] for name in runner.report().graphs}  # latents say their form
    assert names == {"decode", "extend"}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", STORED)
def test_quantized_weights_on_a_gpu(stored: str, dtype: torch.dtype):
    assert_same_bits(make_runner("qwen3_next", dtype, "cuda", stored=stored, compile=True))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", IN_HALVES)
def test_in_halves_on_a_gpu(family: str, dtype: torch.dtype):
    prompt = tokens(LENGTH)
    whole = in_pieces(make_runner(family, dtype, "cuda", compile=True), prompt, [LENGTH])
    runner = make_runner(family, dtype, "cuda", compile=True, two_batch_overlap="on")
    assert_same_bits(runner)
    assert torch.equal(in_pieces(runner, prompt, CUTS), whole)
    assert len(runner.report().graphs) == 2
    assert all(name.endswith("in halves") for name in runner.report().graphs)


@needs_cuda
def test_some_steps_in_halves_on_a_gpu():
    overlap = OverlapPolicy(min_extend_tokens=40)
    runner = make_runner(
        "qwen3_next", torch.bfloat16, "cuda", compile=True, two_batch_overlap=overlap
    )
    assert_same_bits(runner)
    assert set(runner.report().graphs) == {"decode", "extend", "extend, in halves"}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", IN_HALVES)
def test_uncompiled_on_a_gpu(family: str, dtype: torch.dtype):
    prompt = tokens(LENGTH)
    runner = make_runner(family, dtype, "cuda")
    assert_same_bits(runner)
    in_halves = make_runner(family, dtype, "cuda", two_batch_overlap="on")
    assert torch.equal(in_pieces(in_halves, prompt, CUTS), in_pieces(runner, prompt, [LENGTH]))


def test_on_a_gpu_drafts_are_verified_by_whole_steps():
    model = Mock(device=torch.device("cuda"), ranks=None)
    check_invariant(model, False, "on", 0)
    check_invariant(model, True, "off", 3)
    with pytest.raises(th.UnsupportedError, match=r"two_batch_overlap must be 'off', got 'on'$"):
        check_invariant(model, True, "on", 3)


def test_compiled_steps_too():
    """With experts, a shared one among them, whose gate is one number of a token."""
    one = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    runner = make_runner("qwen3_next", layers=one, compile=True)
    assert_same_bits(runner)
    called = {op for ops in runner.report().ops.values() for op in ops}
    assert "linear[cpp_invariant]" in called
    assert "gated_delta_step[cpp]" in called


@needs_triton
def test_halves_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """By a graph of their own, with sums of ours and what Inductor is told there."""
    here = partial(row_sums, impl="torch", devices=("cpu",))
    monkeypatch.setattr(model_choices, "row_sums", here)
    monkeypatch.setattr(steps, "fuses_freely", lambda device: True)
    some = OverlapPolicy(min_extend_tokens=40)
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    runner = make_runner("qwen3", torch.bfloat16, layers=one, compile=True, two_batch_overlap=some)
    assert_same_bits(runner)
    report = runner.report()
    assert set(report.graphs) == {"decode", "extend", "extend, in halves"}
    assert {ops["power_sum[torch]"] for ops in report.ops.values()} == {5, 10}
    assert not report.pool_clones


def test_what_depends_on_the_batch_is_refused_by_name():
    with pytest.raises(th.UnsupportedError, match=r"torch: it has no batch_invariant"):
        make_runner("qwen3", backends=th.Backends(full="torch"))
    with pytest.raises(ValueError, match="needs compile=True or False, got 'background'"):
        make_runner("qwen3", compile="background")
