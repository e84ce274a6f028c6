"""Adapters of experts: both of peft's forms, beside rows without them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_hybrid as th
from tests.models.test_adapters import (
    SIZES,
    TEXTS,
    experts,
    make_runner,
    make_tiny,
    mixed,
    oracle_of,
    save_adapter,
)
from torch_hybrid.models.read_adapter import adapts_experts

peft = pytest.importorskip("peft", reason="peft is not installed")

FAMILY, NUM_EXPERTS = "qwen3_next", 5
STACK = "base_model.model.model.layers.0.mlp.experts"
_FUSED = {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of experts alone, of experts, routers and projections, and of projections."""
    made = {name: tmp_path_factory.mktemp(name) for name in "abc"}
    for seed, options in enumerate((_FUSED, {"r": 3}, {"target_parameters": None})):
        save_adapter(made["abc"[seed]], FAMILY, seed, **options)
    return made


def rewritten(
    folder: Path, to: Path, tensors: Mapping[str, Tensor], **config: Any
) -> dict[str, Path]:
    """An adapter of other tensors, with fields of its config changed."""
    to.mkdir(exist_ok=True)
    found = json.loads((folder / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**found, **config}))
    save_file(
        {name: own.contiguous() for name, own in tensors.items()}, to / "adapter_model.safetensors"
    )
    return {"x": to}


def one_by_one(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Factors of all experts as those of each expert's own linear layers."""
    found: dict[str, Tensor] = {}
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        module, is_inner = name.split(".base_layer")[0].split(".lora_A")[0], ".base_layer" in name
        b = tensors[name.replace("lora_A", "lora_B")].unflatten(1, (rank, NUM_EXPERTS))
        for expert, own in enumerate(a.unflatten(0, (NUM_EXPERTS, rank))):
            parts = {"down_proj": b[..., expert]}
            if is_inner:
                parts = dict(zip(("gate_proj", "up_proj"), b[..., expert].chunk(2), strict=True))
            for part, rows in parts.items():
                found[f"{module}.{expert}.{part}.lora_A.weight"] = own.clone()
                found[f"{module}.{expert}.{part}.lora_B.weight"] = rows.clone()
    return found


def test_experts_of_older_checkpoints_have_layers_of_their_own(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As peft stacks them when it loads such an adapter; or of some of the experts."""
    tensors = one_by_one(load_file(folders["a"] / "adapter_model.safetensors"), 4)
    config = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "target_parameters": None}
    own = rewritten(folders["a"], tmp_path / "all", tensors, **config)
    expected = mixed(make_runner(folders, th.adapt(make_tiny(FAMILY))), ["a", None])
    for logits, wanted in zip(
        mixed(make_runner(own, th.adapt(make_tiny(FAMILY))), ["x", None]), expected, strict=True
    ):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(make_tiny(FAMILY), own["x"]).eval()
    oracle = oracle_of(loaded, FAMILY)[0]
    assert (expected[-1][0] - oracle[-1]).abs().max() < 1e-4 * oracle.abs().max()
    some = {name: each for name, each in tensors.items() if ".experts.3.up_proj" not in name}
    without = make_runner(
        rewritten(folders["a"], tmp_path, some, **config), th.adapt(make_tiny(FAMILY))
    )
    assert (mixed(without, ["x"])[-1] - expected[-1][:1]).abs().max() > 1e-4


@pytest.mark.parametrize("weights", ["int8", "int4", "mxfp4", "nvfp4"])
def test_quantized_experts(folders: dict[str, Path], weights: str) -> None:
    """What an adapter adds is not rounded: logits are those of the weights' own worth."""
    found = []
    for impl in ("cpp", "torch"):
        model = th.adapt(make_tiny(FAMILY))
        th.quantize(model, weights)
        runner = make_runner(folders, model, backends=th.Backends(experts=impl))
        found.append(mixed(runner, ["a", None, "b"]))
    for logits, wanted in zip(*found, strict=True):
        assert (logits[0] - logits[1]).abs().max() > 0.05 * wanted.abs().max()
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_rows_without_factors_have_the_bits_of_a_plain_step(folders: dict[str, Path]) -> None:
    """Beside rows with them; a row has the bits that it has alone."""
    options = {"batch_invariant": True}
    names = ["a", None, "b", "c", "a"]
    runner = make_runner(folders, th.adapt(make_tiny(FAMILY)), max_adapters=3, **options)
    together, apart = mixed(runner, names), mixed(runner, names, alone=True)
    assert all(map(torch.equal, together, apart))
    options["max_adapters"] = 0
    plain = mixed(make_runner({}, th.adapt(make_tiny(FAMILY)), **options), [None])
    assert all(torch.equal(rows[1:2], own) for rows, own in zip(together, plain, strict=True))
    options |= {"expert_adapters": False, "max_adapters": 1}
    others = make_runner({"c": folders["c"]}, th.adapt(make_tiny(FAMILY)), **options)
    for rows, own in zip(together, mixed(others, ["c"]), strict=True):
        assert torch.equal(rows[3:4], own)


def test_bfloat16(folders: dict[str, Path]) -> None:
    """Within twice the errors that peft's own model has."""
    model = peft.PeftModel.from_pretrained(make_tiny(FAMILY), folders["a"]).eval()
    exact = oracle_of(model, FAMILY)[0][-3:]
    theirs = oracle_of(model.bfloat16(), FAMILY)[0][-3:].float()
    ours = mixed(make_runner(folders, th.adapt(make_tiny(FAMILY).bfloat16())), ["a", None])
    for row, logits in enumerate(ours):
        error, allowed = ((each - exact[row]).norm() for each in (logits[0].float(), theirs[row]))
        assert error < 2 * allowed


def test_least_recently_used_ones_are_evicted(folders: dict[str, Path]) -> None:
    """A slot holds nothing of the adapter that it had before."""
    wide = make_runner(folders, th.adapt(make_tiny(FAMILY)), max_adapters=3)
    narrow = make_runner(folders, th.adapt(make_tiny(FAMILY)), max_adapters=1)
    for name in "abcacb":
        assert all(map(torch.equal, mixed(narrow, [name]), mixed(wide, [name])))


def test_what_cannot_be_loaded_disturbs_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    runner = make_runner({"a": folders["a"]}, th.adapt(make_tiny(FAMILY)), max_lora_rank=4)
    before = mixed(runner, ["a", None])
    tensors = load_file(folders["a"] / "adapter_model.safetensors")
    single = one_by_one(tensors, 4)

    def refused(told: str, changed: Mapping[str, Tensor], **config: Any) -> None:
        own = rewritten(folders["a"], tmp_path / "changed", changed, **config)
        with pytest.raises(ValueError, match=told):
            runner.load_adapter("x", own["x"])

    refused("another base: .* for rank 3 the model has", tensors, r=3)
    fewer = {name: own[:-4] if "A" in name else own[:, :-4] for name, own in tensors.items()}
    refused(r"has factors \[16, 64\] and \[64, 16\], and for rank 4 the model has \[20", fewer)
    refused("has 2 pairs of factors .* name .*gate_up_proj.*there", tensors,
            target_parameters=["gate_up_proj"])  # fmt: skip
    other = {name.replace(".experts.0.", ".experts.9."): own for name, own in single.items()}
    refused("adapts expert 9 of model.layers.0.mlp.experts, which has 5", other)
    narrow = {name: own[..., :-1] if "A" in name else own for name, own in single.items()}
    refused(r"adapts expert 0 of .*down_proj by \[64, 31\], and the model has \[64, 32\]", narrow)
    refused("which the model does not have", {
        name.replace("gate_proj", "side_proj"): own for name, own in single.items()
    })  # fmt: skip
    save_adapter(tmp_path / "high", FAMILY, 1, r=5, **_FUSED)
    with pytest.raises(ValueError, match=r"has rank 5 in .*, and the runner's max_lora_rank is 4"):
        runner.load_adapter("x", tmp_path / "high")
    assert all(map(torch.equal, mixed(runner, ["a", None]), before))
    without = th.Runner(runner.model, compile=False, **{**SIZES, "expert_adapters": False})
    save_adapter(tmp_path / "router", FAMILY, 1, target_parameters=["mlp.gate.weight"])
    for folder in (folders["a"], tmp_path / "router"):
        assert adapts_experts(folder)
        with pytest.raises(th.UnsupportedError, match="the runner needs expert_adapters=True"):
            without.load_adapter("a", folder)
    assert not adapts_experts(folders["c"])


def test_a_model_in_memory(folders: dict[str, Path]) -> None:
    model = peft.PeftModel.from_pretrained(make_tiny(FAMILY), folders["a"]).eval()
    runner = make_runner(folders, th.adapt(make_tiny(FAMILY)), max_adapters=4)
    runner.load_adapter("x", model)
    assert experts(make_tiny(FAMILY))
    both = mixed(runner, ["x"]), mixed(runner, ["a"])
    assert all(map(torch.equal, *both))
    assert len(TEXTS) == 2
