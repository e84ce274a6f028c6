"""Variants of LoRA train, merge and are served; where a base cannot take them, a name says so."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import torch_hybrid as th
from tests.training.test_companions import LORA, SIZES, TARGETS, loss_of
from tests.training.test_frozen_base import make_fp8_bases, make_fp8_pair
from tests.training.twins import furthest, grads, make_pair, make_rows, make_twin


@pytest.mark.parametrize("variant", ["use_dora", "use_rslora"])
def test_variants_of_adapters_train_as_transformers_and_are_served(variant: str):
    config: dict[str, Any] = {"target_modules": TARGETS, variant: True, **LORA}
    theirs, adapted = (peft.get_peft_model(m, peft.LoraConfig(**config)) for m in make_pair())
    theirs.load_state_dict(adapted.state_dict())
    row = make_rows([40])[0]
    mine = grads(adapted, adapted(input_ids=row, labels=row).loss)
    other = grads(theirs, theirs(input_ids=row, labels=row, use_cache=False).loss)
    assert any("magnitude" in name for name in mine) == (variant == "use_dora")
    assert furthest(mine, other) < 2e-4
    torch.optim.AdamW(adapted.parameters(), lr=1e-2).step()
    trained = adapted.eval()(input_ids=row[:, :20]).logits[0]
    runner = th.Runner(th.adapt(adapted), **SIZES)
    served = runner.extend(runner.new_sequences(1), row[:, :20].tolist(), logits="all")
    torch.testing.assert_close(served, trained, atol=1e-3, rtol=1e-3)


def test_norms_of_mixers_are_tuned_as_those_of_transformers():
    row, config = make_rows([9])[0], peft.LNTuningConfig(target_modules=["norm"])
    theirs, ours = (peft.get_peft_model(model, config) for model in make_pair())
    mine = grads(ours, ours(input_ids=row, labels=row).loss)
    other = grads(theirs, theirs(input_ids=row, labels=row, use_cache=False).loss)
    assert furthest(mine, other) < 2e-4


@pytest.mark.parametrize("part", ["conv_qk_depthwise", "conv_qk_grouped"])
def test_adapters_of_convolutions_are_refused(part: str):
    """Transformers calls those of Zaya; an adapter was left out, and did not train."""
    twin = make_twin("zaya")
    groups = dict(twin.named_modules())[f"model.layers.0.self_attn.qkv_proj.{part}"].groups
    adapted = peft.get_peft_model(twin, peft.LoraConfig(target_modules=[part], r=groups))
    with pytest.raises(th.UnsupportedError, match="convolutions have no adapters: leave them out"):
        loss_of(adapted)


FP8 = r"block-FP8 weights: .* FineGrainedFP8Config\(dequantize=True\)"


def test_an_adapter_over_fp8_is_merged_nowhere():
    adapted, _ = make_fp8_pair()
    before = loss_of(adapted)
    for merge in (adapted.merge_adapter, adapted.merge_and_unload, lambda: th.adapt(adapted)):
        with pytest.raises(th.UnsupportedError, match=FP8):
            merge()
    assert torch.equal(loss_of(adapted), before)


def test_an_adapter_over_fp8_is_not_served_either():
    config = peft.LoraConfig(target_modules=TARGETS, **LORA)
    with pytest.raises(th.UnsupportedError, match=FP8):
        th.adapt(peft.get_peft_model(make_fp8_bases()[0], config))
