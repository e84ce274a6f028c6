"""TRL packs sequences of a data set into rows, and a twin trains on each sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_tokenizers import byte_level
from tests.training.twins import make_pair, make_rows

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

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
