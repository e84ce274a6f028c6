"""Checkpoints with weights of 8 bits: loaded as they lie in the file, worth what twins are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_hybrid as th
from tests.models import fp8_checkpoint
from tests.models.fp8_checkpoint import QUANTIZATION, change_config
from tests.models.oracle import (
    ask,
    assert_rounds_like,
    assert_serves,
    chunked,
    decoded,
    make_texts,
    serve,
)
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, in_double, make_model
from torch_hybrid.explain.sections import implementations
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.checkpoint.read import read_weights
from torch_hybrid.models.load import unread
from torch_hybrid.models.scaled_weights import hold_scales
from torch_hybrid.models.shard import cut
from torch_hybrid.ops.formats.block_scales import dequantized
from torch_hybrid.ranks import Ranks

LENGTHS = (3, 40, 90)
_TWO_LAYERS = FEWEST_LAYERS["qwen3_next"]
SIZES = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 512}
_MOE = {"moe_intermediate_size": 256}
_LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "v_head_dim": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    # Rows of two heads share a block, and are sorted apart.
    "qwen3_next": {
        "seed": 1,
        **_MOE,
        "shared_expert_intermediate_size": 256,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "qwen3_5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen3_5_moe": {**_MOE, "shared_expert_intermediate_size": 256},
    "qwen3": {},
    "deepseek_v3": {**_MOE, **_LATENT},
    "kimi_linear": {**_MOE, **_LATENT, "linear_num_heads": 4, "linear_head_dim": 64},
    "bailing_hybrid": {**_MOE, "kv_lora_rank": 128, "head_dim": 64},
    "nemotron_h": {**_MOE},
}
if "lara_mini" in BUILDERS:  # whose projections are rows of one weight, not all of whole blocks
    OPTIONS["lara_mini"] = {
        **_MOE,
        "shared_expert_intermediate_size": 256,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }


def checkpoint(family: str, folder: Path, **options: Any) -> Path:
    """Write one of a family, and return its twin's folder."""
    given = {**fp8_checkpoint.SIZES, **OPTIONS[family], **options}
    return fp8_checkpoint.save(make_model(family, **given), folder)


def stored_in_8_bits(folder: Path) -> int:
    weights = load_file(folder / "model.safetensors").values()
    return sum(weight.numel() for weight in weights if weight.dtype == torch.float8_e4m3fn)


def held_in_8_bits(model: Any) -> int:
    return sum(w.numel() for w in model.parameters() if w.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize("family", OPTIONS)
def test_logits_are_those_of_the_twin(family: str, tmp_path: Path):
    twin = AutoModelForCausalLM.from_pretrained(checkpoint(family, tmp_path))
    oracle = ask(twin, make_texts(LENGTHS))
    model = th.from_pretrained(tmp_path, dtype=torch.float32)
    assert held_in_8_bits(model) > 0.8 * stored_in_8_bits(tmp_path)
    assert_serves(th.Runner(model, **SIZES, compile=False), oracle, list(decoded(LENGTHS, 2)))


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_bfloat16_rounds_like_the_twin(family: str, tmp_path: Path):
    folder = checkpoint(family, tmp_path, n_routed_experts=2, n_group=1, topk_group=1)
    twin = AutoModelForCausalLM.from_pretrained(folder)
    texts = make_texts(LENGTHS)
    exact, rounded = ask(in_double(twin), texts), ask(twin.bfloat16(), texts)
    model = th.from_pretrained(tmp_path)
    assert model.dtype is torch.bfloat16
    served = serve(th.Runner(model, **SIZES, compile=False), texts, list(decoded(LENGTHS, 2)))
    assert_rounds_like(served, rounded, exact, torch.bfloat16)


@pytest.mark.slow
def test_compiled(tmp_path: Path):
    """Layers of one input are one op, those of 8 bits by themselves; in decode, whose layers are
    those of every step."""
    twin = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_next", tmp_path, **_TWO_LAYERS))
    lengths = (4, 4)
    oracle = ask(twin, make_texts(lengths))
    model = th.from_pretrained(tmp_path, dtype=torch.float32)
    runner = th.Runner(model, **SIZES, prefill=False)
    assert_serves(runner, oracle, chunked(lengths, 1))
    chosen = {choice.op: choice.impl for choice in runner.choices}
    assert chosen == {"fp8 linear": "cpp", "fp8 fused_experts": "cpp", "linear": "cpp"}
    [graph] = runner.report().graphs.values()
    # The head; of each layer: the mixer's input (in one of them narrow ones are plain), its
    # output, routers with the plain gate of a shared expert, that one's input and output.
    assert graph.ops["linear[cpp]"] == 1 + 5 + 6


def test_implementations_by_name(tmp_path: Path):
    checkpoint("qwen3_next", tmp_path, **_TWO_LAYERS)
    model = th.from_pretrained(tmp_path)
    ops = {"fp8 linear": "torch", "fused_experts": "torch"}
    runner = th.Runner(model, **SIZES, compile=False, backends=th.Backends(ops=ops))
    rows = {row[1]: row[2].partition("\n")[0] for row in implementations(runner).rows}
    assert rows["fp8 linear"] == rows["fp8 fused_experts"] == "torch"
    with pytest.raises(th.UnsupportedError, match="triton_fp8: device cpu is not in"):
        th.Runner(model, **SIZES, backends=th.Backends(ops={"fp8 linear": "triton_fp8"}))


def test_rows_of_whole_blocks_stay_one_weight(tmp_path: Path):
    """Sorted apart as they are in Qwen3-Next; narrow projections stay as they were."""
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    checkpoint("qwen3_next", tmp_path, **_TWO_LAYERS, **heads)
    model = th.from_pretrained(tmp_path)
    mixer = model.layers[0].linear_attn.mixer
    wide, narrow = mixer.in_proj.parts
    assert wide.weight.shape == (1536, 192)
    assert wide.scales.shape == (12, 2)
    assert (type(narrow), narrow.weight.shape) == (torch.nn.Linear, (8, 192))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("family", OPTIONS)
def test_a_rank_has_its_part_of_the_twin(family: str, rank: int, tmp_path: Path):
    """Numbers times scales are what the same rank has of the twin."""
    folder = checkpoint(family, tmp_path)
    ours, theirs = read_cut(tmp_path, rank), read_cut(folder, rank)
    for name, module in ours.named_modules():
        match module:
            case SideBySide():
                parts = [_worth(part) for part in module.parts]
                expected = theirs.get_submodule(name).weight
                assert torch.equal(torch.cat(parts), expected), name
            case ScaledLinear() if ".parts." not in name:
                name = name.removesuffix(".part")
                assert torch.equal(_worth(module), theirs.get_submodule(name).weight), name
            case FusedExperts() if family != "lara_mini":  # which is stored whole, in floats
                expected = theirs.get_submodule(name)
                num_parts = 1 + (module.activation == "silu")
                weights = module.gate_up_proj, module.gate_up_scales
                worth = dequantized(*weights, torch.float32, num_parts=num_parts)
                assert torch.equal(worth, expected.gate_up_proj), name
                worth = dequantized(module.down_proj, module.down_scales, torch.float32)
                assert torch.equal(worth, expected.down_proj), name


def read_cut(folder: Path, rank: int) -> Any:
    """What one of two ranks has of a checkpoint, in float32."""
    cpu = torch.device("cpu")
    opened, model = unread(str(folder), torch.float32, cpu)
    cut(model, Ranks(rank=rank, size=2, group_name="two"), "tensor")
    hold_scales(model)
    read_weights(model, opened, cpu)
    return model


def _worth(linear: Any) -> Tensor:
    if isinstance(linear, ScaledLinear):
        return dequantized(linear.weight, linear.scales, torch.float32)
    return linear.weight


def test_scales_in_bfloat16(tmp_path: Path):
    options = {**fp8_checkpoint.SIZES, "num_hidden_layers": 1}
    hf_model = make_model("qwen3", **options)
    twin = fp8_checkpoint.save(hf_model, tmp_path, scale_dtype=torch.bfloat16)
    oracle = ask(AutoModelForCausalLM.from_pretrained(twin), make_texts(LENGTHS))
    runner = th.Runner(th.from_pretrained(tmp_path, dtype=torch.float32), **SIZES, compile=False)
    assert_serves(runner, oracle, list(decoded(LENGTHS, 2)))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("weight_block_size", [64, 128], "must be [128, 128], got [64, 128]"),
        ("weight_block_size", None, "must be [128, 128], got None"),
        ("activation_scheme", "static", "must be 'dynamic', got 'static'"),
        ("fmt", "e5m2", "must be 'e4m3', got 'e5m2'"),
    ],
)
def test_other_schemes_are_refused(field: str, value: Any, expected: str, tmp_path: Path):
    checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    change_config(tmp_path, quantization_config={**QUANTIZATION, field: value})
    with pytest.raises(th.UnsupportedError) as error:
        th.from_pretrained(tmp_path)
    assert str(error.value) == f"qwen3: config field quantization_config.{field} {expected}"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda scales: None, "none"),
        (lambda scales: scales[:1].clone(), "[1, 2] in float32"),
        (lambda scales: scales.half(), "[2, 2] in float16"),
    ],
)
def test_scales_that_do_not_fit(
    change: Callable[[Tensor], Tensor | None], got: str, tmp_path: Path
):
    checkpoint("qwen3", tmp_path, num_hidden_layers=1, head_dim=64)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    changed = change(weights.pop(f"{name}_scale_inv"))
    if changed is not None:
        weights[f"{name}_scale_inv"] = changed
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match="must have scales") as error:
        th.from_pretrained(tmp_path)
    assert str(error.value) == (
        f"{name} in {tmp_path} must have scales {name}_scale_inv of shape [2, 2] in float32 or "
        f"bfloat16, got {got}"
    )


def test_numbers_that_are_nan(tmp_path: Path):
    checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name].view(torch.uint8)[3, :2] = 0x7F
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"weight {name} has 2 NaN or infinite values"):
        th.from_pretrained(tmp_path)


def test_experts_that_are_cut_within_blocks(tmp_path: Path):
    checkpoint("qwen3_next", tmp_path, **_TWO_LAYERS, moe_intermediate_size=384)
    with pytest.raises(th.UnsupportedError) as error:
        read_cut(tmp_path, 1)
    assert str(error.value) == (
        "model.layers.0.mlp.experts.0.gate_proj.weight of 8 bits cannot be cut at 192 and 384: its "
        "scales are those of blocks of 128"
    )


def test_models_in_memory_are_notread_cut(tmp_path: Path):
    checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    with pytest.raises(th.UnsupportedError, match="from_pretrained"):
        th.shard(th.from_pretrained(tmp_path))


def test_under_autocast(tmp_path: Path):
    """Layers compute in the dtype that they were loaded for."""
    checkpoint("qwen3_next", tmp_path, **_TWO_LAYERS)
    runner = th.Runner(th.from_pretrained(tmp_path), **SIZES, compile=False)
    seqs = runner.new_sequences(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert runner.extend(seqs, [[1, 2, 3]]).isfinite().all()
