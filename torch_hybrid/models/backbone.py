"""The replacement of transformers' headless model, where that does not hand layers the step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from torch_hybrid.backends.step import Step


class BackboneOutput:
    """The output of a headless model, by the name that transformers has for it."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class Backbone(nn.Module):
    """Embeddings, layers that take the step, and norms around them.

    Args:
        embeddings: module from tokens to vectors.
        layers: ``forward(hidden [1, T, dim], *, step) -> [1, T, dim]``.
        norm: norm after the last layer.
        first_norm: norm of the embeddings; None: there is none.
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
        """Return the embedding module, as transformers' models do."""
        return self.embeddings

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the embedding module, as transformers' models do."""
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
        """Run the layers on tokens [1, T] or embeddings [1, T, dim]; positions are ignored."""
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = self.first_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, step=step)
        return BackboneOutput(self.norm(hidden))
