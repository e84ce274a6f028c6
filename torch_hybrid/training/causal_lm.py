"""Causal language models whose loss is computed without whole logits."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils import can_return_tuple

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.linear_cross_entropy import IGNORED
from torch_hybrid.packing import Packing
from torch_hybrid.sampling.logprobs import token_logprobs
from torch_hybrid.training.boundaries import named, packing_of
from torch_hybrid.training.decoder import asks_for_a_cache, check_says_nothing, keeps_a_cache
from torch_hybrid.training.linear_cross_entropy import LossHead, is_plain, summed_loss
from torch_hybrid.training.published_names import with_names_of
from torch_hybrid.training.served_logits import ServedLogits, served_logits


@dataclass
class MtpCausalLMOutput(MoeCausalLMOutputWithPast):  # type: ignore[misc]
    """Output whose ``loss`` has a share of ``mtp_loss``, that of a head of further tokens."""

    mtp_loss: Tensor | None = None


_OF_LAYERS = ("output_hidden_states", "output_attentions")
SOFTCAPS = ("logits_soft_cap", "output_logit_soft_cap", "final_logit_softcapping")


class CausalLM(nn.Module):
    """Class in front of a causal language model's own, for calls with labels.

    In training they return a loss and no logits; ``skip_logits=False`` brings logits, and True
    leaves them out in evaluation too. The first token of a sequence is no label.
    """

    accepts_loss_kwargs = True  # models with images say otherwise to Trainer
    head_name = "lm_head"  # of the model's output head among its modules
    base_model: nn.Module
    config: Any
    lm_head: nn.Module
    mtp_loss_weight: float
    server: ServedLogits | None = None  # of a batch-invariant one

    def forward(
        self,
        *args: Any,
        labels: Tensor | None = None,
        skip_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Run the model's own forward, or compute its loss a chunk of rows at a time."""
        inputs = {"labels": labels, **named(self, args, options, last="labels")}
        labels = inputs.pop("labels")
        if asks_for_a_cache(inputs) or (labels is None and self.server is None):
            return super().forward(labels=labels, **inputs)
        inputs["packing"] = packing_of(inputs)
        labels = None if labels is None else _within_sequences(labels, inputs["packing"])
        if inputs.get("ignore_index", IGNORED) != IGNORED:
            raise ValueError(f"ignore_index must be {IGNORED}, got {inputs['ignore_index']}")
        if labels is not None and self.loss_function is not ForCausalLMLoss:
            if self.server is not None or self.trains_head:
                raise UnsupportedError(
                    "a loss_function of the model's own is computed neither with batch_invariant "
                    "nor beside an MTP head: compute it of the logits of a call without labels"
                )
            return super().forward(labels=labels, **inputs)
        skip = self.training if skip_logits is None else skip_logits
        if self.server is not None:
            return self.by_server(labels, self.server, **inputs)
        assert labels is not None
        keeps = inputs.get("logits_to_keep", 0)
        whole = not skip or isinstance(keeps, Tensor) or keeps or self.z_loss > 0
        if (whole or not isinstance(self.lm_head, LossHead)) and not self.trains_head:
            return super().forward(labels=labels, **inputs)
        return self.by_chunks(labels, skip_logits=skip, **inputs)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load weights by their names in the model, or by those that ``save_pretrained`` writes."""
        return super().load_state_dict(with_names_of(self, state_dict), *args, **options)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set the output head, as ``resize_token_embeddings`` does, whose loss is by chunks too."""
        if is_plain(new_embeddings):
            new_embeddings.__class__ = LossHead
        model: Any = super()
        model.set_output_embeddings(new_embeddings)

    @property
    def z_loss(self) -> float:
        """Factor on squared sums over logits in the loss, of Bamba."""
        factor: float = vars(self).get("z_loss_coefficient", 0.0)
        return factor

    @property
    def trains_head(self) -> bool:
        """Tell whether the loss of an MTP head is added."""
        return False

    def head_loss(self, hidden: Tensor, targets: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Sum the cross entropies of an MTP head, whose inputs are the model's hidden states."""
        raise NotImplementedError

    @can_return_tuple  # type: ignore[untyped-decorator]
    def by_chunks(
        self,
        labels: Tensor,
        *,
        skip_logits: bool,
        attention_mask: Tensor | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Compute the loss as transformers does, by chunks of logits, and that of an MTP head."""
        routes = self._hands_out("output_router_logits", output_router_logits)
        outputs = self.base_model(
            attention_mask=attention_mask, output_router_logits=routes, **inputs
        )
        targets = _next_of(labels) if shift_labels is None else shift_labels
        head, hidden, (softcap, vocab_size) = self.lm_head, self._scaled(outputs[0]), self._bounds()
        total = (
            head(hidden, targets, softcap, vocab_size)
            if softcap or vocab_size
            else summed_loss(head, hidden, targets)
        )
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORED).sum()
        loss = total / num_items_in_batch
        made: dict[str, Any] = {
            "logits": None if skip_logits else head(kept_rows(hidden, logits_to_keep)),
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.get("attentions"),
        }
        kind: Any = CausalLMOutputWithPast
        if routes:
            made |= self._balance(outputs, attention_mask)
            kind = MoeCausalLMOutputWithPast
        if "aux_loss" in made:
            loss = loss + self._balance_coef * made["aux_loss"]
        if self.trains_head:
            made["mtp_loss"] = self.head_loss(outputs[0], targets, inputs) / num_items_in_batch
            loss = loss + self.mtp_loss_weight * made["mtp_loss"]
            kind = MtpCausalLMOutput
        return kind(loss=loss, **made)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def by_server(
        self,
        labels: Tensor | None,
        server: ServedLogits,
        *,
        attention_mask: Tensor | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Compute logits and loss with a server's bits.

        The model itself runs where something has gradients, or layers hand out what is asked for.
        """
        routes = self._hands_out("output_router_logits", output_router_logits)
        asks = routes or any(self._hands_out(name, inputs.get(name)) for name in _OF_LAYERS)
        made: dict[str, Any] = {}
        hidden = None
        if asks or (torch.is_grad_enabled() and any(w.requires_grad for w in self.parameters())):
            outputs = self.base_model(
                attention_mask=attention_mask, output_router_logits=routes, **inputs
            )
            hidden = self._scaled(outputs[0])
            made = {name: outputs.get(name) for name in ("hidden_states", "attentions")}
            if routes:
                made |= self._balance(outputs, attention_mask)
        logits = served_logits(self, hidden, inputs, server, *self._bounds())
        made["logits"] = kept_rows(logits, logits_to_keep)
        if labels is not None:
            targets = _next_of(labels) if shift_labels is None else shift_labels
            known = targets.flatten() != IGNORED
            each = token_logprobs(logits.flatten(0, -2), targets.flatten().clamp(min=0))
            count = known.sum() if num_items_in_batch is None else num_items_in_batch
            made["loss"] = each.masked_fill(~known, 0.0).sum() / -count
            if self.z_loss > 0:
                made["loss"] += self.z_loss * logits.logsumexp(-1).square().mean()
            if "aux_loss" in made:
                made["loss"] += self._balance_coef * made["aux_loss"]
            if self.trains_head and hidden is not None:
                made["mtp_loss"] = self.head_loss(outputs[0], targets, inputs) / count
                made["loss"] += self.mtp_loss_weight * made["mtp_loss"]
        kind: Any = MoeCausalLMOutputWithPast if routes else CausalLMOutputWithPast
        return (MtpCausalLMOutput if "mtp_loss" in made else kind)(**made)

    def _hands_out(self, name: str, asked: bool | None) -> bool:
        """Tell whether a call or else the config asks for outputs of layers."""
        if asked is not None:
            return asked
        of_config: bool = getattr(self.config.get_text_config(), name, False)  # dense ones lack it
        return of_config

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states by factors on logits, of Falcon-H1, of Granite and of Inkling."""
        config: Any = self.config.get_text_config()
        factor = vars(self.base_model).get("lm_head_multiplier", 1.0)
        factor = factor / vars(self).get("logits_scaling", 1.0)
        if config.model_type == "inkling_text":
            factor = factor / config.logits_mup_width_multiplier
        return hidden if factor == 1 else hidden * factor

    def _bounds(self) -> tuple[float | None, int | None]:
        """Return the bound of logits, and the number of those that stand for tokens if not all."""
        config: Any = self.config.get_text_config()
        # Of RecurrentGemma, of xLSTM and of Inkling-2.
        softcaps = (getattr(config, name, None) for name in SOFTCAPS)
        softcap = next((bound for bound in softcaps if bound is not None), None)
        return softcap, getattr(config, "unpadded_vocab_size", None)  # of Inkling

    def lost_by_trl(self) -> str | None:
        """Name what makes the loss, but is neither in the head nor where TRL reads a config."""
        config: Any = self.config.get_text_config()
        softcap, vocab_size = self._bounds()
        is_padded = vocab_size is not None and vocab_size < config.vocab_size
        if self.trains_head:
            return "the loss of an MTP head"
        if self.z_loss > 0:
            return "the loss of the size of logits"
        if softcap is not None and getattr(config, "final_logit_softcapping", None) is None:
            return "the bound of logits"
        if is_padded or config.model_type == "inkling_text":
            return "the scale or the padding of logits"
        return None

    def _balance(self, outputs: Any, attention_mask: Tensor | None) -> dict[str, Any]:
        """Hand out logits of routers, and the loss that balances experts, if a model has them."""
        logits = outputs.get("router_logits") or None
        balance = vars(sys.modules[type(self).__module__]).get("load_balancing_loss_func")
        if logits is None or balance is None:
            return {"router_logits": logits}
        sizes = self._router_sizes
        made = balance(logits, sizes.num_experts, sizes.num_experts_per_tok, attention_mask)
        return {"aux_loss": made, "router_logits": logits}

    @property
    def _router_sizes(self) -> Any:
        return self if "num_experts" in vars(self) else self.config.get_text_config()

    @property
    def _balance_coef(self) -> float:
        """Factor on the loss that balances experts."""
        factor: float = self._router_sizes.router_aux_loss_coef
        return factor


def refuse_losses_of_trl(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise UnsupportedError for a call by which TRL's trainers compute another loss.

    They do so by a head of their own (``add_fused_lm_head``), around the model's forward.
    """
    if options.get("fused_lm_head") and (lost := model.lost_by_trl()) is not None:
        raise UnsupportedError(
            f"TRL's own head leaves out {lost} of {type(model).__name__}: "
            "train it by the Trainer of transformers"
        )


def _within_sequences(labels: Tensor, packing: Packing) -> Tensor:
    """Check labels, and ignore the first of each sequence."""
    if labels.numel() != packing.num_tokens or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be torch.int64 of the {packing.num_tokens} tokens of the inputs, "
            f"got {labels.dtype} of shape {list(labels.shape)}"
        )
    return labels.masked_fill((packing.positions == 0).view(labels.shape), IGNORED)


def _next_of(labels: Tensor) -> Tensor:
    """Shift labels [B, T], so that each is that of the token before."""
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def kept_rows(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """Take the last rows of hidden states [B, S, D], all for 0, or those that a tensor names.

    transformers 5.20 has no function for it.
    """
    if not isinstance(keep, Tensor):
        return hidden[:, -keep:] if keep else hidden
    if keep.ndim == 1:
        return hidden[:, keep]
    return hidden[keep] if keep.dtype == torch.bool else hidden.take_along_dim(keep[..., None], 1)


class MaskedCausalLM(CausalLM):
    """Class in front of a model whose own forward hands no boundaries down, but a mask.

    So the packing goes in place of that mask.
    """

    place = "attention_mask"

    def forward(
        self,
        *args: Any,
        labels: Tensor | None = None,
        skip_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Run the forward of a causal language model."""
        inputs = {"labels": labels, **named(self, args, options, last="labels")}
        of_model = self.server is None and inputs["labels"] is None
        if asks_for_a_cache(inputs) or (of_model and keeps_a_cache(self.base_model, inputs)):
            check_says_nothing(inputs)
        else:
            inputs["packing"] = inputs[self.place] = packing_of(inputs)
        return super().forward(**{"skip_logits": skip_logits, **inputs})


class StateCausalLM(MaskedCausalLM):
    """Class in front of a model that hands down a state alone: RWKV."""

    place = "state"
    head_name = "head"
    head: nn.Module

    @property
    def lm_head(self) -> nn.Module:  # type: ignore[override]
        """Output head, under the name that other models give it."""
        return self.head


def causal_lm_of(children: Collection[str]) -> type[CausalLM]:
    """Choose a class by the names of a causal language model's modules."""
    if "rwkv" in children:
        return StateCausalLM
    return MaskedCausalLM if "backbone" in children else CausalLM
