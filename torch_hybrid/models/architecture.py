"""The architecture of a model: read from its config once, and handed to all that make the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch_hybrid.models.family import Family, require
from torch_hybrid.models.mtp import MtpLayout, lengthened, with_previous_hidden
from torch_hybrid.specs import LayerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as its config describes it, before any weight is read.

    Attributes:
        config: transformers' config, the outer one of a multimodal model.
        family: family of the model.
        table: mixers of all layers.
        head: place of the MTP head in the checkpoint, if it is read.
        num_head: layers of the head; config and table have them after the model's own.
    """

    config: Any
    family: Family
    table: LayerTable
    head: MtpLayout | None = None
    num_head: int = 0

    @classmethod
    def of(cls, config: Any, family: Family, *, mtp: bool = False) -> Self:
        """Read the architecture from a transformers config of this family.

        Raises:
            UnsupportedError: a field of the config is not known here, or ``mtp`` asks for an
                MTP head and none is known.
        """
        head, num_head = family.mtp if mtp else None, 0
        if mtp:
            config, num_head = lengthened(config, head)
        text = config.get_text_config()
        require(config, "text_config.model_type", text.model_type, family.model_types)
        table = LayerTable.from_specs(family.specs(text))
        if num_head:
            table = with_previous_hidden(table, num_head, text.hidden_size)
        return cls(config=config, family=family, table=table, head=head, num_head=num_head)
