"""Training of a checkpoint's head that predicts further tokens (MTP), beside its model.

    loss = loss of the model + weight * cross entropy of lm_head(head(embed(x_t), hidden_{t-1}))

``models/mtp.py`` says what a head computes. Its predictions are of the tokens that the model's are
of: x_{t+1} at t, so both losses have the same labels and the same number of them. Before the first
token of a sequence the hidden state is zero, as where the head is served.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import pad

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.models.arguments import checked_path
from torch_hybrid.models.checkpoint.read import read_weights
from torch_hybrid.models.families import family_of
from torch_hybrid.models.load import unread_head
from torch_hybrid.models.mtp import MtpHead, names_of, renamed, share_config, take_head
from torch_hybrid.packing import Packing
from torch_hybrid.training.causal_lm import CausalLM
from torch_hybrid.training.linear_cross_entropy import summed_loss
from torch_hybrid.training.make_trainable import exchange, in_front, make_trainable

M = TypeVar("M", bound=nn.Module)
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")  # of model and head


class MtpCausalLM(CausalLM):
    """Class in front of a causal language model with a head, its ``mtp``."""

    mtp: MtpHead

    @property
    def trains_head(self) -> bool:
        """Tell whether the loss of the head is added: in training."""
        return self.training

    def head_loss(self, hidden: Tensor, targets: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Sum the cross entropies of the head."""
        packing: Packing = inputs["packing"]
        base: Any = self.base_model
        embedded = inputs.get("inputs_embeds")
        if embedded is None:
            embedded = base.get_input_embeddings()(inputs["input_ids"])
        x = embedded.flatten(0, 1)
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            position_ids = packing.positions.view(targets.shape)
        if position_ids.ndim == 3 and len(position_ids) == 4:
            position_ids = position_ids[1:]  # the first are places in the text
        position_ids = position_ids.expand(*position_ids.shape[:-2], *targets.shape)
        position_ids = position_ids.flatten(-2).unsqueeze(-2)
        rotary = dict(base.named_children()).get("rotary_emb")
        rotations = None if rotary is None else rotary(x[None], position_ids)
        before = pad(hidden.flatten(0, 1)[:-1], (0, 0, 1, 0))
        out = self.mtp(
            x,
            before.masked_fill((packing.positions == 0)[:, None], 0.0),
            packing=packing,
            position_embeddings=rotations,
            position_ids=position_ids,
            attention_mask=None,
        )
        return summed_loss(self.lm_head, out, targets)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Save the model as transformers does, with the head by the names that checkpoints have."""
        if not vars(self).get("_hf_peft_config_loaded"):  # then adapters alone are saved
            names = {ours: theirs for theirs, ours in self._names().items() if ours}
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = {renamed(name, names) or name: each for name, each in state_dict.items()}
        model: Any = super()
        model.save_pretrained(save_directory, is_main_process, state_dict, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load weights by their names in the model, or of the head by those in checkpoints."""
        names = self._names()
        found = {renamed(name, names) or name: each for name, each in state_dict.items()}
        return super().load_state_dict(found, *args, **options)

    def _names(self) -> dict[str, str]:
        layout = family_of(self.config.model_type, self.config.architectures).mtp
        assert layout is not None
        num_layers = self.config.num_hidden_layers
        return names_of(layout, self.config, num_layers, layers="mtp.layers", first=0)


def make_trainable_with_head(model: M, path_or_id: str | Path, weight: float) -> M:
    """Make a model trainable beside a checkpoint's head; a head that it has stays.

    Raises:
        UnsupportedError, ValueError: as ``make_trainable`` does, and the model is unchanged.
    """
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"mtp_loss_weight must be finite and at least 0, got {weight}")
    if isinstance(model, MtpCausalLM):
        return model
    head = _read_head(model, path_or_id)
    trained: Any = make_trainable(model)
    exchange(trained, in_front(MtpCausalLM, type(trained).__bases__[-1]))
    trained.mtp, trained.mtp_loss_weight = head, weight
    return model


@in_isolation
def _read_head(model: Any, path_or_id: str | Path) -> MtpHead:
    """Read the head of a checkpoint for a model of transformers, in its dtype and on its device."""
    path, name = checked_path(path_or_id), type(model).__name__
    children = dict(model.named_children())
    if "base_model" in children:  # of PEFT
        raise UnsupportedError(
            f"adapters are saved without an MTP head, got {name}: "
            "call make_trainable first, then get_peft_model, whose targets may be in the head"
        )
    if "lm_head" not in children or model.config.get_text_config() is not model.config:
        raise UnsupportedError(
            "an MTP head trains beside a causal language model of texts alone, as "
            f"AutoModelForCausalLM loads it, got {name}"
        )
    like, config = model.get_input_embeddings().weight, model.config
    checkpoint, architecture, theirs = unread_head(path, like.dtype, like.device)
    head = take_head(theirs, architecture.table, architecture.num_head)
    sizes, others = ([getattr(c, name) for name in _SIZES] for c in (config, theirs.config))
    if sizes != others:
        raise ValueError(
            f"the MTP head in {path} must be of a model like this one, whose {', '.join(_SIZES)} "
            f"are {sizes}, got {others}"
        )
    share_config(head, config)
    read_weights(head, checkpoint, like.device)
    return head.requires_grad_().train(model.training)
