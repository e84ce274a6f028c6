"""Inkling-2, its text part: attention with biases by distance, sinks and gates, to a window in most
layers. In the others, each token changes the taps that convolve keys and values. Residuals are
picked from those of earlier blocks of layers; experts are of softcapped SwiGLU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.biased_attention import BranchConvolution
from torch_hybrid.layers.block_residual import BlockResidual
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.sink_attention import (
    DynamicSinkAttention,
    SeparateSinkAttention,
    SinkAttention,
)
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.families.inkling import layer_specs
from torch_hybrid.models.family import (
    Family,
    Logits,
    Swap,
    TextModel,
    joined_projection,
    parameter,
    require,
    require_fields,
    weights_of,
)
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.specs import AttentionSpec, BranchConvolutionSpec, LayerSpec

_SCALES = re.compile(r"\.experts\.w\d+_weight_scale$")

Streams = tuple[Tensor, Tensor]  # the present block's sum [1, T, dim], all others' [1, T, B, dim]


class _OlderParts(NamedTuple):
    config: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    r_proj: nn.Module
    gate_proj: nn.Module
    sink_proj: nn.Module
    o_proj: nn.Module
    k_sconv: nn.Module
    v_sconv: nn.Module
    q_l2_clip: nn.Module
    k_l2_clip: nn.Module
    rel_l2_clip: nn.Module
    v_norm: nn.Module
    rel_logits_proj: nn.Module


def by_older_names(module: Any) -> Any:
    """Name the parts of attention as transformers did before 5.24."""
    if "r_proj" in module._modules:
        return module
    q, k, v, out = module.q_proj, module.k_proj, module.v_proj, module.o_proj
    bias = module.relative_position_bias
    return _OlderParts(
        config=module.config,
        q_proj=q.linear,
        k_proj=k.linear,
        v_proj=v.linear,
        r_proj=bias.linear,
        gate_proj=out.gate_proj,
        sink_proj=module.sink_proj,
        o_proj=out.linear,
        k_sconv=k.sconv,
        v_sconv=v.sconv,
        q_l2_clip=q.norm,
        k_l2_clip=k.norm,
        rel_l2_clip=bias.norm,
        v_norm=v.norm,
        rel_logits_proj=bias,
    )


def sink_attention(
    module: Any, spec: AttentionSpec, *, has_separate_inputs: bool = False
) -> SinkAttention:
    """Make our attention of theirs; without a window, its inputs are separate in any case."""
    module = by_older_names(module)
    config, convolutions = module.config, (module.k_sconv, module.v_sconv)
    of_queries = weights_of(module.q_proj, module.r_proj, module.gate_proj, module.sink_proj)
    keys_and_values = weights_of(module.k_proj, module.v_proj)
    options: dict[str, Any] = {
        "o_proj": module.o_proj,
        "q_scale": module.q_l2_clip.scale,
        "mix_scale": module.rel_l2_clip.scale,
        "qk_clip": config.qk_l2_clip_threshold,
        "mix_clip": config.rel_l2_clip_threshold,
        "norm_eps": module.v_norm.eps,
        "profiles": parameter(module.rel_logits_proj.proj.detach().transpose(0, 1).contiguous()),
    }
    if spec.window:
        taps = [each.conv1d.weight.detach().squeeze(1) for each in convolutions]
        if has_separate_inputs:
            k_proj, v_proj = map(joined_projection, zip(keys_and_values))
            return SeparateSinkAttention(
                spec,
                in_proj=joined_projection(of_queries),
                k_proj=k_proj,
                v_proj=v_proj,
                conv_weight=parameter(torch.cat(taps)),
                **options,
            )
        return SinkAttention(
            spec,
            in_proj=joined_projection([*of_queries, *keys_and_values]),
            conv_weight=parameter(torch.cat(taps)),
            **options,
        )
    taps = [_oldest_first(each.static_weight.detach(), 0).transpose(0, 1) for each in convolutions]
    k_proj, v_proj = (
        joined_projection([rows, _taps_of_heads(each, spec)])
        for rows, each in zip(keys_and_values, convolutions, strict=True)
    )
    return DynamicSinkAttention(
        spec,
        in_proj=joined_projection(of_queries),
        k_proj=k_proj,
        v_proj=v_proj,
        conv_weight=parameter(torch.cat(taps).contiguous()),
        log_floor=config.log_scaling_n_floor,
        log_alpha=config.log_scaling_alpha,
        **options,
    )


def _oldest_first(taps: Tensor, dim: int) -> Tensor:
    """Invert the order of taps along a dim: the model's begin at the token itself."""
    return torch.cat(taps.split(1, dim)[::-1], dim)


def _taps_of_heads(convolution: Any, spec: AttentionSpec) -> Tensor:
    """Order the rows that project to taps by head."""
    [rows] = weights_of(convolution.weight_proj)
    return _oldest_first(rows.unflatten(0, (spec.num_kv_heads, -1)), 1).flatten(0, 1)


class AttentionAdapter(LinearAttentionAdapter):
    """Our attention in the place of the model's, which has an input for each of its projections."""

    def forward(  # type: ignore[override]
        self, *inputs: Tensor, step: LayerStep
    ) -> Tensor:
        """Map inputs of [1, T, dim] to [1, T, dim]."""
        _, plan, cache = step.mixer(self.kind)
        _, *convolution = step.mixer(BranchConvolutionSpec.kind)
        out: Tensor = self.mixer(*(x[0] for x in inputs), plan, cache, *convolution)
        return out[None]


def _branch_convolution(module: Any, branch: str) -> BranchConvolution:
    weight = module.conv1d.weight.detach().squeeze(1)
    return BranchConvolution(parameter(weight), branch, scale=(weight.shape[1] + 1) ** -0.5)


class DecoderLayer(nn.Module):
    """A decoder layer that takes the residual streams of earlier blocks, and hands them on.

    Args:
        layer: transformers' layer, whose modules are taken.
        number: index of the layer in the model.
        blocks_of: number of layers in a block.
        num_blocks: number of blocks in the model.
        looped: indices of the layers that run again; as many streams as they have blocks stand
            behind the others, and are handed on as they are.
    """

    is_block_boundary = False  # the model that calls it need not keep the sums of blocks

    def __init__(
        self, layer: Any, number: int, blocks_of: int, num_blocks: int, looped: range = range(0)
    ) -> None:
        super().__init__()
        self.attention_type: str = layer.attention_type
        self.num_blocks = num_blocks
        norms = [name for name in layer._modules if name.endswith("input_layernorm")]
        if number in looped:  # attention has three inputs
            norms *= 3 // len(norms)
        self.input_norms = nn.ModuleList(layer.get_submodule(name) for name in norms)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_convolution = LinearAttentionAdapter(
            _branch_convolution(layer.post_attention_convolution, "attention"),
            BranchConvolutionSpec.kind,
        )
        self.post_mlp_convolution = layer.post_mlp_convolution
        block, place = divmod(number, blocks_of)
        self.begins_block = place == 0
        self.attention_input = None
        if number > 0:
            known = block + (place > 0)
            self.attention_input = residual_of(layer.attention_input, num_blocks, known)
        self.mlp_input = residual_of(layer.mlp_input, num_blocks, block + 1)
        device = self.mlp_input.query.device
        numbers = torch.arange(
            num_blocks + len(looped) // blocks_of, dtype=torch.int64, device=device
        )
        self.own_block = nn.Buffer((numbers == block)[:, None], persistent=False)

    def forward(
        self,
        streams: Tensor | Streams,
        _: Tensor | None = None,
        *,
        step: LayerStep,
        **_more: object,
    ) -> Streams:
        """Run the layer on embeddings [1, T, dim], or on the streams of the layer before."""
        if self.attention_input is None:
            assert isinstance(streams, Tensor)
            present, blocks = streams, streams.new_zeros(())
            inputs: tuple[Tensor, ...] = (present,)
        else:
            present, blocks = streams
            inputs = self.attention_input(first_of(blocks, self.num_blocks), present)
        return self._run(present, blocks, inputs, step)

    def _run(
        self,
        present: Tensor,
        blocks: Tensor,
        inputs: tuple[Tensor, ...],
        step: LayerStep,
        message: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Streams:
        """Run the branches: attention on mixes of the streams, the MLP on one with a message."""
        dtype = present.dtype
        inputs = inputs * (len(self.input_norms) // len(inputs))
        normed = [norm(x).to(dtype) for norm, x in zip(self.input_norms, inputs, strict=True)]
        attended = self.self_attn(*normed, step=step)
        total = self.post_attention_convolution(attended, step=step).float()
        if self.begins_block:
            blocks = torch.where(self.own_block, present[..., None, :], blocks)
        else:
            total = total + present.float()
            blocks = blocks.view_as(blocks)  # a value of this layer: the next one is alike by that
        [x] = self.mlp_input(first_of(blocks, self.num_blocks), total)
        y = self.mlp(self.post_attention_layernorm(message(x)).to(dtype))
        total = total + self.post_mlp_convolution(y, step=step)
        return total.to(dtype), blocks


def first_of(blocks: Tensor, num_blocks: int) -> Tensor:
    """Leave out streams [1, T, more than B, dim] that stand behind those of blocks."""
    return blocks if blocks.shape[-2] == num_blocks else blocks[..., :num_blocks, :]


def residual_of(module: Any, num_blocks: int, num_known: int) -> BlockResidual:
    """Make the mix of the sums of blocks, the first ``num_known`` of which are complete."""
    query = module.query.detach()
    query = query if query.ndim == 2 else query[None]
    return BlockResidual(parameter(query), num_blocks, num_known, eps=module.norm.eps)


class _FinalInput(nn.Module):
    """The mix of the last layer's streams, in the place of the model's own mix."""

    def __init__(self, residual: BlockResidual) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, _: Tensor, streams: Streams) -> tuple[Tensor, ...]:
        """Mix the streams to [1, T, dim]."""
        present, blocks = streams
        mixed: tuple[Tensor, ...] = self.residual(blocks, present)
        return mixed


@cache
def text_class_of(theirs: Any) -> type[nn.Module]:
    """Derive the text model's class that takes weights by names of multimodal checkpoints too."""
    from transformers.core_model_loading import WeightRenaming

    class Text(TextModel, theirs):  # type: ignore[misc]
        __module__ = theirs.__module__  # where transformers looks up what its experts can do

        @staticmethod
        def _load_pretrained_model(
            model: Any, tensors: Any, files: Any, load_config: Any, *options: Any
        ) -> Any:
            if scales := [name for name in tensors if _SCALES.search(name)]:
                raise UnsupportedError(
                    f"experts in NVFP4 or MXFP8 are not read, got {scales[0]}: transformers loads "
                    "them as floats, and its save_pretrained writes those"
                )
            head = WeightRenaming(r"^model\.unembed\.", "lm_head.")
            load_config.weight_mapping.insert(0, head)
            return theirs._load_pretrained_model(model, tensors, files, load_config, *options)

    Text.__name__ = theirs.__name__
    return Text


def decoder_layers(model: Any, looped: range = range(0)) -> list[DecoderLayer]:
    """Make layers of ours around the modules of a model's, each once."""
    blocks_of = model.config.n_layers_per_attn_res_block
    num_blocks = -(-len(model.layers) // blocks_of)
    made = []
    for number, layer in enumerate(model.layers):
        dtype = layer.self_attn.sink_proj.weight.dtype
        for part in layer.modules():
            if isinstance(part, nn.Conv1d):  # which transformers keeps in float32
                part.weight = parameter(part.weight.detach().to(dtype))
        gate = layer.mlp.gate  # which transformers multiplies in float32
        gate.weight = parameter(gate.weight.detach().float())
        made.append(DecoderLayer(layer, number, blocks_of, num_blocks, looped))
    return made


class Inkling2Family(Family):
    model_types = ("inkling2", "inkling2_text")
    swaps: ClassVar = {
        "paged_attention": Swap(
            attribute="self_attn", make=sink_attention, adapter=AttentionAdapter
        ),
        "branch_convolution": Swap(
            attribute="post_mlp_convolution",
            make=lambda module, spec: _branch_convolution(module, "feed_forward"),
        ),
    }
    hf_taken_modules: tuple[str, ...] = (
        ".post_attention_convolution",
        ".attention_input",
        ".mlp_input",
        ".final_input",
    )

    def specs(self, config: Any) -> list[tuple[LayerSpec, ...]]:
        # Fields of Inkling that transformers does not read for Inkling-2.
        require_fields(
            config, hidden_act="silu", n_shared_experts=0, logits_mup_width_multiplier=1.0
        )
        for mlp_type in config.to_dict().get("mlp_layer_types") or ():
            require(config, "mlp_layer_types", mlp_type, ["sparse"])
        for name in ("mlp_gate_softcap", "mlp_up_softcap", "n_layers_per_attn_res_block"):
            if getattr(config, name) <= 0:
                raise UnsupportedError(
                    f"{config.model_type}: config field {name} must be positive, "
                    f"got {getattr(config, name)}"
                )
        return layer_specs(config, scale=lambda head_dim: head_dim**-0.5, sinks=True)

    def backbone(self, model: Any) -> Backbone | None:
        """Put layers of ours around the modules of the model's."""
        layers = decoder_layers(model)
        model.layers = nn.ModuleList(layers)
        num_blocks = layers[0].num_blocks
        model.final_input = _FinalInput(residual_of(model.final_input, num_blocks, num_blocks))
        return None

    def experts(self, module: Any) -> FusedExperts:
        activation = module.act_fn
        softcaps = activation.gate_softcap.softcap, activation.up_softcap.softcap
        return FusedExperts(module.gate_up_proj, module.down_proj, softcaps=softcaps)

    def logits(self, config: Any) -> Logits:
        return Logits(vocab_size=config.unpadded_vocab_size, softcap=config.final_logit_softcapping)

    def text_class(self) -> type[nn.Module]:
        from transformers import Inkling2ForCausalLM

        return text_class_of(Inkling2ForCausalLM)
