"""Ring-2.5 trains from the published layout, and is served from what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_hybrid as th
from tests.models.ring_checkpoint import CONFIG, make_weights, save
from tests.models.ring_reference import reference_logits
from tests.models.test_ring_2_5 import CASES
from tests.training.twins import make_rows
from torch_hybrid.models.families.ring_2_5.classes import BailingMoeV2_5ForCausalLM


@pytest.mark.parametrize("case", CASES)
def test_a_published_model_trains_and_is_served(case: str, tmp_path: Path):
    config: dict[str, Any] = {**CONFIG, "num_hidden_layers": 2, **CASES[case]}
    weights = make_weights(config, seed=0)
    save(tmp_path, config, weights)
    model = th.make_trainable(BailingMoeV2_5ForCausalLM.from_pretrained(tmp_path).train())
    model.save_pretrained(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    saved = load_file(file)
    assert saved.keys() == {name for name in weights if "eh_proj" not in name}
    assert all(torch.equal(each, weights[name]) for name, each in saved.items())
    row = make_rows([20])[0]
    logits = model(row).logits[0]
    expected = reference_logits(config, weights, row[0].tolist()).float()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    options = {"max_seqs": 1, "max_tokens": 32, "kv_tokens": 64, "compile": False}
    for served in (th.from_pretrained(tmp_path / "saved"), th.adapt(model)):
        runner = th.Runner(served, **options)
        again = runner.extend(runner.new_sequences(1), row.tolist(), logits="all")
        torch.testing.assert_close(again, logits, atol=2e-4, rtol=2e-4)
