"""Adapters train over quantized weights that are frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

import torch_hybrid as th
from tests.tiny_models import make_model
from tests.training.test_companions import LORA, TARGETS, loss_of
from tests.training.twins import furthest, grads
from torch_hybrid.ops.formats.block_scales import dequantized


def test_quantized_weights_are_refused():
    model = make_model("qwen3_next_dense", num_hidden_layers=2)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(th.UnsupportedError, match="call get_peft_model first"):
        th.make_trainable(model)


def make_fp8_pair(family: str = "qwen3_next_dense") -> list[Any]:
    """Make a LoRA over FP8 layers, and the same over their dequantized weights."""
    return adapted(*make_fp8_bases(family))


def make_fp8_bases(family: str = "qwen3_next_dense") -> tuple[Any, Any]:
    fp8 = make_model(family, num_hidden_layers=2)
    for parent in list(fp8.model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear:
                setattr(parent, name, to_fp8(linear))
    plain = copy.deepcopy(fp8)
    for parent in list(plain.model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, FP8Linear):
                weight = dequantized(layer.weight, layer.weight_scale_inv, torch.float32)
                linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                linear.weight = torch.nn.Parameter(weight.detach())
                setattr(parent, name, linear)
    fp8.config.quantization_config = {"quant_method": "fp8"}
    return fp8, plain


def adapted(quantized: Any, plain: Any) -> list[Any]:
    """Put the same adapters on two models, and make them trainable."""
    config = peft.LoraConfig(target_modules=TARGETS, **LORA)
    pair = [th.make_trainable(peft.get_peft_model(m, config)).train() for m in (quantized, plain)]
    with torch.no_grad():
        theirs = dict(pair[1].named_parameters())
        for name, adapter in pair[0].named_parameters():
            if "lora" in name:
                theirs[name].copy_(adapter)
    return pair


def to_fp8(linear: torch.nn.Linear) -> Any:
    layer = FP8Linear(linear.in_features, linear.out_features, (128, 128))
    blocks = layer.weight_scale_inv.shape
    scales = torch.linspace(1e-3, 2e-3, blocks.numel()).reshape(blocks)
    by_row = scales.repeat_interleave(128, 0)[: linear.out_features]
    by_element = by_row.repeat_interleave(128, 1)[:, : linear.in_features]
    numbers = (linear.weight.detach() / by_element).clamp(-448, 448)
    layer.weight = torch.nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("qwen3_next_dense", False), ("qwen3_next_dense", True), ("kimi_k3", False)],
)
def test_adapters_over_fp8_have_the_gradients_of_the_dequantized_base(family: str, compiled: bool):
    fp8, plain = make_fp8_pair(family)
    want = grads(plain, loss_of(plain))
    step = torch.compile(fp8, fullgraph=True, backend="aot_eager") if compiled else fp8
    got = grads(fp8, loss_of(step))
    assert all("lora" in name for name in got)
    assert furthest(got, want) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_no_dequantized_weight_is_kept_for_the_backward(compiled: bool):
    fp8, _ = make_fp8_pair()
    layer = fp8.base_model.model.model.layers[0].mlp.up_proj
    kept = []
    x = torch.randn(3, layer.in_features, requires_grad=True)
    product = torch.compile(layer, fullgraph=True) if compiled else layer
    product(x)  # compiled outside of the hooks
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        product(x)
    weights = [each for each in kept if each.numel() >= layer.weight.numel()]
    assert [each.dtype for each in weights] == [torch.float8_e4m3fn]


def test_an_adapter_over_fp8_loads_again(tmp_path: Path):
    fp8, _ = make_fp8_pair()
    fp8.save_pretrained(tmp_path)
    saved = {name: each.clone() for name, each in fp8.named_parameters() if "lora" in name}
    with torch.no_grad():
        for name, each in fp8.named_parameters():
            if "lora" in name:
                each.zero_()
    fp8.load_adapter(tmp_path, "default")
    for name, each in fp8.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(each, saved[name], rtol=0, atol=0)


def test_fp8_blocks_of_another_size_are_refused():
    model = make_model("qwen3_next_dense", num_hidden_layers=2)
    layer = model.model.layers[0].mlp
    layer.up_proj = FP8Linear(layer.up_proj.in_features, layer.up_proj.out_features, (64, 64))
    with pytest.raises(th.UnsupportedError, match=r"blocks of 128 x 128, got \(64, 64\)"):
        th.make_trainable(model)


def test_the_product_with_a_frozen_weight_is_a_sound_op():
    torch.manual_seed(0)
    layer = to_fp8(torch.nn.Linear(200, 140, bias=False))
    x = torch.randn(2, 3, 200, requires_grad=True)
    from torch_hybrid.training.frozen_products import frozen_product as op  # registers the op

    # test_schema multiplies FP8 numbers, which a CPU cannot.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (x, layer.weight, layer.weight_scale_inv, None, False)
    torch.library.opcheck(op, args, test_utils=tests)
    want = dequantized(layer.weight, layer.weight_scale_inv, x.dtype)
    got = torch.autograd.grad(op(*args).sum(), x)[0]
    torch.testing.assert_close(got, want.sum(0).expand_as(x))


def to_fp8_experts(experts: Any, config: Any) -> Any:
    """Quantize experts, and round the plain ones to what the FP8 ones are worth."""
    made = FP8Experts(config, (128, 128))
    for name in ("gate_up_proj", "down_proj"):
        weight, scales = getattr(experts, name), getattr(made, f"{name}_scale_inv")
        scales.data = torch.linspace(1e-3, 2e-3, scales.numel()).view(scales.shape)
        unit = dequantized(torch.ones_like(weight).to(torch.float8_e4m3fn), scales, torch.float32)
        getattr(made, name).data = (weight / unit).detach().to(torch.float8_e4m3fn)
        weight.data = dequantized(getattr(made, name), scales, torch.float32).detach()
    return made.requires_grad_(False)


def make_fp8_experts_bases() -> tuple[Any, Any]:
    plain = make_model("qwen3_next", num_hidden_layers=2, moe_intermediate_size=128)
    fp8 = copy.deepcopy(plain)
    for theirs, ours in zip(plain.model.layers, fp8.model.layers, strict=True):
        ours.mlp.experts = to_fp8_experts(theirs.mlp.experts, fp8.config)
    fp8.config.quantization_config = {"quant_method": "fp8"}
    return fp8, plain


def test_adapters_beside_fp8_experts_have_the_gradients_of_the_dequantized_base():
    fp8, plain = adapted(*make_fp8_experts_bases())
    want = grads(plain, loss_of(plain))
    assert furthest(grads(fp8, loss_of(fp8)), want) < 1e-5
    graph = torch.compile(fp8, fullgraph=True, backend="aot_eager")
    assert furthest(grads(fp8, loss_of(graph)), want) < 1e-5
    experts = fp8.base_model.model.model.layers[0].mlp.experts
    assert "gate_up_proj" in dict(experts.named_parameters())


def test_fp8_experts_keep_no_dequantized_weight():
    fp8, _ = adapted(*make_fp8_experts_bases())
    experts = fp8.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(5, 64, requires_grad=True)
    picked = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [1, 3]])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, picked, torch.full((5, 2), 0.5))
    weights = [each for each in kept if each.numel() >= experts.down_proj.numel()]
    assert [each.dtype for each in weights] == [torch.float8_e4m3fn] * 2


def test_rows_past_the_experts_are_zero():
    fp8, _ = adapted(*make_fp8_experts_bases())
    experts = fp8.base_model.model.model.layers[0].mlp.experts
    x, weights = torch.randn(3, 64), torch.ones(3, 2)
    some = torch.tensor([[0, 1], [2, 2], [3, 0]])
    missing = experts(x, torch.where(some == 2, experts.num_experts, some), weights)
    full = experts(x, some, weights)
    assert not missing[1].any()
    torch.testing.assert_close(missing[[0, 2]], full[[0, 2]])


def test_adapters_of_fp8_experts_themselves_are_refused():
    fp8, _ = make_fp8_experts_bases()
    config = peft.LoraConfig(
        target_modules=TARGETS, target_parameters=["mlp.experts.down_proj"], **LORA
    )
    with pytest.raises(th.UnsupportedError, match="FP8Experts have no adapters of their own"):
        th.make_trainable(peft.get_peft_model(fp8, config))


def test_quantized_weights_that_would_train_are_refused():
    fp8, _ = make_fp8_bases()
    model = peft.get_peft_model(fp8, peft.LoraConfig(target_modules=TARGETS, **LORA))
    model.base_model.model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(th.UnsupportedError, match=r"FP8Linear.weight is quantized .* freeze it"):
        th.make_trainable(model)


def test_other_formats_are_refused_under_peft():
    model = make_model("qwen3_next_dense", num_hidden_layers=2)
    model.config.quantization_config = {"quant_method": "gptq"}
    adapter = peft.get_peft_model(model, peft.LoraConfig(target_modules=TARGETS, **LORA))
    with pytest.raises(th.UnsupportedError, match="bitsandbytes, got 'gptq': load the weights"):
        th.make_trainable(adapter)


def make_torchao_bases(bits: int) -> tuple[Any, Any]:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    model = make_model("qwen3_next_dense", num_hidden_layers=2).requires_grad_(False)
    int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model.model, int4 if bits == 4 else Int8WeightOnlyConfig())
    plain = copy.deepcopy(model)
    for module in plain.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.dequantize())
    model.config.quantization_config = {"quant_method": "torchao"}
    return model, plain


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_over_torchao_have_the_gradients_of_the_dequantized_base(bits: int):
    model, plain = adapted(*make_torchao_bases(bits))
    want = grads(plain, loss_of(plain))
    assert furthest(grads(model, loss_of(model)), want) < 1e-5
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert furthest(grads(model, loss_of(graph)), want) < 1e-5
    layer, kept = model.base_model.model.model.layers[0].mlp.up_proj, []
    x = torch.randn(3, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    weights = [each for each in kept if each.numel() >= layer.weight.numel()]
    assert [each.dtype for each in weights] == [torch.int8]


def make_bitsandbytes_bases(bits: int) -> tuple[Any, Any]:
    bnb = pytest.importorskip("bitsandbytes")
    model = make_model("qwen3_next_dense", num_hidden_layers=2).requires_grad_(False)
    plain = copy.deepcopy(model)
    for ours, theirs in zip(list(model.model.modules()), plain.model.modules(), strict=True):
        for name, linear in list(ours.named_children()):
            if type(linear) is torch.nn.Linear:
                sizes, old = (linear.in_features, linear.out_features), linear.weight.detach()
                if bits == 4:
                    layer = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4")
                    layer.weight = bnb.nn.Params4bit(old, requires_grad=False, quant_type="nf4")
                else:
                    layer = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                    layer.weight = bnb.nn.Int8Params(
                        old, requires_grad=False, has_fp16_weights=False
                    )
                setattr(ours, name, layer.to("cpu"))
                if bits == 4:
                    new = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
                else:
                    new = layer.weight.float() * layer.weight.SCB[:, None] / 127
                getattr(theirs, name).weight.data = new.detach()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    return model, plain


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_over_bitsandbytes_have_the_gradients_of_the_dequantized_base(bits: int):
    model, plain = adapted(*make_bitsandbytes_bases(bits))
    want = grads(plain, loss_of(plain))
    assert furthest(grads(model, loss_of(model)), want) < 1e-4
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert furthest(grads(model, loss_of(graph)), want) < 1e-4
