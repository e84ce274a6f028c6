"""What stands where transformers has a model without its head, if its layers know no step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from torch_hybrid.backends.step import Step


class BackboneOutput:
    """What a model without its head gives."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class Backbone(nn.Module):
    """Embeddings, layers that take the step, and norms around them.

    Args:
        embeddings: of tokens.
        layers: ``forward(hidden [1, T, dim], *, step) -> [1, T, dim]``.
        norm: of what the last layer gives.
        first_norm: of embeddings; None: there is none.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        first_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embeddings, self.norm = embeddings, norm
        self.first_norm = first_norm or nn.Identity()
        self.layers = nn.ModuleList(layers)

    def get_input_embeddings(self) -> nn.Module:
        """As models of transformers have it."""
        return self.embeddings

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """As models of transformers have it."""
        self.embeddings = embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        step: Step,
        position_ids: Tensor,
        attention_mask: None,
        use_cache: bool,
    ) -> BackboneOutput:
        """Tokens [1, T], or [1, T, dim] in their place; positions count for nothing."""
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = self.first_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, step=step)
        return BackboneOutput(self.norm(hidden))
