"""TRL packs sequences of a data set into rows, and a twin trains on each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.tiny_tokenizers import byte_level
from tests.training.twins import make_pair, make_rows, make_twin

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
add_fused_lm_head = pytest.importorskip("trl.trainer.utils").add_fused_lm_head

LENGTHS = [40, 3, 17, 25, 64, 9, 2, 31]


def test_packed_sequences_have_the_losses_of_single_ones(tmp_path: Path):
    theirs, twin = make_pair("qwen3_5")
    rows = make_rows(LENGTHS)
    args = trl.SFTConfig(
        str(tmp_path),
        packing=True,
        max_length=max(LENGTHS),
        bf16=False,
        max_steps=8,
        per_device_train_batch_size=len(LENGTHS),
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = datasets.Dataset.from_list([{"input_ids": row[0].tolist()} for row in rows])
    trainer = trl.SFTTrainer(twin, args, train_dataset=data, processing_class=byte_level())
    assert len(trainer.train_dataset) < len(LENGTHS)  # several sequences lie in a row
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    single = [theirs(row, labels=row, use_cache=False).loss.item() for row in rows]
    labels = [length - 1 for length in LENGTHS]
    total = sum(loss * count for loss, count in zip(single, labels, strict=True))
    assert losses[0] == pytest.approx(total / sum(labels), rel=1e-4)
    assert losses[-1] < losses[0] / 2


def test_a_reference_that_grpo_loads_computes_as_transformers(tmp_path: Path):
    """It is given the name of the policy's attention, and is no twin."""
    theirs, twin = make_pair("qwen3_5")
    twin.save_pretrained(tmp_path)
    options = {"attn_implementation": twin.config._attn_implementation, "dtype": twin.dtype}
    reference = trl.trainer.utils.create_model_from_path(str(tmp_path), **options)
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), make_rows([9])[0]], 1).expand(2, -1)
    mask = (ids > 0).long()
    made, expected = (model(ids, attention_mask=mask).logits for model in (reference, theirs))
    torch.testing.assert_close(made[:, 5:], expected[:, 5:])


@pytest.mark.parametrize(
    ("family", "options", "lost"),
    [
        ("recurrent_gemma", {}, "the bound of logits of RecurrentGemmaForCausalLM"),
        ("xlstm", {}, "the bound of logits"),
        ("bamba", {"z_loss_coefficient": 0.1}, "the loss of the size"),
        ("inkling", {}, "the scale or the padding"),
        ("inkling2", {"unpadded_vocab_size": 190}, "the scale or the padding"),
    ],
)
def test_losses_that_its_head_cannot_compute_are_refused(
    family: str, options: dict[str, Any], lost: str
):
    twin, [row] = make_twin(family, **options), make_rows([9])
    add_fused_lm_head(twin)
    with pytest.raises(th.UnsupportedError, match=f"TRL's own head leaves out {lost}"):
        twin(input_ids=row, labels=row, fused_lm_head=True)
    assert twin(input_ids=row, labels=row).loss.isfinite()
