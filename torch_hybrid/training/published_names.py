"""Weights under the names that ``save_pretrained`` gives them, for ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.host.surroundings import in_isolation


def with_names_of(model: Any, state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Name weights as a model's state does, joined as there, where a file has them otherwise.

    transformers joins experts in ``from_pretrained`` alone; its Trainer, which resumes and takes
    the best model by ``load_state_dict``, leaves them as they were.
    """
    if state_dict.keys() <= model.state_dict().keys():
        return state_dict
    made, report = _load(type(model).__bases__[-1], model.config, dict(state_dict))
    found = made.state_dict()
    for name in report["missing_keys"]:
        del found[name]
    return {**found, **{name: state_dict[name] for name in report["unexpected_keys"]}}


@in_isolation
def _load(cls: Any, config: Any, state_dict: dict[str, Tensor]) -> Any:
    """Load weights as transformers does, in a dtype that rounds none of 16 or 32 bits."""
    return cls.from_pretrained(
        None, config=config, state_dict=state_dict, dtype=torch.float32, output_loading_info=True
    )
