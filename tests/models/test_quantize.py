"""Weights made integers: worth what a model of floats computes, and stored as asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_hybrid as th
from tests.errors import error_text
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, make_hybrid, make_model
from torch_hybrid.caches import room
from torch_hybrid.demo.task import checkpoint_path, make_prompts
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.integers import IntegerEmbedding
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.models import quantize as quantizing
from torch_hybrid.models.adapt import adapt
from torch_hybrid.models.load import unread
from torch_hybrid.models.quantize import plan_integers
from torch_hybrid.models.shard import cut
from torch_hybrid.ops.formats.integers import (
    MXFP4,
    NVFP4,
    _fill_4_bits,
    _fill_8_bits,
    _fill_fp4,
    dequantized,
    in_4_bits,
    in_8_bits,
    in_fp4,
)
from torch_hybrid.ranks import Ranks, SumOverRanks

# Whose rows groups of 32 divide.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5": {},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32},
    "nemotron_h": {},
    "granitemoehybrid": {"shared_intermediate_size": 64},
}
SIZES = {"max_seqs": 4, "max_tokens": 256, "kv_tokens": 512}
TEXTS = [[5, 9, 2, 77, 31, 8, 120, 4, 66], [3, 3, 90], list(range(40, 80))]
EVERYTHING: dict[str, Any] = {"keep": (), "eight_bits": ()}
FORMATS = ("int8", "int4", "mxfp4", "nvfp4")


def logits_of(model: Any, **options: Any) -> Tensor:
    runner = th.Runner(model, **SIZES, **{"compile": False, **options})
    seqs = runner.new_sequences(len(TEXTS))
    prefill = runner.extend(seqs, TEXTS, logits="all")
    return torch.cat([prefill, runner.extend(seqs, [[7], [8], [9]], logits="all")])


def widen(model: nn.Module) -> None:
    """Put floats in the place of integers: what these are worth."""
    for parent in list(model.modules()):
        if isinstance(parent, FusedExperts):
            parent.gate_up_proj, parent.down_proj = (
                nn.Parameter(dequantized(weight, scales, parent.dtype), requires_grad=False)
                for weight, scales in (
                    (parent.gate_up_proj, parent.gate_up_scales),
                    (parent.down_proj, parent.down_scales),
                )
            )
            parent.gate_up_scales = parent.down_scales = None
            parent.choice = th.select(parent.op, parent.implementations, parent.need)
        for name, child in list(parent.named_children()):
            if isinstance(child, ScaledLinear):
                worth = dequantized(child.weight, child.scales, child.dtype)
                made: nn.Module = nn.Linear(child.in_features, child.out_features, device="meta")
                made.weight, made.bias = nn.Parameter(worth, requires_grad=False), child.bias
                setattr(parent, name, made)
            elif isinstance(child, IntegerEmbedding):
                worth = dequantized(child.weight, child.scales, child.dtype)
                setattr(parent, name, nn.Embedding.from_pretrained(worth))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_what_integers_are_worth(family: str, weights: str):
    model = make_hybrid(family, **FAMILIES[family])
    th.quantize(model, weights, **EVERYTHING)
    logits = logits_of(model)
    widen(model)
    assert not any(isinstance(m, ScaledLinear) for m in model.modules())
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in BUILDERS if name not in FAMILIES])
def test_each_layer_of_integers_is_what_the_model_reads(family: str):
    """None reads a weight beside its layer, from before it was made integers or as raw numbers."""
    model = adapt(make_model(family, **FEWEST_LAYERS[family]))
    th.quantize(model, "int8", **EVERYTHING)
    logits, generator = logits_of(model), torch.Generator().manual_seed(0)
    layers = [m for m in model.modules() if isinstance(m, ScaledLinear | IntegerEmbedding)]
    assert layers
    for layer in layers:
        kept = layer.scales.clone()
        layer.scales *= 0.5 + torch.rand(kept.shape, generator=generator)
        assert not torch.equal(logits_of(model), logits), layer
        layer.scales.copy_(kept)
    widen(model)
    torch.testing.assert_close(logits, logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4", "nvfp4"])
def test_compiled_steps_merge_integers_of_one_dtype(weights: str):
    model = make_hybrid("qwen3_next", num_hidden_layers=1, layer_types=["linear_attention"])
    th.quantize(model, weights)
    expected = logits_of(model)
    with run_as_traced():
        logits = logits_of(model, compile=True)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def dtypes_by_name(model: nn.Module) -> dict[str, torch.dtype]:
    named = dict(model.named_parameters())
    return {name: weight.dtype for name, weight in named.items() if name.endswith("weight")}


def test_what_stays_and_what_has_8_bits():
    model = make_hybrid("qwen3_next")
    th.quantize(model, "int4")
    dtypes = dtypes_by_name(model)
    layer = "hf_model.model.layers.1"
    assert dtypes["hf_model.model.embed_tokens.weight"] == torch.float32
    assert dtypes[f"{layer}.mlp.gate.weight"] == torch.float32
    assert dtypes[f"{layer}.mlp.shared_expert_gate.weight"] == torch.float32
    assert dtypes["hf_model.lm_head.weight"] == torch.int8
    assert dtypes[f"{layer}.self_attn.k_proj.weight"] == torch.int8
    assert dtypes[f"{layer}.self_attn.q_proj.weight"] == torch.uint8
    assert model.layers[1].mlp.experts.down_proj.dtype == torch.uint8

    model = make_hybrid("qwen3_next")
    th.quantize(model, "int4", keep=("*lm_head", "*.mlp.*"), eight_bits=("*q_proj",))
    dtypes = dtypes_by_name(model)
    assert dtypes["hf_model.lm_head.weight"] == torch.float32
    assert dtypes["hf_model.model.embed_tokens.weight"] == torch.uint8
    assert dtypes[f"{layer}.self_attn.q_proj.weight"] == torch.int8
    assert model.layers[1].mlp.experts.down_proj.dtype == torch.float32
    assert model.dtype == torch.float32


@pytest.mark.parametrize("group", [32, 128])
def test_a_group_is_as_asked_for(group: int):
    model = make_hybrid("qwen3_5", hidden_size=128, intermediate_size=128)
    th.quantize(model, "int4", group=group, eight_bits=("*lm_head", "*_attn*"))
    up = model.layers[0].mlp.up_proj
    assert up.weight.shape == (128, 64)
    assert up.scales.shape == (128, 128 // group)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "granitemoehybrid"])
def test_a_checkpoint_is_quantized_as_it_is_read(
    family: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_model(family, **FAMILIES[family]).save_pretrained(tmp_path)
    expected = th.from_pretrained(tmp_path)
    th.quantize(expected, weights)
    held: list[int] = []
    monkeypatch.setattr(quantizing, "_STRETCH_BYTES", 1 << 12)
    for name in ("in_8_bits", "in_4_bits", "in_fp4"):
        monkeypatch.setattr(quantizing, name, counting(held, getattr(quantizing, name)))
    model = th.from_pretrained(tmp_path, weights=weights)
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    in_one = 8 if weights.endswith("fp4") else 2
    rows = max(max(weight.shape[-1], in_one * weight[0].numel()) for weight in theirs.values())
    assert max(held) <= max(1 << 12, 4 * rows)


@pytest.mark.parametrize("weights", ["int8", "int4", "nvfp4"])
def test_room_is_asked_for_what_integers_take(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_model("qwen3_5", intermediate_size=512, tie_word_embeddings=False).save_pretrained(
        tmp_path
    )
    model = th.from_pretrained(tmp_path, weights=weights)
    taken = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(room, "free_bytes", lambda device: taken)
    th.from_pretrained(tmp_path, weights=weights)
    with pytest.raises(th.CapacityError):
        th.from_pretrained(tmp_path)
    monkeypatch.setattr(room, "free_bytes", lambda device: taken - 1)
    monkeypatch.setattr(quantizing, "read_rows", None)  # nothing is read
    with pytest.raises(th.CapacityError, match=f"the weights need {taken:,} bytes"):
        th.from_pretrained(tmp_path, weights=weights)


def counting(held: list[int], function: Any) -> Any:
    def run(weight: Tensor, *arguments: int) -> Any:
        held.append(weight.nbytes)
        return function(weight, *arguments)

    return run


def test_two_ranks_make_integers_of_their_parts(tmp_path: Path):
    """Rows that are cut whole keep their scales."""
    make_model("qwen3_5", intermediate_size=128).save_pretrained(tmp_path)
    device = torch.device("cpu")
    checkpoint, whole = unread(str(tmp_path), "auto", device)
    quantizing.quantize_unread(whole, plan_integers(whole, "int8"), checkpoint, device)
    checkpoint, part = unread(str(tmp_path), "auto", device)
    cut(part, Ranks(rank=1, size=2, group_name="none"), "tensor")
    quantizing.quantize_unread(part, plan_integers(part, "int8"), checkpoint, device)
    all_rows, own_rows = whole.layers[0].mlp.up_proj, part.layers[0].mlp.part.up_proj
    assert torch.equal(own_rows.weight, all_rows.weight[64:])
    assert torch.equal(own_rows.scales, all_rows.scales[64:])
    summed = part.layers[0].linear_attn.mixer.out_proj
    assert isinstance(summed, SumOverRanks)
    assert isinstance(summed.part, ScaledLinear)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_near_no_number(value: float):
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(3, 64, dtype=dtype)
        weight[1, 40] = value
        for quantized in (
            lambda own=weight: in_8_bits(own),
            lambda own=weight: in_4_bits(own, 32),
            lambda own=weight: in_fp4(own, MXFP4),
            lambda own=weight: in_fp4(own, NVFP4),
        ):
            with pytest.raises(ValueError, match="has NaN or infinite values"):
                quantized()


def test_numbers_are_the_nearest_and_scales_the_best():
    weight = torch.randn(3, 5, 64)
    numbers, scales = in_8_bits(weight)
    error = (dequantized(numbers, scales, torch.float32) - weight).abs()
    assert (error <= scales[..., None] * 0.5001).all()
    numbers, scales = in_4_bits(weight, 32)
    error = dequantized(numbers, scales, torch.float32) - weight
    plain_scales = weight.unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True) / 7
    plain = (weight.unflatten(-1, (2, 32)) / plain_scales).round() * plain_scales
    squares = error.unflatten(-1, (2, 32)).square().sum(-1)
    assert (squares <= 1.0001 * (plain - weight.unflatten(-1, (2, 32))).square().sum(-1)).all()
    for block in (MXFP4, NVFP4):
        numbers, scales = in_fp4(weight, block)
        groups = weight.unflatten(-1, (-1, block))
        largest = groups.abs().amax(-1)
        error = (dequantized(numbers, scales, torch.float32) - weight).unflatten(-1, (-1, block))
        assert (error.abs().amax(-1) <= 0.2501 * largest).all()
        if block == MXFP4:  # no worse than the least power of two that cuts nothing off
            plain = 2.0 ** (largest / 6).log2().ceil()[..., None]
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            nearest = ((groups / plain).abs()[..., None] - values).abs().amin(-1) * plain
            assert (error.square().sum(-1) <= 1.0001 * nearest.square().sum(-1)).all()
    zeros = torch.zeros(2, 32)
    for made in (in_8_bits(zeros), in_4_bits(zeros, 32), *(in_fp4(zeros, b) for b in (16, 32))):
        assert torch.equal(dequantized(*made, torch.float32), zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_of_our_kernel_are_those_of_torch(dtype: torch.dtype):
    weight = torch.randn(7, 384).to(dtype)
    weight[3, 128:256] = 0
    for rows in (weight, weight[:, :77]):
        numbers, scales = in_8_bits(rows)
        expected = torch.empty_like(numbers), torch.empty_like(scales)
        _fill_8_bits(rows, *expected)
        assert torch.equal(numbers, expected[0])
        assert torch.equal(scales, expected[1])
    for group in (32, 64, 128):
        made = in_4_bits(weight, group)
        expected = torch.empty_like(made[0]), torch.empty_like(made[1])
        _fill_4_bits(weight, *expected)
        ours, theirs = (
            (dequantized(*pair, torch.float32) - weight).square().sum() for pair in (made, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [MXFP4, NVFP4])
def test_fp4_of_our_kernel_has_the_bits_of_torch(block: int, dtype: torch.dtype):
    info = torch.finfo(dtype)
    rows = torch.randn(64, 416, dtype=torch.float64)
    rows[8] *= info.max / 6
    rows[9] *= info.tiny
    rows[10] *= info.tiny / 64  # subnormal
    rows[11:14] *= torch.logspace(-60, 20, 416, base=2, dtype=torch.float64)
    rows[14] = rows[7, 64:192] = 0
    rows[15, :208], rows[15, 300] = -0.0, info.max
    rows[16:40] = torch.randint(-28, 29, (24, 416)) / 4  # between two numbers of FP4
    rows[40] = info.smallest_normal * info.eps  # the least there is
    weight = rows.clamp(info.min, info.max).to(dtype)
    for part in (weight, weight[:, :32], weight[:, 5:101], weight[:0], weight[:, :0]):
        numbers, scales = in_fp4(part, block)
        expected = torch.empty_like(numbers), torch.empty_like(scales)
        _fill_fp4(part, *expected, block)
        assert torch.equal(scales, expected[1])
        assert torch.equal(numbers, expected[0])


def test_the_demo_still_recalls_with_integers():
    prompts = make_prompts(8, seed=5)
    for weights in FORMATS:
        runner = th.Runner(
            th.from_pretrained(checkpoint_path(), weights=weights),
            max_seqs=8,
            max_tokens=2048,
            kv_tokens=4096,
            compile=False,
        )
        sampling = th.Sampling(max_new_tokens=8, temperature=0.0)
        outputs = th.Engine(runner).generate([prompt.tokens for prompt in prompts], sampling)
        assert [output.tokens for output in outputs] == [p.answer for p in prompts]


def refused(error: type[Exception], model: Any, *arguments: Any, **options: Any) -> str:
    return error_text(error, th.quantize, model, *arguments, **options)


def test_what_is_refused(tmp_path: Path):
    model = make_hybrid("qwen3_5", intermediate_size=80)
    assert refused(ValueError, model, "int3") == (
        "weights must be one of ['int8', 'int4', 'mxfp4', 'nvfp4'], got 'int3'"
    )
    assert refused(TypeError, model.hf_model, "int8").endswith("got Qwen3_5ForCausalLM")
    assert refused(TypeError, model, "int8", keep="*embed*") == (
        "keep must be a list of patterns of names, got '*embed*'"
    )
    assert refused(ValueError, model, "int4", group=48) == "group must be 32, 64 or 128, got 48"
    assert refused(ValueError, model, "int4") == (
        "hf_model.model.layers.0.mlp.down_proj has rows of 80 numbers, which groups of 32 do not "
        "divide: choose another group, or name it in keep or eight_bits"
    )
    assert refused(ValueError, model, "nvfp4").endswith(
        "rows of 80 numbers, which groups of 32 do not divide: name it in keep or eight_bits"
    )
    assert model.layers[0].mlp.up_proj.weight.dtype == torch.float32  # nothing was changed
    th.quantize(model, "int8")
    first = next(n for n, weight in model.named_parameters() if weight.dtype == torch.int8)
    assert refused(th.UnsupportedError, model, "int8") == (
        f"{first} is quantized already, to torch.int8"
    )
    with pytest.raises(
        ValueError, match=r"weights must be one of .'auto', 'int8', 'int4', 'mxfp4'"
    ):
        th.from_pretrained(tmp_path, weights="int3")


def test_adapted_after_all_in_bfloat16():
    model = adapt(make_model("qwen3_5").to(torch.bfloat16))
    th.quantize(model, "int4")
    assert model.dtype == torch.bfloat16
    assert logits_of(model).isfinite().all()


@pytest.mark.parametrize("package", ["bitsandbytes.nn.modules", "torchao.dtypes"])
def test_a_model_that_others_quantized(package: str):
    model = make_model("qwen3_5")
    layer = model.model.layers[-1]
    linear = layer.self_attn.k_proj
    if package.startswith("torchao"):
        theirs = type("AffineQuantizedTensor", (nn.Parameter,), {"__module__": package})
        linear.weight.__class__ = theirs
    else:
        linear.__class__ = type("Linear4bit", (nn.Linear,), {"__module__": package})
    with pytest.raises(th.UnsupportedError, match=r"self_attn.k_proj holds a"):
        adapt(model)
