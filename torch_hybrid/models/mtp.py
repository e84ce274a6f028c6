"""Heads that predict further tokens (MTP): their places in checkpoints, and their forward.

    hidden'_t = norm(layers(fc([norm(embed(x_t)) | norm(hidden_{t-1})])))
    x_{t+1}   = argmax(lm_head(hidden'_t)),  and so on from hidden'_t

``hidden`` is the model's own, after its last norm; embedding and lm_head are the model's. Before
the first token, where heads were not trained, there is no hidden state: it is zero. The head's
layers are decoder layers of the model's family, and follow the model's in its table. transformers
reads their weights as if the model had so many layers more; what is around them is read beside
those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.backends.previous_hidden import (
    PreviousHiddenPlan,
    kept_hidden,
    previous_hidden,
)
from torch_hybrid.backends.step import Step
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.mixer import Composed
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.specs import LayerTable, PreviousHiddenSpec

_PARTS = ("fc", "embedding_norm", "hidden_norm", "norm")  # modules of a head, fields of a layout
_FIELDS = ("num_hidden_layers", "layer_types", "mlp_layer_types")  # fields that list the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """The place of an MTP head in a family's checkpoints.

    In names, ``{first}`` and ``{last}`` stand for the numbers of the head's first and last layer.

    Attributes:
        layers: beginning of the names of a layer's weights; ``{}`` is its number.
        numbered_on: True where the head's numbers follow the model's own; else they begin at 0.
        fc, embedding_norm, hidden_norm, norm: modules around the layers.
        shared: modules that the head shares with the model: they are not read twice.
        layer_types: function of the text config: types of the head's layers.
    """

    layers: str
    numbered_on: bool
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    shared: tuple[str, ...] = ()
    layer_types: Callable[[Any], list[str]] = lambda config: ["full_attention"]


def next_layer(norm: str) -> MtpLayout:
    """Return the layout of a head that is one more layer, with its last norm at ``norm``."""
    return MtpLayout(
        layers="model.layers.{}",
        numbered_on=True,
        fc="model.layers.{first}.eh_proj",
        embedding_norm="model.layers.{first}.enorm",
        hidden_norm="model.layers.{first}.hnorm",
        norm=f"model.layers.{{first}}.{norm}",
        shared=("model.layers.{first}.embed_tokens", "model.layers.{first}.shared_head.head"),
    )


@dataclass(eq=False, repr=False)
class MtpHead(Composed):
    """A head and its layers, without the embedding and the output that are the model's."""

    fc: nn.Module  # projection from ``[embedding | hidden]`` to hidden
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    layers: nn.ModuleList  # decoder layers of transformers, with hooks that hand them the step
    norm: nn.Module  # norm after the layers
    first_layer: int  # number of the first of them in the model's table
    kinds: frozenset[str]  # kinds of their mixers

    def forward(self, embedded: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Predict the token after each one, as hidden states for the model's head.

        Args:
            embedded: [T, dim] embeddings of the tokens.
            hidden: [T, dim] hidden states of the token before each, of the model or of the head.
            options: further arguments of the decoder layers. Caches of a ``step`` hold the head's
                past; they are mutated as its plans say.

        Returns:
            [T, dim].
        """
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        out = self.fc(both)[None]
        for layer in self.layers:
            out = layer(out, **options)
        result: Tensor = self.norm(out)[0]
        return result.to(hidden.dtype)

    def before(self, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor | None:
        """Keep the last hidden states and tokens of each sequence in the cache.

        Returns:
            [T, dim] hidden states of the token before each; None where the head does not read the
            tokens of the step."""
        plan, cache = self._kept(step)
        before = previous_hidden(hidden, tokens, plan, cache)
        return before if plan.is_read else None

    def kept(self, tokens: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Read kept tokens, and the hidden states [T, dim] before all tokens, from the cache."""
        return kept_hidden(tokens, *self._kept(step))

    def _kept(self, step: Step) -> tuple[PreviousHiddenPlan, LayerCache]:
        _, plan, cache = step.layer(self.first_layer, PreviousHiddenSpec.kind)
        assert isinstance(plan, PreviousHiddenPlan)
        return plan, cache


def lengthened(config: Any, layout: MtpLayout | None) -> tuple[Any, int]:
    """Copy a config so that it counts the layers of the head too, and return how many those are.

    Raises:
        UnsupportedError: no head of this model type is known here.
    """
    if layout is None:
        raise UnsupportedError(
            f"model type {config.model_type!r} has no MTP head that is known here"
        )
    config = copy.deepcopy(config)
    text = config.get_text_config()
    types = layout.layer_types(text)
    num_layers = text.num_hidden_layers
    if text.to_dict().get("mlp_layer_types"):
        text.mlp_layer_types = [*text.mlp_layer_types, *["sparse"] * len(types)]
    if getattr(text, "layer_types", None):
        text.layer_types = [*text.layer_types, *types]
    if text.num_hidden_layers == num_layers:  # where the config does not derive it from the types
        text.num_hidden_layers = num_layers + len(types)
    return config, len(types)


def with_previous_hidden(table: LayerTable, num_head: int, channels: int) -> LayerTable:
    """Add the hidden states that a head keeps to a table, whose last ``num_head`` layers it has."""
    specs = [tuple(entry.spec for entry in layer) for layer in table.layers]
    first = len(specs) - num_head
    specs[first] = (PreviousHiddenSpec(channels=channels), *specs[first])
    return LayerTable.from_specs(specs)


def with_head(
    checkpoint: Checkpoint, given: Checkpoint, config: Any, layout: MtpLayout
) -> Checkpoint:
    """Rename tensors so that transformers finds the head: its layers after the model's, the rest in
    ``mtp``.

    Args:
        checkpoint: checkpoint of the model.
        given: the same checkpoint by the names in its files.
        config: the text config, lengthened.
        layout: layout of the family's heads.

    Raises:
        ValueError: the checkpoint has no MTP head.
    """
    num_layers = config.num_hidden_layers - len(layout.layer_types(config))
    names = names_of(layout, config, num_layers, layers="model.layers", first=num_layers)
    kept, found = {}, {}
    for name, stored in checkpoint.tensors.items():
        if renamed(name, names) is None:
            kept[name] = stored
    for name, stored in given.tensors.items():
        if ours := renamed(name, names):
            found[ours] = stored
    if "mtp.fc.weight" not in found:
        fc = next(name for name, ours in names.items() if ours == "mtp.fc")
        raise ValueError(
            f"the checkpoint {given.folder} has no MTP head: there is no tensor "
            f"{fc}.weight{given.reasons()}"
        )
    return replace(checkpoint, tensors={**kept, **found})


def names_of(
    layout: MtpLayout, config: Any, num_layers: int, *, layers: str, first: int
) -> dict[str, str]:
    """Map the names of a head's modules in a checkpoint to ours; those of shared ones to "".

    Args:
        layout: layout of the family's heads.
        config: the text config.
        num_layers: number of the model's own layers.
        layers: our name of the list of layers, in which the head's begin at ``first``.
    """
    num_head, theirs = len(layout.layer_types(config)), num_layers if layout.numbered_on else 0
    where = {"first": theirs, "last": theirs + num_head - 1}
    return {
        **{getattr(layout, part).format(**where): f"mtp.{part}" for part in _PARTS},
        **{layout.layers.format(theirs + i): f"{layers}.{first + i}" for i in range(num_head)},
        **{name.format(**where): "" for name in layout.shared},
    }


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """Rename a tensor of the module, the innermost one, that ``names`` lists.

    Returns:
        None for tensors of other modules, and "" for those of modules whose new name is "".
    """
    old = max((old for old in names if name.startswith(f"{old}.")), key=len, default=None)
    if old is None:
        return None
    return names[old] and names[old] + name.removeprefix(old)


def add_parts(hf_model: Any) -> None:
    """Give a model of transformers the modules around its head's layers, for weights to be read."""
    base, dim = hf_model.base_model, hf_model.config.hidden_size
    last_norm = getattr(base, "norm", None) or base.norm_f
    parts = {name: copy.deepcopy(last_norm) for name in _PARTS if name != "fc"}
    like = last_norm.weight
    fc = nn.Linear(2 * dim, dim, bias=False, device=like.device, dtype=like.dtype)
    hf_model.mtp = nn.ModuleDict({"fc": fc, **parts})


def take_head(hf_model: Any, table: LayerTable, num_head: int) -> MtpHead:
    """Take the head out of a model of transformers, which then has its own layers alone.

    Args:
        hf_model: model whose last ``num_head`` layers and ``mtp`` are the head's; it is changed.
        table: mixers of all layers, the head's included.
        num_head: number of the head's layers.
    """
    base, config = hf_model.base_model, hf_model.config
    first = len(base.layers) - num_head
    layers, base.layers = base.layers[first:], base.layers[:first]
    parts = hf_model.mtp
    del hf_model.mtp
    for name in _FIELDS[1:]:
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:first])
    if config.num_hidden_layers != first:
        config.num_hidden_layers = first
    kinds = frozenset(entry.kind for layer in table.layers[first:] for entry in layer)
    named = {name: parts[name] for name in _PARTS}
    return MtpHead(**named, layers=layers, first_layer=first, kinds=kinds)


def put_back(hf_model: Any, head: MtpHead) -> None:
    """Put a head, the model's ``mtp``, where ``take_head`` finds it."""
    share_config(head, hf_model.config)
    hf_model.base_model.layers.extend(head.layers)
    hf_model.mtp = nn.ModuleDict({name: getattr(head, name) for name in _PARTS})


def share_config(head: MtpHead, config: Any) -> None:
    """Give a head's layers the config that says by which attention and experts they compute."""
    for part in head.modules():
        if "config" in vars(part):
            part.config = config
