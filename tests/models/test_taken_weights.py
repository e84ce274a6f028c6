"""What a module does beside its weights is not lost when those are taken into a layer of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torch_hybrid as th
from tests.models.oracle import ask, assert_equal_logits, make_texts, serve, whole
from tests.tiny_models import BUILDERS, kinds_of, make_model

IN_PROJ = "model.layers.0.linear_attn.in_proj_qkvz"


class ScaledLinear(nn.Linear):
    """What a quantized or adapted layer is: other outputs than its weight says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.25


class ScaledConv1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.25


SCALED = {nn.Linear: ScaledLinear, nn.Conv1d: ScaledConv1d}


def kinds_of_modules(model: nn.Module) -> dict[str, str]:
    """The first of each kind of linear layer or convolution, by its name within a layer."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) in SCALED:
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            found.setdefault(kind, name)
    return found


def refused(model: Any) -> str | None:
    try:
        th.adapt(model)
    except th.UnsupportedError as error:
        return str(error)
    return None


def logits_of(model: th.HybridModel, texts: list[list[int]]) -> list[Tensor]:
    runner = th.Runner(model, max_seqs=2, max_tokens=64, kv_tokens=64, compile=False)
    return serve(runner, texts, whole([len(text) for text in texts]))


@pytest.mark.parametrize("family", BUILDERS)
def test_a_subclass_is_honoured_or_refused(family: str):
    """Every linear layer and convolution of every family, exchanged for one that scales."""
    model = make_model(family)
    honoured: list[str] = []
    for name in kinds_of_modules(model).values():
        module = model.get_submodule(name)
        plain = type(module)
        module.__class__ = SCALED[plain]
        if (text := refused(model)) is None:
            honoured.append(name)
            model = make_model(family)  # the other was taken over
        else:
            own = name.replace("language_model.", "")  # in the text part by itself
            assert text.startswith(f"{own} is a tests.models.test_taken_weights.Scaled")
            module.__class__ = plain
    model = make_model(family)
    for name in honoured:
        module = model.get_submodule(name)
        module.__class__ = SCALED[type(module)]
    # A mixer of ours has its projections: a model without attention, whose experts or MLPs are
    # taken too, has no others. Inkling-2's attention is one of ours.
    has_attention = any(kind.endswith("attention") for kind in kinds_of([family]))
    has_others = has_attention and family != "inkling2"
    assert any("proj" in name for name in honoured) == has_others
    oracle = ask(model, make_texts([20], seed=3))
    assert_equal_logits(logits_of(th.adapt(model), oracle.texts), oracle)


def quantized(module: nn.Module) -> nn.Module:
    return torch.ao.nn.quantized.dynamic.Linear(module.in_features, module.out_features)


def parametrized(module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", nn.Identity())


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, out: out * 2)
    return module


def with_another_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: nn.Linear.forward(module, x) * 2
    return module


class TensorOfItsOwn(Tensor):
    """As a quantized weight is one."""


def with_a_weight_of_its_own(module: nn.Module) -> nn.Module:
    weight = module.weight.detach().as_subclass(TensorOfItsOwn)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (quantized, "is a torch.ao.nn.quantized.dynamic.modules.linear.Linear"),
        (parametrized, "is a torch.nn.utils.parametrize.ParametrizedLinear"),
        (hooked, "has forward hooks"),
        (with_another_forward, "has another forward than its class"),
        (with_a_weight_of_its_own, "has a weight of type TensorOfItsOwn"),
    ],
)
def test_what_weights_do_not_say_is_refused(change: Any, what: str):
    model = make_model("qwen3_next_dense", num_hidden_layers=1, layer_types=["linear_attention"])
    model.set_submodule(IN_PROJ, change(model.get_submodule(IN_PROJ)))
    assert what in (refused(model) or "")
    assert type(model.model.layers[0].linear_attn).__name__ == "Qwen3NextGatedDeltaNet"


def test_the_message():
    model = make_model("qwen3_next_dense", num_hidden_layers=1, layer_types=["linear_attention"])
    model.get_submodule(IN_PROJ).__class__ = ScaledLinear
    assert_expected_inline(
        refused(model) or "",
        """model.layers.0.linear_attn.in_proj_qkvz is a tests.models.test_taken_weights.ScaledLinear: its weights are taken into a layer of ours, and that would be lost. Merge or remove it before the model is adapted""",  # noqa: E501
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next_dense"])
def test_an_adapted_model_is_not_saved(family: str, tmp_path: Any):
    model = th.adapt(make_model(family, num_hidden_layers=1, layer_types=["full_attention"]))
    with pytest.raises(th.UnsupportedError) as error:
        model.hf_model.save_pretrained(tmp_path)
    assert_expected_inline(
        str(error.value),
        """an adapted model cannot be saved: its mixers keep their weights in another order, and nothing could load them. Call save_pretrained before adapt""",  # noqa: E501
    )
    assert list(tmp_path.iterdir()) == []
