"""Adapters of peft, unmerged, several in one batch: each sequence has peft's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.models import fp8_checkpoint
from tests.models.checkpoint.test_block_fp8 import OPTIONS as FP8_OPTIONS
from tests.models.oracle import ask, make_texts
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, make_model
from torch_hybrid.graphs.compiling.compiled_step import Arguments
from torch_hybrid.graphs.stepping.adapters import adapter_bytes
from torch_hybrid.layers.adapter_sites import AdapterKinds
from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.adapter_places import find_places
from torch_hybrid.ranks import linear_of

peft = pytest.importorskip("peft", reason="peft is not installed")

TEXTS = make_texts([11, 6])
SIZES = {"max_seqs": 6, "max_tokens": 384, "kv_tokens": 1600, "max_adapters": 2}
SIZES |= {"saved_modules": True, "expert_adapters": True}
# peft refuses an adapter of this layer beside those of these models.
_NO_OUT_PROJ = ("mamba", "falcon_mamba", "mamba2", "falcon_h1", "falcon_h1_norm", "nemotron_h")
# Layers of which transformers takes the weight alone, or divides it where it is not trained: an
# unmerged adapter is lost there, or weighs more. What they mean is the merged model.
_MERGED = ("mamba", "falcon_mamba", "jamba", "rwkv")
# By the names of layers of an MLP, peft adapts experts too.
_WITH_EXPERTS = ("qwen3_next", "deepseek_v3")
# Seeds of models whose routers are near no tie.
_SEEDS = {"granitemoehybrid": 3, "kimi_k3": 1}


def targets(model: nn.Module, family: str) -> list[str]:
    """All linear layers of the text model that can have an adapter, and the embedding."""
    barred = ["visual", "_res_proj"]  # of Kimi-K3, which are refused
    barred += ["out_proj"] * (family in _NO_OUT_PROJ)
    embedding = model.get_input_embeddings()
    if family in _MERGED:  # which would change embedding and head, where they are one weight
        barred += ["lm_head"]
        embedding = None
    barred += ["gate_proj", "up_proj", "down_proj"] * (family in _WITH_EXPERTS)
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear and not any(each in name for each in barred))
        or module is embedding
    ]


def experts(model: nn.Module) -> list[str]:
    """The names of the weights of all experts of mixtures, and of their routers."""
    found = dict(model.named_parameters()).items()
    routers = {n for n, m in model.named_modules() if "Router" in type(m).__name__}
    return [
        name
        for name, own in found
        if (own.ndim == 3 and "experts." in name)
        or (own.ndim == 2 and name.removesuffix(".weight") in routers)
    ]


def norms(model: nn.Module) -> list[str]:
    """The names of the norms of rows as wide as the model that adapters may replace."""
    width = model.config.get_text_config().hidden_size
    found = [
        name
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__
        and not isinstance(module, nn.LayerNorm)
        and all(weight.shape == (width,) for weight in module.parameters())
    ]
    # MiniMax's is part of our mixer, those of Kimi-K3 of mixes of blocks.
    barred = ("visual", "self_attn.norm", "embed_norm", "_res_norm")
    return [name for name in found if not any(each in name for each in barred)]


def saving(model: nn.Module, family: str) -> dict[str, Any]:
    """Options of an adapter that brings norms and an output head."""
    targeted = [name for name in targets(model, family) if name != "lm_head"]
    return {"modules_to_save": [*norms(model), "lm_head"], "target_modules": targeted}


def save_adapter(folder: Path, family: str, seed: int, *, base: Any = None, **options: Any) -> Any:
    """Write an adapter of random factors to a folder; return peft's model with it."""
    base = make_tiny(family) if base is None else base
    options = {"target_modules": targets(base, family), "r": 4, "lora_alpha": 8, **options}
    options.setdefault("target_parameters", experts(base))
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options)).eval()
    for name, weight in model.named_parameters():
        if ".modules_to_save." in name:
            weight.data += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def make_tiny(family: str) -> Any:
    return make_model(family, seed=_SEEDS.get(family, 0), **FEWEST_LAYERS.get(family, {}))


def oracle_of(model: Any, family: str) -> list[Tensor]:
    if family in _MERGED:
        model = model.merge_and_unload()
    return ask(model, TEXTS).logits


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    first = save_adapter(tmp_path / "a", family, seed=1)
    own = {"use_rslora": True, "r": 3, **saving(make_tiny(family), family)}
    second = save_adapter(tmp_path / "b", family, seed=2, **own)
    expected = [oracle_of(first, family), oracle_of(second, family)]
    expected.append(ask(make_tiny(family), TEXTS).logits)
    runner = th.Runner(th.adapt(make_tiny(family)), compile=False, **SIZES)
    for name in "ab":
        runner.load_adapter(name, tmp_path / name)
    seqs = [runner.new_sequences(2, adapter=name) for name in ("a", "b", None)]
    flat = [seq for own in seqs for seq in own]
    prompts = runner.extend(flat, [text[:-1] for text in TEXTS] * 3).clone()
    steps = runner.extend(flat, [text[-1:] for text in TEXTS] * 3)
    for logits, place in ((prompts, -2), (steps, -1)):
        wanted = torch.stack([own[place] for oracle in expected for own in oracle])
        scale = wanted.abs().max()
        assert (wanted[:2] - wanted[4:]).abs().max() > 0.1 * scale
        assert (logits - wanted).abs().max() < 1e-4 * scale


def mixed(
    runner: th.Runner, names: list[str | None], *, alone: bool = False, by_token: bool = False
) -> list[Tensor]:
    """Logits of a prompt and two decode steps of a sequence for each name, in one batch or each by
    itself."""
    seqs = [runner.new_sequences(1, adapter=name)[0] for name in names]
    text = TEXTS[0][-3:] if by_token else TEXTS[0]
    found = []
    for tokens in (text[:-2], text[-2:-1], text[-1:]):
        batches = [[seq] for seq in seqs] if alone else [seqs]
        rows = [runner.extend(own, [tokens] * len(own)).clone() for own in batches]
        found.append(torch.cat(rows))
    runner.free(seqs)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in "ab"}
    for seed, folder in enumerate(made.values()):
        save_adapter(folder, "qwen3_5", seed=seed)
    return made


def make_runner(folders: dict[str, Path], model: Any = None, **options: Any) -> th.Runner:
    model = th.adapt(make_tiny("qwen3_5")) if model is None else model
    runner = th.Runner(model, **{"compile": False, **SIZES, **options})
    for name, folder in folders.items():
        runner.load_adapter(name, folder)
    return runner


NAMES = ["a", None, "b", "a"]


def test_batch_invariant(folders: dict[str, Path]) -> None:
    runner = make_runner(folders, batch_invariant=True)
    for together, apart in zip(mixed(runner, NAMES), mixed(runner, NAMES, alone=True), strict=True):
        assert torch.equal(together, apart)


def test_compiled_steps(folders: dict[str, Path]) -> None:
    """In halves, with adapters and without, each by a graph of its own; the latter's is a plain
    runner's."""
    options = {"prefill": False, "two_batch_overlap": "on", "cuda_graphs": "on"}
    expected = mixed(make_runner(folders), NAMES, by_token=True)
    with run_as_traced():
        runner = make_runner(folders, compile=True, **options)
        for logits, wanted in zip(mixed(runner, NAMES, by_token=True), expected, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        plain = make_runner({}, compile=True, max_adapters=0, **options)
        both = (mixed(each, [None], by_token=True) for each in (runner, plain))
        assert all(map(torch.equal, *both))
    report, alike = runner.report(), plain.report()
    assert report.recompiles == 0
    with_adapters = {name for name in report.graphs if name.endswith("adapters")}
    assert report.graphs.keys() - with_adapters == alike.graphs.keys()
    for name, graph in report.graphs.items():
        has_op = any(op.startswith("lora[") for op in graph.ops)
        assert has_op == (name in with_adapters)
        if not has_op:
            assert graph.ops == alike.graphs[name].ops


def test_a_step_that_is_traced_late_has_adapters(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one row, which Dynamo traces anew where it is asked."""
    expected = mixed(make_runner(folders), ["a"], by_token=True)
    monkeypatch.setattr(Arguments, "fit", lambda *_: False)
    with run_as_traced():
        runner = make_runner(folders, compile=True, prefill=False)
        for logits, wanted in zip(mixed(runner, ["a"], by_token=True), expected, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert runner.report().recompiles == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantized_base(folders: dict[str, Path], weights: str) -> None:
    """What an adapter adds is not rounded: errors are the base's own."""
    exact = make_runner(folders)
    model = th.adapt(make_tiny("qwen3_5"))
    th.quantize(model, weights)
    rounded = make_runner(folders, model)
    errors = {
        name: max(
            (a - b).norm() / b.norm()
            for a, b in zip(mixed(rounded, [name]), mixed(exact, [name]), strict=True)
        )
        for name in (None, "a", "b")
    }
    assert min(errors.values()) > 1e-3
    assert max(errors.values()) < 2 * errors[None]


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_base_of_fp8(family: str, tmp_path: Path) -> None:
    """Peft's logits on what the base's weights are worth."""
    options = {**fp8_checkpoint.SIZES, **FP8_OPTIONS[family]}
    twin = fp8_checkpoint.save(make_model(family, **options), tmp_path)
    base = AutoModelForCausalLM.from_pretrained(twin)
    oracle = oracle_of(save_adapter(tmp_path / "a", family, seed=1, base=base), family)
    runner = th.Runner(th.from_pretrained(tmp_path, dtype=torch.float32), compile=False, **SIZES)
    assert any(isinstance(module, ScaledLinear) for module in runner.model.modules())
    runner.load_adapter("a", tmp_path / "a")
    logits = runner.extend(runner.new_sequences(2, adapter="a"), TEXTS)
    wanted = torch.stack([own[-1] for own in oracle])
    assert (logits - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.slow
def test_steps_of_an_artefact(folders: dict[str, Path], tmp_path: Path) -> None:
    """Steps with adapters are read back, by a runner whose pools lie elsewhere."""
    found = []
    for is_loaded in (False, True):
        options = {"prefill": False, "artefact": tmp_path / "steps", "saved_modules": False}
        runner = make_runner(folders, compile=True, **options)
        found.append(mixed(runner, NAMES, by_token=True))
        assert [g.is_loaded for g in runner.report().graphs.values()] == [is_loaded]
    assert all(map(torch.equal, *found))


def test_projections_in_parts(folders: dict[str, Path]) -> None:
    """Of which only some rows are quantized, for example: the parts have adapters of their own."""
    expected = mixed(make_runner(folders), NAMES)
    model = th.adapt(make_tiny("qwen3_5"))
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            weights = module.in_proj.weight.split([70, module.in_proj.out_features - 70])
            module.in_proj = SideBySide([linear_of(weight) for weight in weights])
    for logits, wanted in zip(mixed(make_runner(folders, model), NAMES), expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_bytes_of_the_pools(folders: dict[str, Path]) -> None:
    """``kv_tokens="auto"`` leaves room for them."""
    runner = make_runner(folders)
    found = [tensor.nbytes for pool in runner._adapted.layers.pools for tensor in pool.values()]
    assert sum(found) == adapter_bytes(
        runner.model, SIZES["max_adapters"], 16, AdapterKinds(saved_modules=True, experts=True)
    )


@torch.library.custom_op("tests_adapters::find_places", mutates_args=())
def find_in_an_op(x: Tensor) -> Tensor:
    FOUND.append(find_places(FOUND.pop()))
    return x.clone()


FOUND: list[Any] = []


@pytest.mark.parametrize("family", ["qwen3_next", "zamba", "falcon_h1"])
def test_places_are_the_same_in_the_body_of_an_op(family: str) -> None:
    """Where torch has not decomposed what is done to weights."""
    model = th.adapt(make_tiny(family))
    expected = find_places(model)
    FOUND.append(model)
    find_in_an_op(torch.ones(1))
    found = FOUND.pop()
    for name in ("linears", "latents", "norms", "experts", "refused"):
        assert getattr(found, name).keys() == getattr(expected, name).keys()


@pytest.mark.parametrize("family", ["zamba", "deepseek_v3", "qwen3_next", "inkling"])
def test_compiled_steps_of_shared_layers_latents_and_experts(family: str, tmp_path: Path) -> None:
    """Together, and each alone by the same graphs."""
    save_adapter(tmp_path, family, seed=1)
    model = th.adapt(make_tiny(family))
    folders = {"a": tmp_path}
    expected = mixed(make_runner(folders, model), ["a", None])
    with run_as_traced():
        runner = make_runner(folders, model, compile=True)
        for alone in (False, True):
            found = mixed(runner, ["a", None], alone=alone)
            for logits, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert runner.report().recompiles == 0


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("qwen4_exp", {"target_modules": ["ngram_embedding"]}, "not served: its weight is part"),
        ("zamba", {"target_parameters": ["mamba.x_proj_weight"]}, "stacks than those of experts"),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, "brings model.embed_tokens.weight, which"),
        ("qwen3", {"modules_to_save": ["mlp"]}, "brings model.layers.*, which is not served"),
    ],
)
def test_layers_that_can_have_no_adapter(
    family: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, family, seed=1, **{"target_modules": ["q_proj"], **options})
    runner = th.Runner(th.adapt(make_tiny(family)), compile=False, **SIZES)
    with pytest.raises(th.UnsupportedError, match=told):
        runner.load_adapter("a", tmp_path)
