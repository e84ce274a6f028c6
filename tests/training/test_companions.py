"""Trainer, PEFT, checkpoints, checkpointing, autocast and experts go on working with twins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from transformers.integrations.finegrained_fp8 import FP8Linear

import torch_hybrid as th
from tests.tiny_models import make_model
from tests.training.twins import flattened, furthest, grads, make_pair, make_rows, make_twin
from torch_hybrid.ops.formats.block_scales import dequantized

LORA = {"r": 4, "init_lora_weights": False}
TARGETS = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"max_seqs": 1, "max_tokens": 32, "kv_tokens": 64, "compile": False}


def loss_of(model: Any, **options: Any) -> torch.Tensor:
    return model(**flattened(make_rows()), **options).loss


def test_a_second_call_changes_nothing():
    twin = make_twin()
    hooks, kind = len(twin.model._forward_pre_hooks), type(twin)
    assert th.make_trainable(twin) is twin
    assert (len(twin.model._forward_pre_hooks), type(twin)) == (hooks, kind)


def test_a_copy_trains_as_the_model(tmp_path: Path):
    twin = make_twin()
    assert torch.equal(loss_of(copy.deepcopy(twin)), loss_of(twin))


def test_an_optimizer_made_before_trains_the_twin():
    model = make_model("qwen3_next_dense", num_hidden_layers=2).requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    th.make_trainable(model)
    before = loss_of(model)
    before.backward()
    optimizer.step()
    assert loss_of(model) < before


def test_a_saved_twin_is_a_model_of_transformers(tmp_path: Path):
    theirs, twin = make_pair()
    twin.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(theirs)
    row = make_rows([20])[0]
    torch.testing.assert_close(loaded(row).logits, theirs.eval()(row).logits)
    assert loaded.config.architectures == [type(theirs).__name__]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_takes_flattened_batches(tmp_path: Path, compiled: bool):
    twin = make_twin()
    args = tf.TrainingArguments(
        str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=12,
        torch_compile=compiled,
        torch_compile_backend="aot_eager" if compiled else None,
    )
    rows = [{"input_ids": list(range(8, 17 + 5 * n))} for n in range(8)]
    collate = tf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trainer = tf.Trainer(twin, args, collate, rows, rows[:2])
    trainer.remove_callback(tf.trainer_callback.PrinterCallback)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < losses[0] / 2
    evaluated = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    assert evaluated[0] < losses[0] / 2


def test_adapters_train_save_and_merge(tmp_path: Path):
    theirs, twin = make_pair()
    torch.manual_seed(0)
    adapted = peft.get_peft_model(twin, peft.LoraConfig(target_modules=TARGETS, **LORA))
    reference = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=TARGETS, **LORA))
    reference.load_state_dict(adapted.state_dict())
    row = make_rows([40])[0]
    mine = grads(adapted, adapted(input_ids=row, labels=row).loss)
    assert all("lora" in name for name in mine)
    other = grads(reference, reference(input_ids=row, labels=row, use_cache=False).loss)
    assert furthest(mine, other) < 2e-4
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_twin(), tmp_path).train()
    torch.testing.assert_close(loss_of(again), loss_of(adapted))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(loss_of(merged), loss_of(again), atol=1e-4, rtol=1e-4)


def test_what_was_tuned_is_served():
    adapted = peft.get_peft_model(make_twin(), peft.LoraConfig(target_modules=TARGETS, **LORA))
    prompt = make_rows([20])[0]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = adapted.eval().generate(input_ids=prompt, **options)[0, 20:].tolist()
    runner = th.Runner(th.adapt(adapted), **SIZES)
    sampling = th.Sampling(max_new_tokens=4, temperature=0.0)
    (out,) = th.Engine(runner).generate(prompt.tolist(), sampling)
    assert out.tokens == expected


def test_another_attention_is_refused():
    twin = make_twin()
    twin.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="got attn_implementation 'sdpa'"):
        loss_of(twin)


def test_adapters_of_projections_and_experts_are_merged_and_served(tmp_path: Path):
    config = peft.LoraConfig(target_modules=TARGETS, target_parameters=EXPERTS, **LORA)
    adapted = peft.get_peft_model(make_twin("qwen3_next"), config)
    made = grads(adapted, before := loss_of(adapted))
    assert all(grad.any() for grad in made.values())
    assert {part for part in ("experts", *TARGETS) for name in made if part in name} == {
        *TARGETS, "experts"
    }  # fmt: skip
    torch.optim.AdamW(adapted.parameters(), lr=1e-2).step()
    assert loss_of(adapted) < before
    adapted.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(make_twin("qwen3_next"), tmp_path / "adapters")
    torch.testing.assert_close(loss_of(again.train()), loss_of(adapted))
    merged = again.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    runner = th.Runner(th.from_pretrained(tmp_path / "merged"), **SIZES)
    prompt = make_rows([20])[0]
    served = runner.extend(runner.new_sequences(1), prompt.tolist(), logits="all")
    trained = adapted.eval()(input_ids=prompt).logits[0]
    torch.testing.assert_close(served, trained, atol=1e-3, rtol=1e-3)


def test_make_trainable_takes_a_model_of_peft():
    theirs, twin = make_pair()
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=TARGETS, r=4))
    assert th.make_trainable(adapted) is adapted
    torch.testing.assert_close(loss_of(adapted), loss_of(twin))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_gradients(use_reentrant: bool):
    twin = make_twin()
    plain = grads(twin, loss_of(twin))
    options = {"use_reentrant": use_reentrant}
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    twin.enable_input_require_grads()
    assert furthest(grads(twin, loss_of(twin)), plain) < 1e-6


def test_autocast_is_near_float32():
    twin = make_twin()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(twin)
    assert loss.dtype == torch.float32
    assert abs(loss - loss_of(twin)) < 0.05
    assert grads(twin, loss).keys() == dict(twin.named_parameters()).keys()


def test_bfloat16_models_train():
    twin = make_twin()
    exact = loss_of(twin)
    assert abs(loss_of(twin.bfloat16()) - exact) < 0.05


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "qwen4_exp", "glm5_next"])
def test_auxiliary_loss_of_experts_is_that_of_transformers(family: str):
    theirs, twin = make_pair(family)
    row = make_rows([50])[0]
    options = {"labels": row, "output_router_logits": True}
    other, mine = theirs(row, use_cache=False, **options), twin(row, **options)
    torch.testing.assert_close(mine.aux_loss, other.aux_loss)
    torch.testing.assert_close(mine.loss, other.loss)
    assert furthest(grads(twin, mine.loss), grads(theirs, other.loss)) < 2e-4


def test_models_without_an_auxiliary_loss_have_none():
    twin = make_twin("kimi_linear")
    assert torch.equal(loss_of(twin, output_router_logits=True), loss_of(twin))


def test_dropout_of_attention_is_of_training_alone():
    twin = make_twin(attention_dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(loss_of(twin), loss_of(twin))
    twin.eval()
    assert torch.equal(loss_of(twin), loss_of(twin))


def test_other_models_are_refused_by_name():
    with pytest.raises(
        th.UnsupportedError, match=r"Qwen3ForCausalLM has no mixer .*Qwen3NextGated"
    ):
        th.make_trainable(make_model("qwen3"))


def test_quantized_weights_are_refused():
    model = make_model("qwen3_next_dense", num_hidden_layers=2)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(th.UnsupportedError, match="call get_peft_model first"):
        th.make_trainable(model)


def make_fp8_pair() -> list[Any]:
    """Make a LoRA over FP8 layers, and the same over their dequantized weights."""
    fp8 = make_model("qwen3_next_dense", num_hidden_layers=2)
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
    config = peft.LoraConfig(target_modules=TARGETS, **LORA)
    pair = [th.make_trainable(peft.get_peft_model(m, config)).train() for m in (fp8, plain)]
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


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_over_fp8_have_the_gradients_of_the_dequantized_base(compiled: bool):
    fp8, plain = make_fp8_pair()
    want = grads(plain, loss_of(plain))
    got = grads(fp8, loss_of(torch.compile(fp8, fullgraph=True) if compiled else fp8))
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
    from torch_hybrid.training import frozen_fp8  # registers the op

    op = frozen_fp8._product
    # test_schema multiplies FP8 numbers, which a CPU cannot.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (x, layer.weight, layer.weight_scale_inv, False), test_utils=tests)
    want = dequantized(layer.weight, layer.weight_scale_inv, x.dtype)
    got = torch.autograd.grad(op(x, layer.weight, layer.weight_scale_inv, False).sum(), x)[0]
    torch.testing.assert_close(got, want.sum(0).expand_as(x))
