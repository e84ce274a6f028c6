"""New values for weights that were read from a checkpoint, by the checkpoint's names.

The content of each weight is known since it was read (``content.py``). A stored tensor's parts go
to the same places through the same casts and factors. That holds for merged projections, stacked
experts and a rank's share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.content import Content, Slice, Stored, leaves, slices

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_INNER = "hf_model."  # prefix of transformers' names for weights


@dataclass(frozen=True, slots=True)
class Origin:
    """The content of a weight that was read, and the place where a module keeps it.

    ``unit`` is the dtype in which the content views the weight's bytes.
    """

    content: Content
    unit: torch.dtype
    store: Mapping[str, Tensor | None]
    name: str

    @property
    def weight(self) -> Tensor | None:
        """The weight as it is now."""
        return self.store.get(self.name)

    def places(self) -> list[tuple[Slice, Tensor]]:
        """Return each slice of stored tensors, and the part of the weight that it fills."""
        assert self.weight is not None
        return slices(self.content, self.weight.detach().view(self.unit).view(self.content.shape))


class Origins:
    """The origins of all weights of a model that were read from a checkpoint.

    Args:
        origins: one for each weight.
        known: all tensors of the checkpoint, by name. New values for a tensor that the model does
            not use are checked, and written nowhere.
    """

    def __init__(self, origins: Sequence[Origin], known: Mapping[str, Stored]) -> None:
        self._stored = dict(known)
        self._of: dict[str, list[Origin]] = defaultdict(list)  # by the name of a stored tensor
        for origin in origins:
            stored = {leaf.stored.name: leaf.stored for leaf in leaves(origin.content)}
            self._stored |= stored
            for name in stored:
                self._of[name].append(origin)

    def tied(self, model: nn.Module) -> dict[str, str]:
        """Find the tensors that were not read since layers share a weight, and the tensor that
        it was read from, by name."""
        read = {
            id(origin.weight): name
            for name, origins in self._of.items()
            for origin in origins
            if len([*leaves(origin.content)]) == 1
        }
        found = {}
        for path, weight in model.named_parameters(remove_duplicate=False):
            name = path.removeprefix(_INNER)
            if name in self._stored and name not in self._of and id(weight) in read:
                found[name] = read[id(weight)]
        return found

    def check_model(self, model: nn.Module) -> None:
        """Raise UnsupportedError unless all weights are where they were read, without scales."""
        modules = list(model.modules())
        own = {id(x) for m in modules for x in (*m._parameters.values(), *m._buffers.values())}
        for name, origins in self._of.items():
            if self._stored[name].is_scaled:
                raise UnsupportedError(
                    f"weight {name} is stored with scales: quantized models take no new weights"
                )
            if any(id(origin.weight) not in own for origin in origins):
                raise UnsupportedError(
                    f"weight {name} is not where it was read: a model that was sharded or "
                    f"quantized in memory takes no new weights"
                )

    def check(self, name: str, values: Tensor) -> None:
        """Raise ValueError unless ``values`` are finite, and match the checkpoint's tensor."""
        stored = self._stored.get(name)
        if stored is None:
            raise ValueError(
                f"weight {name!r} is none of the checkpoint that the model was read from"
            )
        if tuple(values.shape) != stored.shape:
            raise ValueError(
                f"weight {name} must have shape {[*stored.shape]}, got {[*values.shape]}"
            )
        if values.dtype != stored.dtype:
            raise ValueError(f"weight {name} must have dtype {stored.dtype}, got {values.dtype}")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            raise ValueError(f"weight {name} has {count} NaN or infinite values")

    def check_complete(self, names: Collection[str]) -> None:
        """Raise ValueError unless there are values for every tensor of the model."""
        if missing := sorted(self._of.keys() - set(names)):
            listed = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            raise ValueError(
                f"{len(missing)} of {len(self._of)} weights are missing, {listed}: "
                f"partial=True leaves them as they are"
            )

    def write(self, name: str, values: Tensor) -> None:
        """Write checked values into all weights that use this tensor."""
        values = values.detach().contiguous()
        for origin in self._of.get(name, ()):
            for part, place in origin.places():
                if part.stored.name == name and place.numel():
                    where = part.where
                    own = values.as_strided(where.shape, where.stride(), where.storage_offset())
                    place.copy_(part.made_of(own.to(place.device)))


def checked_update(
    model: nn.Module, origins: Origins | None, weights: Weights, *, partial: bool
) -> Callable[[], None]:
    """Check all that can be known of new weights, and return what writes them.

    Args:
        model: the model whose weights are written.
        origins: the origins of its weights; None if none was read as it is stored.
        weights: values by the names of the checkpoint. A mapping or a sequence is checked here as a
            whole; weights of an iterator are checked as they come.
        partial: whether some may be missing.

    Raises:
        TypeError: the weights are of another kind.
        UnsupportedError: the model has no weights that can be written by these names.
        ValueError: a name is unknown or comes twice, or a shape or dtype is not the checkpoint's.
            Or values are not finite, weights are missing, or a shared weight comes with different
            values.
    """
    if isinstance(weights, nn.Module):
        raise UnsupportedError(
            f"this model takes new weights by the names of its checkpoint, got a "
            f"{type(weights).__name__}"
        )
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise TypeError(f"weights must be a model, or names and values, got {weights!r}")
    if origins is None:
        raise UnsupportedError(
            "new weights are written by the names of a checkpoint: the model must come from "
            "th.from_pretrained, with weights='auto'"
        )
    origins.check_model(model)
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    once = _once(pairs, origins.tied(model))
    if not isinstance(weights, Mapping | Sequence):
        return lambda: _write(origins, once, partial=partial)
    given = list(once)
    seen: set[str] = set()
    for name, values in given:
        _check(origins, name, values, seen)
    if not partial:
        origins.check_complete(seen)

    def write() -> None:
        for name, values in given:
            origins.write(name, values)

    return write


def _once(
    weights: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Rename each weight to the tensor that was read; a shared one may come under several names.

    Raises:
        ValueError: its values then differ.
    """
    first: dict[str, tuple[str, Tensor]] = {}
    for name, values in weights:
        target = tied.get(name, name)
        if target in tied.values():
            other, kept = first.setdefault(target, (name, values))
            if other != name:
                if not torch.equal(kept, values.to(kept.device)):
                    raise ValueError(f"weights {other} and {name} are one, got different values")
                continue
        yield target, values


def _check(origins: Origins, name: str, values: Tensor, seen: set[str]) -> None:
    if name in seen:
        raise ValueError(f"weight {name} comes twice")
    origins.check(name, values)
    seen.add(name)


def _write(origins: Origins, weights: Iterable[tuple[str, Tensor]], *, partial: bool) -> None:
    """Check and write weights one by one; an error notes how many are written by then."""
    seen: set[str] = set()
    try:
        for name, values in weights:
            _check(origins, name, values, seen)
            origins.write(name, values)
        if not partial:
            origins.check_complete(seen)
    except BaseException as error:
        error.add_note(f"{len(seen)} weights are new by now, and the others as they were")
        raise
