"""Checkpoints of integers that others made: loaded in their layout, worth what twins are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_hybrid as th
from tests.models import packed_checkpoint
from tests.models.checkpoint.test_block_fp8 import read_cut
from tests.models.fp8_checkpoint import change_config
from tests.models.oracle import ask, assert_serves, decoded, make_texts
from tests.models.packed_checkpoint import (
    AWQ_CONFIG,
    FORMATS,
    compressed_config,
    gptq_config,
    packed,
)
from tests.tiny_models import FEWEST_LAYERS, make_model
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.side_by_side import SideBySide
from torch_hybrid.models.checkpoint.packed_integers import _transposed_blocks
from torch_hybrid.ops.formats.stored_weights import dequantized

LENGTHS = (3, 40, 90)
SIZES = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 512}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "seed": 1,
        **FEWEST_LAYERS["qwen3_next"],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "qwen3_5": FEWEST_LAYERS["qwen3_5"],
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 48,
        "v_head_dim": 64,
    },
}
_INTEGERS = (torch.int8, torch.uint8, torch.int32)


def checkpoint(family: str, folder: Path, name: str, **options: Any) -> Path:
    """Write one of a family in one of the formats, and return its twin's folder."""
    given = {**packed_checkpoint.SIZES, **OPTIONS[family], **options}
    return packed_checkpoint.save(make_model(family, **given), folder, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_next"])
def test_logits_are_those_of_the_twin(family: str, name: str, tmp_path: Path):
    assert_as_twin(tmp_path, checkpoint(family, tmp_path, name))


@pytest.mark.parametrize("name", ["compressed_with_zeros", "awq"])
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_other_families(family: str, name: str, tmp_path: Path):
    assert_as_twin(tmp_path, checkpoint(family, tmp_path, name))


def assert_as_twin(folder: Path, twin: Path) -> None:
    oracle = ask(AutoModelForCausalLM.from_pretrained(twin), make_texts(LENGTHS))
    model = th.from_pretrained(folder, dtype=torch.float32)
    held = sum(weight.nbytes for weight in model.parameters() if weight.dtype in _INTEGERS)
    stored = load_file(folder / "model.safetensors")
    numbers = ("weight_packed", "qweight", "proj.weight")
    integers = [w for key, w in stored.items() if key.endswith(numbers)]
    assert held > 0.8 * sum(w.nbytes for w in integers if w.dtype in _INTEGERS)
    assert_serves(th.Runner(model, **SIZES, compile=False), oracle, list(decoded(LENGTHS, 2)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_rank_has_its_part_of_the_twin(family: str, name: str, rank: int, tmp_path: Path):
    folder = checkpoint(family, tmp_path, name)
    ours, theirs = read_cut(tmp_path, rank), read_cut(folder, rank)
    compared = 0
    for name, module in ours.named_modules():
        match module:
            case SideBySide():
                parts = [_worth(part) for part in module.parts]
                assert torch.equal(torch.cat(parts), theirs.get_submodule(name).weight), name
            case ScaledLinear() if ".parts." not in name:
                name = name.removesuffix(".part")
                assert torch.equal(_worth(module), theirs.get_submodule(name).weight), name
            case FusedExperts():
                expected = theirs.get_submodule(name)
                for given, scales, whole in (
                    (module.gate_up_proj, module.gate_up_scales, expected.gate_up_proj),
                    (module.down_proj, module.down_scales, expected.down_proj),
                ):
                    assert torch.equal(dequantized(given, scales, torch.float32), whole), name
            case _:
                continue
        compared += 1
    assert compared > 8


def _worth(linear: Any) -> Tensor:
    if isinstance(linear, ScaledLinear):
        return dequantized(linear.weight, linear.scales, torch.float32)
    return linear.weight


def test_blocks_of_awq_are_transposed():
    numbers = torch.randint(0, 16, (16, 24))  # rows, columns
    words = packed(numbers.T[:, i::8] for i in (0, 2, 4, 6, 1, 3, 5, 7))  # [24, 2]
    blocks = words.unflatten(0, (-1, 8)).permute(2, 1, 0)
    expected = packed(numbers[:, i::8] for i in range(8))
    assert torch.equal(_transposed_blocks(blocks).flatten(0, 1), expected)


# ---- what is refused -------------------------------------------------------------------------

ACT_ORDER = "columns in another order than their groups (act-order) are not served"
_8_BITS = compressed_config("int-quantized", num_bits=8, strategy="channel")
_ROUNDED = compressed_config("int-quantized", num_bits=8, strategy="channel")
_ROUNDED["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
_ROUNDED_FP4 = compressed_config("nvfp4-pack-quantized", type="float")
_ROUNDED_FP4["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "float"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gptq_config(bits=3), "field quantization_config.bits must be 4, got 3"),
        (gptq_config(desc_act=True), f"desc_act must be False, got True: {ACT_ORDER}"),
        (gptq_config(group_size=48), "group_size must be 32 or 64 or 128 or -1, got 48"),
        (gptq_config(checkpoint_format="marlin"), "must be 'gptq' or 'gptq_v2', got 'marlin'"),
        (gptq_config(dynamic={"-:head": {}, "+:up": {"bits": 8}}), "leave modules out ('-:'), got"),
        (gptq_config(rotation="hadamard"), "not known here: quantization_config.rotation"),
        (AWQ_CONFIG | {"version": "gemv"}, "version must be 'gemm' or 'GEMM', got 'gemv'"),
        (AWQ_CONFIG | {"zero_point": False}, "zero_point must be True, got False"),
        (
            compressed_config("naive-quantized"),
            "format must be 'pack-quantized' or 'int-quantized'",
        ),
        (compressed_config("mxfp4-pack-quantized"), "weights.type must be 'float', got 'int'"),
        (
            compressed_config("nvfp4-pack-quantized", type="float", strategy="tensor_group"),
            "weights.group_size must be 16, got 32",
        ),
        (
            compressed_config("mxfp4-pack-quantized", type="float", symmetric=False),
            "weights.symmetric must be True, got False",
        ),
        (
            _ROUNDED_FP4,
            "input_activations must be None, got {'num_bits': 4, 'type': 'float'}: what",
        ),
        (
            compressed_config("pack-quantized", actorder="group"),
            f"actorder must be None or False or 'static' or 'weight', got 'group': {ACT_ORDER}",
        ),
        (compressed_config("pack-quantized", type="float"), "type must be 'int', got 'float'"),
        (compressed_config("pack-quantized", group_size=16), "must be 32 or 64 or 128, got 16"),
        (
            compressed_config("pack-quantized", rotated=True),
            "config_groups.group_0.weights.rotated",
        ),
        (_8_BITS | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be None, got"),
        (_8_BITS | {"transform_config": {"R1": {}}}, "transform_config must be None or {}, got"),
        (_ROUNDED, "input_activations must be None, got {'num_bits': 8}: what weights meet is not"),
    ],
)
def test_schemes_that_are_refused(config: dict[str, Any], expected: str, tmp_path: Path):
    make_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(th.UnsupportedError) as error:
        th.from_pretrained(tmp_path)
    assert expected in str(error.value)
    assert str(error.value).startswith("qwen3: config field")


def changed(folder: Path, name: str, **tensors: Tensor | None) -> str:
    """What is said of a checkpoint of which the tensors of one layer are changed."""
    checkpoint("qwen3_5", folder, name)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for part, tensor in tensors.items():
        key = f"{LAYER}.{part}"
        del weights[key]
        if tensor is not None:
            weights[key] = tensor
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=LAYER) as error:
        th.from_pretrained(folder)
    return str(error.value)


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "part", "tensor", "expected"),
    [
        ("compressed", "weight_scale", None, "must have scales of shape [128, 4] in"),
        ("compressed", "weight_scale", torch.ones(128, 3), f"got {LAYER}.weight_scale [128, 3] in"),
        (
            "compressed_with_zeros",
            "weight_zero_point",
            None,
            "zero points of shape [16, 4] in int32",
        ),
        ("gptq", "scales", torch.ones(4, 120).half(), "must have scales of shape [4, 128] in"),
        ("gptq", "scales", torch.ones(4, 128).double(), "scales [4, 128] in float64"),
        ("gptq", "qzeros", torch.zeros(4, 16, dtype=torch.int32), "zero points other than 8"),
        ("gptq", "g_idx", torch.arange(128, dtype=torch.int32).flip(0) // 32, "(act-order)"),
        ("awq", "qzeros", torch.zeros(4, 15, dtype=torch.int32), "of shape [4, 16] in int32"),
        (
            "awq",
            "scales",
            torch.full((4, 128), torch.nan).half(),
            f"weight {LAYER}.scales has 512 NaN",
        ),
        ("mxfp4", "weight_scale", torch.ones(128, 4), "of shape [128, 4] in uint8, got"),
        ("mxfp4", "weight_scale", torch.ones(128, 8).byte(), "scales of shape [128, 4] in uint8"),
        (
            "mxfp4",
            "weight_scale",
            torch.full((128, 4), 255).byte(),
            f"weight {LAYER}.weight_scale has 512 NaN",
        ),
        ("mxfp4", "weight_packed", torch.zeros(128, 64).int(), "of shape [128, 64] in uint8, got"),
        ("nvfp4", "weight_scale", torch.ones(128, 8), "scales of shape [128, 8] in float8_e4m3fn"),
        ("nvfp4", "weight_global_scale", None, "a global scale of shape [1] in float32, got none"),
        ("nvfp4", "weight_global_scale", torch.ones(2), "weight_global_scale [2] in float32"),
        ("nvfp4", "weight_global_scale", torch.zeros(1), "must be positive and finite, got 0"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, part: str, tensor: Tensor | None, expected: str, tmp_path: Path
):
    assert expected in changed(tmp_path, name, **{part: tensor})


def test_rows_of_fp4_of_another_size(tmp_path: Path):
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    checkpoint("qwen3_5", tmp_path, "nvfp4", intermediate_size=80, **heads)
    with pytest.raises(ValueError, match="a multiple of 32 numbers in FP4, got 80"):
        th.from_pretrained(tmp_path)


def test_ranks_that_cut_groups(tmp_path: Path):
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    checkpoint("qwen3_5", tmp_path, "gptq", intermediate_size=96, **heads)
    with pytest.raises(th.UnsupportedError) as error:
        read_cut(tmp_path, 1)
    assert str(error.value) == (
        "model.layers.0.mlp.down_proj.weight of 4 bits cannot be cut at 48 and 96: its scales are "
        "those of groups of 32"
    )
