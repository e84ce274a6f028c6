"""Each family trains packed as transformers trains its sequences one by one."""

from __future__ import annotations

import copy
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import torch_hybrid as th
from tests.tiny_models import FEWEST_LAYERS, cast, in_double
from tests.tiny_vision import make_seen, make_vision_model
from tests.training.twins import (
    FAMILIES,
    LENGTHS,
    flattened,
    furthest,
    grads,
    make_pair,
    make_rows,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_are_those_of_transformers_one_by_one(family: str):
    theirs, ours = make_pair(family)
    rows = make_rows()
    sent = flattened(rows)
    packed = ours(**sent, skip_logits=False)
    single = [theirs(row, labels=row, use_cache=False) for row in rows]
    torch.testing.assert_close(
        packed.logits[0], torch.cat([each.logits[0] for each in single]), atol=2e-4, rtol=2e-4
    )
    num_labels = sum(LENGTHS) - len(LENGTHS)
    pairs = zip(single, LENGTHS, strict=True)
    loss = sum(each.loss * ((n - 1) / num_labels) for each, n in pairs if n > 1)
    torch.testing.assert_close(packed.loss, loss)
    fused = ours(**sent)
    assert fused.logits is None
    torch.testing.assert_close(fused.loss, loss)
    assert furthest(grads(ours, fused.loss), grads(theirs, loss)) < 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_padded_at_either_side_are_those_without(family: str):
    ours = make_pair(family)[1]
    rows = make_rows([33, 20])
    with torch.no_grad():
        alone = torch.cat([ours(row).logits[0] for row in rows])
        for padding in ((13, 0), (0, 13)):  # at the left, and at the right
            ids, mask = (
                torch.cat([x[0], pad(x[1], padding)])
                for x in (rows, [torch.ones_like(row) for row in rows])
            )
            logits = ours(ids, attention_mask=mask).logits[mask.bool()]
            torch.testing.assert_close(logits, alone, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_flags_of_parameters_stay(family: str):
    theirs, ours = make_pair(family)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert type(ours).__name__ == type(theirs).__name__
    assert isinstance(ours, type(theirs))


@pytest.mark.parametrize("family", ["inkling2", "kimi_k3", "mamba2", "minimax", "xlstm"])
def test_hidden_states_are_those_of_transformers(family: str):
    theirs, ours = make_pair(family)
    row = make_rows([9])[0]
    kept = [each(row, output_hidden_states=True, use_cache=False) for each in (theirs, ours)]
    torch.testing.assert_close(*(each.hidden_states for each in kept), atol=2e-4, rtol=2e-4)
    assert len(kept[0].hidden_states) == theirs.config.num_hidden_layers + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_and_its_caches_are_those_of_transformers(family: str):
    theirs, ours = make_pair(family)
    prompt = make_rows([9])[0]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    tokens = [model.eval().generate(prompt, **options) for model in (theirs, ours)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_trained_is_served(family: str):
    twin = make_pair(family)[1].eval()
    row = make_rows([20])[0]
    with torch.no_grad():
        expected = twin(row, use_cache=False).logits[0]
    runner = th.Runner(
        th.adapt(twin), max_seqs=1, max_tokens=32, kv_tokens=64, page_size=16, compile=False
    )
    served = runner.extend(runner.new_sequences(1), row.tolist(), logits="all")
    torch.testing.assert_close(served, expected, atol=2e-4, rtol=2e-4)


def test_decays_of_minimax_are_those_of_its_config_after_a_cast():
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2}
    theirs, ours = (model.model.layers[1].self_attn for model in make_pair("minimax", **layers))
    ours.bfloat16().float()  # rounds the buffers that transformers' forward reads
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
    torch.manual_seed(0)
    x = torch.randn(1, 70, 64)
    with torch.no_grad():
        expected, _ = theirs(x, None, None)
        made, _ = ours(x, packing=th.Packing(torch.tensor([0, 70])))
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm5_next", "lfm2_vl", "lfm3_vl"]
)
def test_models_that_see_train_with_images_and_packed_texts(family: str):
    few = FEWEST_LAYERS[family.removesuffix("_vl")]
    theirs = make_vision_model(family, **few).requires_grad_().train()
    ours = th.make_trainable(copy.deepcopy(theirs))
    seen = make_seen(family, [5, (4, 8), 7]).asked(family)
    labels = seen["input_ids"]
    mine, other = ours(**seen, labels=labels), theirs(**seen, labels=labels, use_cache=False)
    torch.testing.assert_close(mine.loss, other.loss)
    made, expected = grads(ours, mine.loss), grads(theirs, other.loss)
    for name in [n for n in made if n.endswith("k_proj.bias") and "vision" in n]:
        del made[name], expected[name]  # 0 but for rounding: a softmax does not see them
    assert furthest(made, expected) < 2e-4
    rows = make_rows()
    sent = flattened(rows)
    packed = ours(sent["input_ids"], position_ids=sent["position_ids"]).logits[0]
    single = torch.cat([theirs(row, use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(packed, single, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_as_near_to_float64_as_those_of_transformers(family: str):
    theirs, ours = make_pair(family)
    exact = in_double(theirs)
    exact.set_experts_implementation("eager")  # grouped products have no float64
    mine, others = [], []
    for seed in range(3):  # one draw's is luck: those of a model spread over a decade
        rows = make_rows([130, 1, 70], seed)
        expected = one_by_one(exact, rows)
        mine.append(error(grads(ours, ours(**flattened(rows)).loss), expected))
        others.append(error(one_by_one(theirs, rows), expected))
    assert geometric_mean(mine) < 2 * geometric_mean(others)


def one_by_one(model: Any, rows: list[Tensor]) -> dict[str, Tensor]:
    """Compute the gradients of the mean loss of sequences that lie alone."""
    losses = [model(row, labels=row, use_cache=False).loss for row in rows if row.shape[1] > 1]
    return grads(model, (129 * losses[0] + 69 * losses[1]) / 198)


def error(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """Compute the largest error of a parameter's gradient, as a share of the gradient's length."""
    return max(float((these[n] - that).norm() / that.norm()) for n, that in those.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_in_bfloat16_is_that_of_transformers(family: str):
    theirs, ours = (cast(model, torch.bfloat16) for model in make_pair(family))
    row = make_rows([70])[0]
    mine, other = (model(row, labels=row).loss for model in (ours, theirs.eval()))
    torch.testing.assert_close(mine.float(), other.float(), atol=0.03, rtol=0.0)
    assert all(each.isfinite().all() for each in grads(ours, mine).values())


def test_a_state_beside_labels_runs_as_transformers_has_it():
    theirs, ours = make_pair("rwkv")
    row, more = make_rows([9, 5])
    losses = []
    for model in (theirs, ours):
        state = model(row, use_cache=True).state
        losses.append(model(more, labels=more, state=state).loss)
    torch.testing.assert_close(*losses)


def test_a_head_with_a_bias_predicts_no_first_token():
    theirs, ours = make_pair("zaya", lm_head_bias=True)
    rows = make_rows([9, 5])
    ids, packing = torch.cat(rows, 1), th.Packing(torch.tensor([0, 9, 14]))
    single = [theirs(row, labels=row, use_cache=False).loss for row in rows]
    loss = ours(ids, labels=ids, packing=packing).loss
    torch.testing.assert_close(loss, (8 * single[0] + 4 * single[1]) / 12)
