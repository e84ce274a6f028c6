"""Float32 products of a trainer's own on a CPU, taken as where torch was measured to be slower."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

import torch_hybrid as th
from tests.parallel.processes import results, run_ranks
from tests.training import sharded
from tests.training.test_companions import LORA, TARGETS
from tests.training.twins import flattened, furthest, grads, make_pair, make_rows
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.native import matrix_product as native
from torch_hybrid.training.linear import OwnLinear

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
FAMILIES = ["qwen3_5_moe", "falcon_h1", "mamba", "inkling"]
SENT = flattened(make_rows([40, 1, 30]))


@pytest.fixture(autouse=True)
def num_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have own products taken, and list each that runs."""
    run, count = native._RUN, []

    def counted(*given: Any) -> bool:
        count.append(1)
        return run(*given)

    monkeypatch.setattr(native, "is_faster", {torch.float32}.__contains__)
    monkeypatch.setattr(native, "_RUN", counted)
    return count


def make_twins(family: str) -> tuple[Any, Any]:
    """Make a trainer whose products are torch's, and one whose are its own."""
    theirs, ours = make_pair(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_faster", set().__contains__)
        return th.make_trainable(theirs), ours


def plain_grads(model: Any, num_run: list[int], sent: dict[str, Any] = SENT) -> Any:
    """Compute gradients with products of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_faster", set().__contains__)
        made = grads(model, model(**sent).loss)
    num_run.clear()
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_torch_in_a_graph_too(family: str, num_run: list[int]):
    plain, own = make_twins(family)
    expected = plain_grads(plain, num_run)
    assert furthest(grads(own, own(**SENT).loss), expected) < 1e-4
    assert len(num_run) > 9
    torch._dynamo.reset()
    step = torch.compile(own, fullgraph=True, backend="aot_eager")
    assert furthest(grads(own, step(**SENT).loss), expected) < 1e-4


def test_bfloat16_is_widened_where_that_is_faster(
    num_run: list[int], monkeypatch: pytest.MonkeyPatch
):
    exact = plain_grads(make_twins("qwen3_5_moe")[0], num_run)
    plain, own = (each.bfloat16() for each in make_twins("qwen3_5_moe"))
    off = furthest(plain_grads(plain, num_run), exact)
    monkeypatch.setattr(native, "is_faster", {torch.float32, torch.bfloat16}.__contains__)
    assert furthest(grads(own, own(**SENT).loss), exact) < 1.2 * off
    assert len(num_run) > 9


def test_layers_are_checkpointed(num_run: list[int]):
    plain, own = make_twins("falcon_h1")
    expected = plain_grads(plain, num_run)
    own.gradient_checkpointing_enable()
    assert furthest(grads(own, own(**SENT).loss), expected) < 1e-4
    assert num_run


def test_frozen_weights_of_an_adapter_have_no_product(num_run: list[int]):
    twins = make_twins("qwen3_next_dense")
    config = peft.LoraConfig(target_modules=TARGETS, **LORA)
    plain, own = (peft.get_peft_model(each, config) for each in twins)
    own.load_state_dict(plain.state_dict())
    expected = plain_grads(plain, num_run)
    assert furthest(grads(own, own(**SENT).loss), expected) < 1e-4
    adapted = len(num_run)
    num_run.clear()
    whole = make_twins("qwen3_next_dense")[1]
    grads(whole, whole(**SENT).loss)
    assert adapted < len(num_run)


def test_autocast_rounds_as_it_does_for_torch(num_run: list[int], monkeypatch: pytest.MonkeyPatch):
    plain, own = make_twins("falcon_h1")
    torch._dynamo.reset()
    step = torch.compile(own, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [each(**SENT).loss for each in (plain, own, step)]
        assert not num_run
        monkeypatch.setattr(native, "is_faster", {torch.bfloat16}.__contains__)
        widened = own(**SENT).loss
    assert torch.equal(*losses[:2])
    torch.testing.assert_close(losses[2], losses[0])
    torch.testing.assert_close(widened, losses[0], rtol=1e-3, atol=1e-3)


def test_names_and_classes():
    theirs, own = make_pair("falcon_h1")
    assert list(own.state_dict()) == list(theirs.state_dict())
    layers = [each for each in own.modules() if isinstance(each, nn.Linear)]
    assert any(type(each) is OwnLinear for each in layers)
    assert not any(type(each) is nn.Linear for each in layers)
    halves = th.make_trainable(copy.deepcopy(theirs).half())
    assert not any(isinstance(each, OwnLinear) for each in halves.modules())
    assert th.make_trainable(own) is own
    row = make_rows([9])[0]
    torch.testing.assert_close(own(row).logits, theirs(row).logits, atol=2e-4, rtol=2e-4)


def train_by_own_products(*given: Any, **options: Any) -> list[float]:
    native.is_faster = {torch.float32}.__contains__
    return sharded.train(*given, **options)


def test_two_ranks_have_the_losses_of_one():
    (alone,) = results(run_ranks(train_by_own_products, 1, 0, 2))
    for losses in results(run_ranks(train_by_own_products, 2, 0, 2)):
        assert losses == pytest.approx(alone, rel=1e-5)
