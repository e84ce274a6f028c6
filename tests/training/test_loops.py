"""Loops of a user's own and of Trainer: scaled losses, and gradients of several batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from tests.training.test_companions import loss_of
from tests.training.twins import furthest, grads, make_twin


def test_gradients_of_a_scaled_loss_are_those_of_float32():
    twin = make_twin()
    exact = grads(twin, loss_of(twin))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(twin)
    made = grads(twin, scaler.scale(loss))
    scaler.unscale_(optimizer)
    for name, grad in made.items():
        assert (grad - exact[name]).norm() < 0.02 * exact[name].norm(), name


def test_a_step_whose_scaled_gradients_overflow_is_left_out():
    twin = make_twin()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = loss_of(twin)
    scaler.scale(before).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert torch.equal(loss_of(twin), before)


@pytest.mark.parametrize("family", ["qwen3_next_dense", "glm5_next"])
def test_trainer_accumulates_the_gradients_of_one_large_batch(family: str, tmp_path: Path):
    """Batches have other numbers of labels, so each counts by these."""
    rows = [{"input_ids": list(range(8, 13 + 7 * n))} for n in range(8)]
    collate = tf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    weights = []
    for batches in (1, 4):
        twin = make_twin(family)
        args = tf.TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=len(rows) // batches,
            gradient_accumulation_steps=batches,
            optim="sgd",
            learning_rate=0.1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = tf.Trainer(twin, args, collate, rows)
        trainer.remove_callback(tf.trainer_callback.PrinterCallback)
        trainer.train()
        weights.append({name: weight.detach() for name, weight in twin.named_parameters()})
    assert furthest(*weights) < 1e-5
