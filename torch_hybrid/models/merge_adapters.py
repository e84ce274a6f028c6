"""Adapters of peft (LoRA and its variants), merged into the weights of the model that they adapt.

Our mixers are made of a module's weights, beside which an unmerged adapter would be lost.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from torch import nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.formats import block_scales

_KINDS = {"GenerationMixin", "PeftModel", "PeftMixedModel"}


def check_of_transformers(model: object) -> None:
    """Raise ValueError unless a model is of transformers or peft, without a wrapper."""
    names = [base.__name__ for base in type(model).__mro__]
    if not any(name in _KINDS or name.endswith("ForCausalLM") for name in names):
        raise ValueError(
            f"hf_model must be a causal language model of transformers, got {type(model)}"
        )


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the active adapters of a model in place, as peft's ``merge_and_unload`` does.

    Adapters that are switched off are left out.

    Args:
        model: a PeftModel, or a transformers model with or without adapters; it is changed.

    Returns:
        The transformers model within ``model``.

    Raises:
        UnsupportedError: an adapter changes no weights (prompt tuning, activated LoRA), weights in
            block-FP8, or rows behind a norm.
    """
    if "peft" not in sys.modules:  # then the model has no peft modules
        return model
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        kind = model.active_peft_config.peft_type.value
        raise UnsupportedError(
            f"adapter {model.active_adapter!r} of type {kind} has no weights to merge"
        )
    if isinstance(model, PeftModel | PeftMixedModel):
        model = model.base_model.model
    _untie(model)
    done: tuple[str, ...] = ()
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not name.startswith(
            done
        ):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _merged(name, module))
            done = (*done, f"{name}.")
    return model


def _untie(model: nn.Module) -> None:
    """Give each adapted layer a weight of its own, so that its adapter changes no other layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    count = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    for module in list(model.modules()):
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            if any(weight.dtype == block_scales.DTYPE for weight in base.parameters()):
                from torch_hybrid.training.frozen_layers import refuse_to_merge

                refuse_to_merge()
            for key, weight in list(base.named_parameters(recurse=False)):
                if count[id(weight)] > 1:
                    count[id(weight)] -= 1
                    own = nn.Parameter(weight.detach().clone(), requires_grad=False)
                    setattr(base, key, own)


def _merged(name: str, wrapper: Any) -> nn.Module:
    """Merge the adapters of nested peft wrappers, and return the module that they wrap."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    module: Any = wrapper
    if isinstance(module, BaseTunerLayer):
        base: Any = module.get_base_layer()
        if isinstance(base, nn.Embedding) and any(base.children()):  # Inkling's has a norm
            raise UnsupportedError(
                f"the adapter of {name} adds to normed rows, which no weight does: "
                "runner.load_adapter serves it"
            )
    try:
        while isinstance(module, BaseTunerLayer):
            if module.disable_adapters:
                module.unmerge()
            else:
                module.merge()
            module = module.base_layer
        if isinstance(module, AuxiliaryTrainingWrapper):
            if module.disable_adapters:
                module = module.original_module
            else:
                module = module.unload_and_optionally_merge_module(True, False, None)
                if isinstance(module, nn.Linear):  # peft swaps the sizes of a tied head's copy
                    module.out_features, module.in_features = module.weight.shape
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(f"peft cannot merge its adapter of {name}: {error}") from error
    merged: nn.Module = module
    return merged
