"""Keys, values and latents in 8 bits, through the runner."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import VOCAB_SIZE, make_hybrid
from torch_hybrid.explain import sections as explain
from torch_hybrid.graphs.options.check_options import kept_table
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.paged_attention import op as paged_attention

FAMILIES = ["qwen3_next_dense", "deepseek_v3"]  # keys and values, latents
SIZES = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 512, "page_size": 16}
LENGTHS = (70, 33, 5)
LINEAR = th.LightningSpec(num_heads=2, head_dim=16)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> th.HybridModel:
    return make_hybrid(request.param)


def make_runner(model: Any, **options: Any) -> Runner:
    return Runner(model, **{**SIZES, "compile": False, "kv_dtype": "fp8", **options})


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def run(runner: Runner) -> Tensor:
    """The logits of prompts, of a decode step, and of both in one step."""
    seqs = runner.new_sequences(3)
    steps = [prompts(), [[1], [2], [3]], [[4, 5], [6], [7] * 30]]
    logits = [runner.extend(seqs, step, logits="all") for step in steps]
    runner.free(seqs)
    return torch.cat(logits)


# Sums that differ in their last bits may round a later layer's key to another number of 8 bits.
ROUNDED_OTHERWISE = 1e-3


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = ROUNDED_OTHERWISE) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"they differ by {error:.1e}"


# ---- what is kept ----------------------------------------------------------------------------


def test_pools_take_a_quarter_of_those_in_float32(model: th.HybridModel) -> None:
    wide, narrow = make_runner(model, kv_dtype="auto").cache, make_runner(model).cache
    for ours, theirs in zip(narrow.costs(), wide.costs(), strict=True):
        assert 4 * ours.per_token == theirs.per_token
        assert ours.per_sequence == theirs.per_sequence
    assert narrow.scales.keys() == {i for i, cost in enumerate(wide.costs()) if cost.per_token}
    assert not wide.scales


def test_the_model_keeps_its_own_table(model: th.HybridModel) -> None:
    before = model.table
    runner = make_runner(model)
    assert model.table is before
    assert runner.cache.table == before.keeping(torch.float8_e4m3fn)
    assert runner.cache.table.keeping(None) == before
    facts = [row[2] for row in explain.layers(runner).rows]
    assert any("kv_dtype torch.float8_e4m3fn" in fact for fact in facts)


# ---- numbers ---------------------------------------------------------------------------------


def test_attention_is_near_that_of_wide_keys() -> None:
    """What 8 bits change is a few percent: a wrong scale or a stale row would change all."""
    model = make_hybrid("qwen3_next_dense")
    wide = run(make_runner(model, kv_dtype="auto"))
    assert_same(run(make_runner(model)), wide, 0.03)


@pytest.mark.parametrize("full", ["cpp", "torch"])
def test_implementations_agree(model: th.HybridModel, full: str) -> None:
    expected = run(make_runner(model, backends=th.Backends(full="torch")))
    assert_same(run(make_runner(model, backends=th.Backends(full=full))), expected)


POLICIES = {
    "absorbed": th.PrefixPolicy(absorbed="always"),
    "one shot": th.PrefixPolicy(absorbed="never"),
    "chunks": th.PrefixPolicy(absorbed="never", one_shot=False, token_budget=32),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_form_attends_to_what_was_rounded(policy: str) -> None:
    model = make_hybrid("deepseek_v3")
    backends = th.Backends(prefix=POLICIES[policy])
    assert_same(run(make_runner(model, backends=backends)), run(make_runner(model)))


def test_prompts_in_pieces_give_the_same(model: th.HybridModel) -> None:
    runner = make_runner(model)
    whole, pieces = runner.new_sequences(2)
    (prompt, *_), logits = prompts(), torch.empty(0)
    expected = runner.extend([whole], [prompt])
    for start in range(0, len(prompt), 9):
        logits = runner.extend([pieces], [prompt[start : start + 9]])
    assert_same(logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_compiled_steps_give_the_same(family: str) -> None:
    """Of one layer: a recurrence beside it has no part in how its keys are kept."""
    model = make_hybrid(family, num_hidden_layers=1, layer_types=["full_attention"])
    runner = make_runner(model, compile=True)
    assert_same(run(runner), run(make_runner(model)))
    report = runner.report()
    assert (report.pool_clones, report.recompiles, report.graph_breaks) == ((), 0, 0)


# ---- scales ----------------------------------------------------------------------------------


def largest_kept(runner: Runner) -> Mapping[int, Tensor]:
    """Of keys and values, or latents, by layer id, as numbers of 8 bits."""
    cache = runner.cache
    found = {}
    for layer_id in cache.scales:
        entry = cache.table[layer_id] if len(cache.table.layers[layer_id]) == 1 else None
        assert entry is not None
        pools = cache.pools[entry.kind][entry.index]
        kept = pools["kv" if "kv" in pools else "latents"].float().abs()
        found[layer_id] = kept.amax((1, 2, 4)) if kept.ndim == 5 else kept.amax()[None]
    return found


def test_measured_scales_fill_half_of_the_range(model: th.HybridModel) -> None:
    scales = th.kv_scales(model, prompts())
    runner = make_runner(model, kv_scales=scales)
    assert runner.cache.scales.keys() == scales.keys()
    seqs = runner.new_sequences(3)
    runner.extend(seqs, prompts())
    for layer_id, kept in largest_kept(runner).items():
        # The same prompts, whose keys differ a little: those of earlier layers were rounded.
        assert ((kept > 448 / 4 / 1.2) & (kept < 448 / 2 * 1.2)).all()
        assert torch.equal(scales[layer_id].log2(), scales[layer_id].log2().round())


def test_scales_that_are_powers_of_two_change_little(model: th.HybridModel) -> None:
    """Numbers within reach are rounded alike, whatever power of two they are worth."""
    scales = {i: torch.full_like(s, 0.25) for i, s in make_runner(model).cache.scales.items()}
    rounded_alike = run(make_runner(model, kv_scales=scales))
    other = {i: torch.full_like(s, 0.125) for i, s in scales.items()}
    assert_same(run(make_runner(model, kv_scales=other)), rounded_alike, 0.03)


def test_too_large_scales_lose_everything() -> None:
    model = make_hybrid("qwen3_next_dense")
    scales = {i: torch.full_like(s, 1e6) for i, s in make_runner(model).cache.scales.items()}
    wide = run(make_runner(model, kv_dtype="auto"))
    lost = run(make_runner(model, kv_scales=scales))
    assert (lost - wide).abs().max() > 0.05 * wide.abs().max()


# ---- what is refused -------------------------------------------------------------------------


def refusal(error: type[Exception], model: Any, **options: Any) -> str:
    return error_text(error, make_runner, model, **options)


def test_refusals() -> None:
    model = make_hybrid("qwen3_next_dense")
    ones = {i: torch.ones_like(s) for i, s in make_runner(model).cache.scales.items()}
    (layer_id, *_) = ones
    errors = [
        refusal(ValueError, model, kv_dtype="int8"),
        refusal(ValueError, model, kv_scales={}),
        refusal(ValueError, model, kv_scales={**ones, layer_id: torch.ones(2)}),
        refusal(ValueError, model, kv_scales={**ones, layer_id: torch.zeros(2, 2)}),
        refusal(ValueError, model, kv_dtype="auto", kv_scales=ones),
    ]
    errors.append(
        error_text(th.UnsupportedError, kept_table, th.LayerTable.from_specs([LINEAR]), "fp8")
    )
    assert_expected_inline(
        "\n".join(errors),
        """\
kv_dtype must be 'auto' or 'fp8', got 'int8'
kv_scales must be of the layers [1], got []
kv_scales of layer 1 must have shape [2, 2], got [2]
kv_scales of layer 1 must be positive, got [[0.0, 0.0], [0.0, 0.0]]
kv_scales must be of the layers [], got [1]
kv_dtype='fp8' needs paged_attention or latent_attention, got layers of lightning_attention""",
    )
    with pytest.raises(ValueError, match="at least one prompt"):
        th.kv_scales(model, [])


def test_who_cannot_keep_8_bits_says_so() -> None:
    implementations = paged_attention.IMPLEMENTATIONS
    need = Need(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        sizes={"head_dim": 128, "page_size": 16},
        features=frozenset({"fp8_kv"}),
    )
    with pytest.raises(th.UnsupportedError) as refused:
        th.select("paged_attention", implementations, need, "flashinfer")
    reasons = dict(line.strip().split(": ", 1) for line in str(refused.value).splitlines()[1:])
    own = {"cpp", "cpp_invariant", "triton", "triton_invariant", "torch"} & implementations.keys()
    foreign = [name for name in implementations if name not in own]
    assert all("it has no fp8_kv" in reasons[name] for name in foreign)
    assert not any("fp8_kv" in reasons[name] for name in own)
