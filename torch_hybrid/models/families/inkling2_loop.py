"""Inkling-2 with layers that run again: each pass has keys, values and convolution states of its
own, and messages from the sums of blocks that the pass before it made."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.block_residual import BlockResidual
from torch_hybrid.layers.message_gate import MessageGate
from torch_hybrid.layers.sink_attention import SinkAttention
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.families.inkling2 import (
    AttentionAdapter,
    DecoderLayer,
    Inkling2Family,
    Streams,
    decoder_layers,
    first_of,
    residual_of,
    sink_attention,
    text_class_of,
)
from torch_hybrid.models.family import Swap, joined_projection, parameter, weights_of
from torch_hybrid.specs import AttentionSpec, LayerSpec

_GATES = ("q_message_gate", "k_message_gate", "v_message_gate", "mlp_message_gate")


def _looped(config: Any) -> range:
    """Return the indices of the layers that run again."""
    return range(config.loop_layer_index_start, config.loop_layer_index_end)


def _attention(module: Any, spec: AttentionSpec) -> SinkAttention:
    is_looped = module.layer_idx in _looped(module.config)
    return sink_attention(module, spec, has_separate_inputs=is_looped)


class _LaterPass(DecoderLayer):
    """A later pass of a layer, whose modules are those of the first.

    It begins with the streams that the first pass began with. Those that the pass before it made
    stand behind the others: the sum of each block of the loop.

    Args:
        first: the first pass of the layer.
        gates: gates of the inputs of queries, keys, values and the MLP.
        messages: mix of the streams of the pass before, with a query for each gate.
        looped_blocks: numbers of the blocks that the loop makes.
        begins_pass: whether a pass begins with this layer.
    """

    def __init__(
        self,
        first: DecoderLayer,
        gates: nn.ModuleList,
        messages: BlockResidual,
        looped_blocks: range,
        begins_pass: bool,
    ) -> None:
        nn.Module.__init__(self)
        for name, child in first.named_children():
            self.add_module(name, child)
        self.attention_type, self.num_blocks = first.attention_type, first.num_blocks
        self.begins_block = first.begins_block
        self.own_block = nn.Buffer(first.own_block, persistent=False)
        self.message_gates, self.messages = gates, messages
        self.looped_blocks, self.begins_pass = looped_blocks, begins_pass

    def forward(
        self,
        streams: Tensor | Streams,
        _: Tensor | None = None,
        *,
        step: LayerStep,
        **_more: object,
    ) -> Streams:
        """Run the layer on the streams of the layer before."""
        assert self.attention_input is not None
        present, blocks = streams
        known = first_of(blocks, self.num_blocks)
        if self.begins_pass:
            begin, end = self.looped_blocks.start, self.looped_blocks.stop
            made = blocks[..., begin + 1 : end, :], present[..., None, :]
            blocks, present = torch.cat([known, *made], -2), blocks[..., begin, :]
        made_before = blocks[..., self.num_blocks :, :]
        *of_inputs, of_mlp = self.messages(made_before, made_before[..., -1, :])
        *gates, mlp_gate = self.message_gates
        inputs = self.attention_input(known, present)
        inputs = inputs * (len(gates) // len(inputs))
        dtype = present.dtype
        told = tuple(
            gate(x, message, dtype)
            for gate, x, message in zip(gates, inputs, of_inputs, strict=True)
        )
        message = partial(mlp_gate, message=of_mlp, dtype=dtype)
        return self._run(present, blocks, told, step, message)


class _FinalNorm(nn.Module):
    """The mix of the last layer's streams, and its norm."""

    def __init__(self, residual: BlockResidual, norm: nn.Module) -> None:
        super().__init__()
        self.residual, self.norm = residual, norm

    def forward(self, streams: Streams) -> Tensor:
        """Mix and norm the streams to [1, T, dim]."""
        present, blocks = streams
        [mixed] = self.residual(first_of(blocks, self.residual.bias.shape[0]), present)
        normed: Tensor = self.norm(mixed)
        return normed


def _message_gate(module: Any) -> MessageGate:
    rows = weights_of(module.forget_gate_proj, module.message_gate_proj)
    gate = joined_projection([weight.float() for weight in rows])
    return MessageGate(module.down_proj, gate, module.norm.eps)


class Inkling2LoopFamily(Inkling2Family):
    model_types = ("inkling2_loop", "inkling2_loop_text")
    swaps: ClassVar = {
        **Inkling2Family.swaps,
        "paged_attention": Swap(attribute="self_attn", make=_attention, adapter=AttentionAdapter),
    }
    hf_taken_modules = (
        *Inkling2Family.hf_taken_modules,
        *(".message_input", ".forget_gate_proj", ".message_gate_proj"),
    )

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        """Return the specs of each pass of each layer, in the order of a step."""
        looped = _looped(config)
        if not looped or looped.stop > config.num_hidden_layers:
            raise UnsupportedError(
                f"{config.model_type}: config field loop_layer_index_end must be within "
                f"{looped.start + 1} and {config.num_hidden_layers}, got {looped.stop}"
            )
        specs = super().specs(config)
        passes = specs[looped.start : looped.stop] * config.loop_num_passes
        return [*specs[: looped.start], *passes, *specs[looped.stop :]]

    def backbone(self, model: Any) -> Backbone:
        """Put layers of ours around the modules of the model's, one for each pass."""
        config = model.config
        blocks_of, looped = config.n_layers_per_attn_res_block, _looped(config)
        looped_blocks = range(looped.start // blocks_of, looped.stop // blocks_of)
        num_made, queries = len(looped_blocks), model.message_input.query.detach()
        layers = decoder_layers(model, looped)
        again = []
        for number, query in zip(looped, queries.split(1), strict=True):
            gates = (model.layers[number].get_submodule(name) for name in _GATES)
            messages = BlockResidual(
                *(parameter(query.squeeze(0)), num_made, num_made - 1),
                eps=model.message_input.norm.eps,
            )
            again.append((layers[number], nn.ModuleList(map(_message_gate, gates)), messages))
        later = [
            _LaterPass(first, gates, messages, looped_blocks, first is layers[looped.start])
            for first, gates, messages in again * (config.loop_num_passes - 1)
        ]
        num_blocks = layers[0].num_blocks
        residual = residual_of(model.final_input, num_blocks, num_blocks)
        layers[looped.stop : looped.stop] = later
        return Backbone(model.embed_tokens, layers, _FinalNorm(residual, model.norm))

    def text_class(self) -> type[nn.Module]:
        from transformers import Inkling2LoopForCausalLM

        return text_class_of(Inkling2LoopForCausalLM)
