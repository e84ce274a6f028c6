"""Weights of a transformers model in memory, as a served model has them.

Those that a served model takes as they are share memory with the model's; others are joined or
scaled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.copies import copy_modules
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.models.adapt import adapt_where_it_lies
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.merge_adapters import check_of_transformers
from torch_hybrid.ops.formats.stored_weights import WITH_SCALES


@in_isolation
def adapt_shared(model: Any) -> HybridModel:
    """Adapt a model of transformers or PEFT, which stays as it is.

    Raises:
        UnsupportedError, ValueError: as ``adapt``.
    """
    check_of_transformers(model)  # before the copy, which a wrapper may not survive
    # PEFT merges an adapter into a base. A detached tensor would count writes as the model's.
    own = {
        id(w): w.data.clone() if ".base_layer." in name else w.data
        for name, w in named_weights(model)
    }
    return adapt_where_it_lies(with_weights(model, own))


def with_weights(model: Any, weights: Mapping[int, Tensor]) -> Any:
    """Copy a model, with these tensors for weights of such ids; others stay the model's own."""
    from transformers import PreTrainedConfig

    old = {id(weight): weight for _, weight in named_weights(model)}
    instead = {
        number: nn.Parameter(new, requires_grad=False)
        if isinstance(old[number], nn.Parameter)
        else new
        for number, new in weights.items()
    }
    return copy_modules(model, instead, copied=(PreTrainedConfig,))


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name; shared ones once."""
    return chain(model.named_parameters(), model.named_buffers())


def update_from(model: HybridModel, trained: nn.Module, *, partial: bool) -> Callable[[], None]:
    """Check the weights of a model in memory, and return what writes them into a served one.

    Args:
        model: the served model.
        trained: a model of transformers or PEFT.
        partial: whether parts of ``model`` may be missing in it: an MTP head, a tower.

    Raises:
        UnsupportedError: ``model`` is shared among ranks or quantized; or as ``adapt``.
        ValueError: weights are missing, or of another name, shape or dtype, or not finite.
    """
    if model.ranks is not None:
        raise UnsupportedError(
            "ranks that share a model take new weights by the names of its checkpoint, "
            f"got a {type(trained).__name__}"
        )
    given, own = dict(named_weights(adapt_shared(trained))), dict(named_weights(model))
    if any(weight.dtype in WITH_SCALES for weight in own.values()):
        raise UnsupportedError(
            "a quantized model takes no new weights: serve it with weights='auto' for that"
        )
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(
            f"{type(trained).__name__} has weights that the served model lacks or has in another "
            f"form: {', '.join(unknown[:3])}"
        )
    if missing := [] if partial else sorted(own.keys() - given.keys()):
        raise ValueError(
            f"{len(missing)} of {len(own)} weights are missing, {', '.join(missing[:3])}: "
            f"partial=True leaves them as they are"
        )
    for name, new in given.items():
        old = own[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"weight {name} must be {old.dtype} of shape {[*old.shape]}, "
                f"got {new.dtype} of {[*new.shape]}"
            )

    def write() -> None:
        for name, new in given.items():
            if own[name].data_ptr() != new.data_ptr():
                own[name].copy_(new)

    return write
