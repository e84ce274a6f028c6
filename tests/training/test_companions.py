"""Trainer, PEFT, checkpoints, checkpointing, autocast and experts go on working with twins."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file

import torch_hybrid as th
from tests.tiny_models import cast, in_double, make_model
from tests.training.twins import (
    FAMILIES,
    flattened,
    furthest,
    grads,
    make_pair,
    make_rows,
    make_twin,
)

LORA = {"r": 4, "init_lora_weights": False}
TARGETS = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
# Projections of one family of each kind of mixer.
TARGETS_OF = {
    "qwen3_next_dense": TARGETS,
    "recurrent_gemma": ["linear_x", "linear_y", "linear_out", "q_proj"],
    "rwkv": ["key", "value", "receptance", "output"],
}
each_kind = pytest.mark.parametrize("family", TARGETS_OF)
HEAD = ["lm_head"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"max_seqs": 1, "max_tokens": 32, "kv_tokens": 64, "compile": False}


def loss_of(model: Any, **options: Any) -> torch.Tensor:
    return model(**flattened(make_rows()), **options).loss


def test_a_second_call_changes_nothing():
    twin = make_twin()
    hooks, kind = len(twin.model._forward_pre_hooks), type(twin)
    assert th.make_trainable(twin) is twin
    assert (len(twin.model._forward_pre_hooks), type(twin)) == (hooks, kind)


def test_a_copy_trains_as_the_model():
    twin = make_twin()
    loss = loss_of(twin)
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(made) is type(twin)
        assert torch.equal(loss_of(made), loss)


def test_a_copy_of_a_compiled_model_computes_by_its_own_weights():
    twin = make_twin()
    twin.compile(backend="eager")
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        with torch.no_grad():
            made.lm_head.weight.zero_()
        torch.testing.assert_close(loss_of(made), torch.tensor(199.0).log())


def test_rows_of_one_token_and_a_resized_head_make_no_logits():
    twin = make_twin()
    twin.resize_token_embeddings(210)
    rows = torch.tensor([[205], [9]])
    made = twin(rows, labels=rows, num_items_in_batch=torch.tensor(1))
    assert made.logits is None
    assert made.loss == 0


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
    assert type(type(twin).from_pretrained(tmp_path)) is type(theirs)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(theirs)
    row = make_rows([20])[0]
    torch.testing.assert_close(loaded(row).logits, theirs.eval()(row).logits)
    assert loaded.config.architectures == [type(theirs).__name__]


@pytest.mark.parametrize("was_run", [False, True])
def test_an_evaluation_leaves_what_a_trainer_saves(was_run: bool):
    """RWKV's in transformers divides weights, and a checkpoint after it has other logits."""
    theirs = make_model("rwkv")
    row, given = make_rows([20])[0], copy.deepcopy(theirs.state_dict())
    if was_run:
        theirs.eval()(row)
    twin = th.make_trainable(theirs)
    trained = twin.train()(row).logits
    torch.testing.assert_close(twin.eval()(row).logits, trained)
    assert all(torch.equal(each, given[name]) for name, each in twin.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_load_in_place_by_the_names_in_files(family: str, tmp_path: Path):
    twin = make_twin(family)
    twin.save_pretrained(tmp_path)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    places = [each.data_ptr() for each in other.parameters()]
    report = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert [each.data_ptr() for each in other.parameters()] == places
    assert not report.unexpected_keys
    assert all(map(torch.equal, other.state_dict().values(), twin.state_dict().values()))


def test_unknown_names_are_reported_beside_those_of_files():
    twin = make_twin("qwen3_next")
    state = {**twin.state_dict(), "a.weight": torch.ones(2)}
    del state["lm_head.weight"]
    report = twin.load_state_dict(state, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["lm_head.weight"], ["a.weight"])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "a.weight"'):
        twin.load_state_dict(state)


def arguments(folder: Path, **options: Any) -> tf.TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    return tf.TrainingArguments(
        str(folder), learning_rate=1e-2, logging_steps=1, **quiet, **options
    )


def test_trainer_resumes_experts(tmp_path: Path):
    rows = [{"input_ids": list(range(8, 17 + 5 * n))} for n in range(8)]
    losses = []
    for start in (None, str(tmp_path / "checkpoint-2")):
        args = arguments(tmp_path, max_steps=4, per_device_train_batch_size=2, save_steps=2)
        trainer = tf.Trainer(make_twin("qwen3_next"), args, tf.DataCollatorWithFlattening(), rows)
        trainer.remove_callback(tf.trainer_callback.PrinterCallback)
        trainer.train(resume_from_checkpoint=start)
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_takes_flattened_batches(tmp_path: Path, compiled: bool):
    twin = make_twin()
    args = arguments(
        tmp_path,
        max_steps=12,
        per_device_train_batch_size=4,
        save_strategy="no",
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


@each_kind
def test_adapters_train_save_and_merge(family: str, tmp_path: Path):
    theirs, twin = make_pair(family)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=TARGETS_OF[family], **LORA)
    adapted, reference = (peft.get_peft_model(model, config) for model in (twin, theirs))
    reference.load_state_dict(adapted.state_dict())
    row = make_rows([40])[0]
    mine = grads(adapted, adapted(input_ids=row, labels=row).loss)
    assert all("lora" in name for name in mine)
    other = grads(reference, reference(input_ids=row, labels=row, use_cache=False).loss)
    assert furthest(mine, other) < 2e-4
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_twin(family), tmp_path).train()
    torch.testing.assert_close(loss_of(again), loss_of(adapted))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(loss_of(merged), loss_of(again), atol=1e-4, rtol=1e-4)


def test_adapters_of_steps_train_and_merge():
    """Transformers reads the weights of these projections alone."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        make_twin("falcon_mamba"), peft.LoraConfig(target_modules=["dt_proj"], **LORA)
    )
    assert all(grad.any() for grad in grads(adapted, loss_of(adapted)).values())
    before = loss_of(adapted)
    torch.testing.assert_close(loss_of(adapted.merge_and_unload()), before, atol=1e-4, rtol=1e-4)


@each_kind
def test_what_was_tuned_is_served(family: str):
    config = peft.LoraConfig(target_modules=TARGETS_OF[family], **LORA)
    adapted = peft.get_peft_model(make_twin(family), config)
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


@pytest.mark.parametrize(
    "of_head", [{}, {"modules_to_save": HEAD}, {"target_modules": HEAD}], ids=str
)
@pytest.mark.parametrize("family", ["qwen3_next_dense", "mamba2"])
def test_make_trainable_takes_a_model_of_peft(family: str, of_head: dict[str, Any]):
    theirs, twin = make_pair(family)
    config = {"target_modules": ["in_proj", "in_proj_qkvz"], "r": 4, **of_head}
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**config))
    assert th.make_trainable(adapted) is adapted
    sent = flattened(make_rows())
    sent["labels"] = sent["input_ids"]
    torch.testing.assert_close(adapted(**sent).loss, twin(**sent).loss)


@pytest.mark.parametrize("family", ["qwen3_next_dense", "mamba2"])
def test_hooks_of_accelerate_run_what_trains(family: str):
    """As models have them whose parts lie on several devices, or are of bitsandbytes."""
    theirs, twin = make_pair(family)
    for module in list(theirs.modules()):
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    sent = flattened(make_rows())
    sent["labels"] = sent["input_ids"]
    torch.testing.assert_close(th.make_trainable(theirs)(**sent).loss, twin(**sent).loss)


def test_a_model_whose_forward_was_replaced_is_refused():
    model = make_pair()[0]
    model.forward = partial(model.forward)
    with pytest.raises(th.UnsupportedError, match="forward of Qwen3NextForCausalLM was replaced"):
        th.make_trainable(model)
    del model.forward
    th.make_trainable(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_all_projections_train_as_those_of_transformers(family: str):
    config: dict[str, Any] = {"target_modules": "all-linear", **LORA}
    if any(name in family for name in ("falcon", "mamba", "jamba", "nemotron_h")):
        config["exclude_modules"] = ["out_proj", "dt_proj"]  # PEFT refuses the first
    theirs, adapted = (peft.get_peft_model(m, peft.LoraConfig(**config)) for m in make_pair(family))
    theirs.load_state_dict(adapted.state_dict())
    row = make_rows([40])[0]
    mine = grads(adapted, adapted(input_ids=row, labels=row).loss)
    other = grads(theirs, theirs(input_ids=row, labels=row, use_cache=False).loss)
    assert furthest(mine, other) < 2e-4
    assert mine.keys() == trained(adapted)


ONCE = [(family, False) for family in FAMILIES]
# Layers of Kimi-K3 hand on more than one sum.
REENTRANT = [("qwen3_next_dense", True), ("kimi_k3", True)]


@pytest.mark.parametrize(("family", "use_reentrant"), [*ONCE, *REENTRANT])
def test_activation_checkpointing_keeps_gradients(family: str, use_reentrant: bool):
    twin = make_twin(family)
    plain = grads(twin, loss_of(twin))
    options = {"use_reentrant": use_reentrant}
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    twin.enable_input_require_grads()
    assert furthest(grads(twin, loss_of(twin)), plain) < 1e-6


UNTRAINED = ("indexer", "visual")  # a choice has no gradient; texts have no images


def trained(model: Any) -> set[str]:
    """Name the parameters that texts train."""
    named = model.named_parameters()
    return {n for n, p in named if p.requires_grad and not any(part in n for part in UNTRAINED)}


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_is_near_float32(family: str):
    twin = make_twin(family)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(twin)
    assert loss.dtype == torch.float32
    assert abs(loss - loss_of(twin)) < 0.05
    assert grads(twin, loss).keys() == trained(twin)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_dtypes_train(family: str):
    twin = make_twin(family)
    exact = loss_of(in_double(twin))
    assert abs(loss_of(twin) - exact) < 1e-4
    assert abs(loss_of(cast(twin, torch.bfloat16)) - exact) < 0.05


AUXILIARY = ["qwen3_next", "qwen3_5_moe", "qwen4_exp", "glm5_next", "minimax", "granitemoehybrid"]


@pytest.mark.parametrize("family", AUXILIARY)
def test_auxiliary_loss_of_experts_is_that_of_transformers(family: str):
    theirs, twin = make_pair(family)
    row = make_rows([50])[0]
    options = {"labels": row, "output_router_logits": True}
    other, mine = theirs(row, use_cache=False, **options), twin(row, **options)
    torch.testing.assert_close(mine.aux_loss, other.aux_loss)
    torch.testing.assert_close(mine.loss, other.loss)
    assert furthest(grads(twin, mine.loss), grads(theirs, other.loss)) < 2e-4


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next_dense", "qwen3_5", "rwkv"])
def test_models_without_an_auxiliary_loss_have_none(family: str):
    twin = make_twin(family)
    made = twin(**flattened(make_rows()), output_router_logits=True)
    assert torch.equal(made.loss, loss_of(twin))
    assert (made.get("router_logits") is None) == (family != "kimi_linear")


def test_dropout_of_attention_is_of_training_alone():
    twin = make_twin(attention_dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(loss_of(twin), loss_of(twin))
    twin.eval()
    assert torch.equal(loss_of(twin), loss_of(twin))


@pytest.mark.parametrize("family", ["qwen3_next_dense", "bamba", "inkling", "rwkv", "xlstm"])
def test_a_loss_function_of_a_models_own_is_computed(family: str):
    rows = torch.cat(make_rows([20, 20]))
    losses = []
    for model in make_pair(family):
        model.loss_function = largest_logit
        losses.append(model(rows, labels=rows, use_cache=False, factor=3.0).loss)
    torch.testing.assert_close(*losses)


def largest_logit(logits: torch.Tensor, labels: torch.Tensor, *sizes: int, **options: Any) -> Any:
    assert labels.shape == logits.shape[:-1]
    return options["factor"] * logits.max()


def test_other_ways_to_a_loss_are_refused_by_name():
    twin = th.make_trainable(make_twin(), batch_invariant={"compile": False})
    with pytest.raises(ValueError, match="ignore_index must be -100, got 8"):
        loss_of(twin, ignore_index=8)
    twin.loss_function = largest_logit
    with pytest.raises(th.UnsupportedError, match=r"loss_function .* logits of a call without lab"):
        loss_of(twin)


def test_other_models_are_refused_by_name():
    with pytest.raises(
        th.UnsupportedError, match=r"Qwen3ForCausalLM has no mixer .*Qwen3NextGated"
    ):
        th.make_trainable(make_model("qwen3"))


@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear", "mamba2"])
def test_other_activations_are_refused_by_name(family: str):
    with pytest.raises(ValueError, match=r"activation must be one of .*'silu'.*, got 'gelu'"):
        loss_of(make_twin(family, hidden_act="gelu"))
