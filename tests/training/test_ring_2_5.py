"""Ring-2.5 trains from the published layout, and is served from what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_hybrid as th
from tests.models.ring_checkpoint import CONFIG, make_weights, save
from tests.models.test_ring_2_5 import CASES
from tests.training.ring import FEW, with_forward_of_reference
from tests.training.twins import furthest, grads, make_rows, make_twin
from torch_hybrid.training.ring_2_5 import BailingMoeV2_5ForCausalLM


@pytest.mark.parametrize("case", CASES)
def test_a_published_model_trains_and_is_served(case: str, tmp_path: Path):
    config: dict[str, Any] = {**CONFIG, **FEW, "layer_group_size": 2, **CASES[case]}
    weights = make_weights(config, seed=0)
    save(tmp_path, config, weights)
    theirs, ours = (BailingMoeV2_5ForCausalLM.from_pretrained(tmp_path).train() for _ in "ab")
    th.make_trainable(ours).save_pretrained(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    saved = load_file(file)
    assert saved.keys() == {name for name in weights if "eh_proj" not in name}
    assert all(torch.equal(each, weights[name]) for name, each in saved.items())
    row = make_rows([20])[0]
    other = with_forward_of_reference(theirs)(row, labels=row)
    mine = ours(row, labels=row, skip_logits=False)
    torch.testing.assert_close(mine.logits, other.logits, atol=2e-4, rtol=2e-4)
    assert furthest(grads(ours, mine.loss), grads(theirs, other.loss)) < 2e-4
    options = {"max_seqs": 1, "max_tokens": 32, "kv_tokens": 64, "compile": False}
    runner = th.Runner(th.from_pretrained(tmp_path / "saved"), **options)
    served = runner.extend(runner.new_sequences(1), row.tolist(), logits="all")
    torch.testing.assert_close(served, mine.logits[0], atol=2e-4, rtol=2e-4)


def test_a_model_in_memory_is_not_adapted():
    twin = make_twin("ring_2_5")
    kind = type(twin)
    with pytest.raises(th.UnsupportedError, match="served from files: save_pretrained"):
        th.adapt(twin)
    assert type(twin) is kind
