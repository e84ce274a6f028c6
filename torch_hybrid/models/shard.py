"""Tensor parallelism: a model of which each rank holds some heads and a part of every MLP.

Cuts, by the names that transformers gives to projections:

    attention, MLA    q, k, v: rows by head (of MLA: the queries' and ``kv_b_proj``'s; latents are
                      whole on every rank); o: columns, and a sum over the ranks
    our own mixers    as their ``shard`` says: each of the blocks of a projection on its own
    MLP               gate and up: rows; down: columns
    experts           the same in every expert, or whole experts (``experts="all_to_all"``)
    low-rank adapters their second factor, as the rows of the layer that they adapt
    embedding, head   consecutive rows of the vocabulary; whole where the ranks do not divide it
    norms, routers, embeddings of n-grams, and modules that mix residual streams or messages,
                      convolve branches, or carry a block's output into another: whole on every rank

A feed-forward layer has one all-reduce, at its end: of the sum of shared and routed experts. What
several decoder layers share is cut once, and stays shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.memory import keep_weights
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.layers.expert_parallel import ExpertParallel, TokensOfRank
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.layers.vocabulary import EmbeddingOverRanks, HeadOverRanks
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.ranks import OwnColumns, Ranks, RMSNormOverRanks, SumOverRanks, divide
from torch_hybrid.specs import AttentionSpec, LatentSpec, LayerEntry, PreviousHiddenSpec

Experts = Literal["tensor", "all_to_all"]
Cut = Callable[[Any], nn.Module]  # a module to this rank's part of it
Done = dict[nn.Module, nn.Module]  # the part of each module: several layers may share one
Part = tuple[nn.Module, str]  # a module, and the name of a child
# Children of a decoder layer that every rank has whole. They mix the residual streams or messages,
# convolve the output of attention, or carry the output of a shared block to the next mixer.
_WHOLE_CHILDREN = frozenset(
    {"attn_hyper_connection", "mlp_hyper_connection", "attn_hc", "ffn_hc", "attn_sconv", "linear"}
    | {"attention_input", "mlp_input", "post_attention_convolution", "message_gates", "messages"}
)
# Children of a decoder layer that hold its mixers and MLPs.
_HOLDERS = frozenset({"mamba_decoder", "shared_transformer", "shared_transf"})


@in_isolation
def shard(
    model: HybridModel, group: dist.ProcessGroup | None = None, *, experts: Experts = "tensor"
) -> HybridModel:
    """Keep this rank's part of a model, which the ranks of a group then run together.

    Every rank calls ``shard`` on a model of its own, with the same weights. Afterwards all ranks
    make the same calls with the same batches, which ``Agreement`` checks. Logits are the same on
    every rank.

    Args:
        model: from ``from_pretrained`` or ``adapt``. It is changed, and unusable after an error.
        group: process group of the ranks; by default all of ``torch.distributed``.
        experts: "tensor" cuts every expert of a mixture; "all_to_all" gives each rank whole
            experts, to which the ranks send their tokens.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the number of ranks does not divide heads or widths, or a module has
            weights and no known cut.
        ValueError: ``experts`` is another word, the model was sharded before, or
            ``torch.distributed`` is not initialised.
    """
    check_can_be_cut(model, experts)
    cut(model, ranks_of(group), experts)
    keep_weights(model)
    return model


def check_can_be_cut(model: HybridModel, experts: str) -> None:
    """Raise ValueError or UnsupportedError, as ``shard`` does, whatever the ranks are."""
    if experts not in ("tensor", "all_to_all"):
        raise ValueError(f"experts must be 'tensor' or 'all_to_all', got {experts!r}")
    if model.ranks is not None:
        raise ValueError(f"the model was sharded before, for {model.ranks.size} ranks")
    if any(map(_has_scales, model.modules())):
        raise UnsupportedError(
            "cannot shard weights with scales in memory: from_pretrained(path, ranks=group) cuts "
            "them as it reads them"
        )


def _has_scales(module: nn.Module) -> bool:
    is_scaled = isinstance(module, FusedExperts) and module.down_scales is not None
    return is_scaled or isinstance(module, ScaledLinear)


def cut(model: HybridModel, ranks: Ranks, experts: Experts) -> None:
    """Keep the part of one rank of a model, whose weights may be unread.

    Raises:
        UnsupportedError: as ``shard`` does.
    """
    table = model.table.divided(ranks.size)  # refuses before anything is changed
    done: Done = {}
    feed_forward = _feed_forward_cuts(ranks, experts, done)
    for layer, entries in zip(model.all_layers, model.table.layers, strict=True):
        parts = list(_parts(layer))
        for entry in entries:
            if entry.kind == PreviousHiddenSpec.kind:
                continue  # no module of the layer
            part = _mixer_of(parts, model.mixer_names.get(entry.kind))
            if part is None:
                continue
            parts.remove(part)
            holder, name = part
            mixer: Any = holder.get_submodule(name)
            if mixer not in done:
                if entry.kind in model.mixer_names:
                    done[mixer] = mixer.shard(ranks)
                else:
                    _shard_attention(mixer, entry, ranks, done)
                    done[mixer] = mixer
            setattr(holder, name, done[mixer])
        for holder, name in parts:
            if name not in _WHOLE_CHILDREN:
                _shard_feed_forward(holder, name, feed_forward, ranks, done)
    _shard_vocabulary(model, ranks)
    model.table, model.ranks = table, ranks


def _shard_vocabulary(model: HybridModel, ranks: Ranks) -> None:
    """Cut the embedding and the head, which may be one weight, unless they are more than that."""
    embedding: Any = model.embedding
    head: Any = model.head
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return
    if {embedding.num_embeddings, head.out_features} != {model.vocab_size}:
        return
    if model.vocab_size % ranks.size:
        return
    is_tied = head.weight is embedding.weight
    own_head = ranks.rows(head, [(model.vocab_size, 1)])
    weight = own_head.weight
    if not is_tied:
        weight = ranks.parameter(embedding.weight, [(model.vocab_size, 1)])
    num_rows, width = weight.shape
    own_embedding = nn.Embedding(num_rows, width, dtype=weight.dtype, device="meta")
    own_embedding.weight = weight
    model.replace_vocabulary(
        EmbeddingOverRanks(own_embedding, num_rows, ranks), HeadOverRanks(own_head, ranks)
    )


def _parts(layer: nn.Module) -> Iterator[Part]:
    """Visit the children of a decoder layer; those in ``_HOLDERS`` give their own children."""
    for name, child in layer.named_children():
        if name in _HOLDERS:
            yield from _parts(child)
        else:
            yield layer, name


def _mixer_of(parts: list[Part], attribute: str | None) -> Part | None:
    """Find the mixer of this name, or attention without a name.

    None where the mixer is a child of attention, and is cut with that."""
    if attribute is not None:
        found = next((part for part in parts if part[1] == attribute), None)
        children = (holder.get_submodule(name)._modules for holder, name in parts)
        assert found or any(attribute in own for own in children)
        return found
    return next(
        (holder, name)
        for holder, name in parts
        if {"o_proj", "out_proj"} & holder.get_submodule(name)._modules.keys()
    )


def _shard_attention(module: Any, entry: LayerEntry, ranks: Ranks, done: Done) -> None:
    match entry.spec:
        case AttentionSpec() as spec:
            _cut_children(module, _attention_cuts(spec, ranks), done)
        case LatentSpec() as latent:
            _cut_children(module, _latent_cuts(module, latent, ranks), done)


def _shard_feed_forward(
    layer: nn.Module, name: str, cuts: Mapping[str, Cut], ranks: Ranks, done: Done
) -> None:
    """Cut one child of a decoder layer that is no mixer; norms stay whole."""
    child = layer.get_submodule(name)
    if child in done:
        setattr(layer, name, done[child])
    elif any(part in cuts for part, _ in child.named_children()):
        _cut_children(child, cuts, done)
        done[child] = SumOverRanks(child, ranks)
        setattr(layer, name, done[child])
    elif any(weight.ndim > 1 for weight in child.parameters()):
        raise UnsupportedError(
            f"cannot shard {type(layer).__name__}: nothing is known of its {name!r}"
        )


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the rank of this process among those of a group; by default, of all processes.

    Raises:
        ValueError: ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised before a model is sharded")
    group = group or dist.group.WORLD
    assert group is not None
    return Ranks(rank=dist.get_rank(group), size=group.size(), group_name=group.group_name)


def _cut_children(module: nn.Module, cuts: Mapping[str, Cut], done: Done) -> None:
    """Put this rank's part in the place of each child.

    Raises:
        UnsupportedError: a child has weights, and no cut.
    """
    for name, child in list(module.named_children()):
        if not list(child.parameters()):
            continue
        if name in cuts:
            if child not in done:
                done[child] = cuts[name](child)
            setattr(module, name, done[child])
        else:
            raise UnsupportedError(
                f"cannot shard {type(module).__name__}: nothing is known of its {name!r}"
            )


def _whole(module: nn.Module) -> nn.Module:
    return module


def _in_adapters(rows: Cut) -> Cut:
    """Make the cut of low-rank adapters from that of the layer that they adapt, by rows."""

    def cut(adapters: nn.ModuleList) -> nn.Module:
        for adapter in adapters:
            assert isinstance(adapter, nn.Sequential)
            adapter[1] = rows(adapter[1])
        return adapters

    return cut


def _attention_cuts(spec: AttentionSpec, ranks: Ranks) -> Mapping[str, Cut]:
    def rows(num_heads: int) -> Cut:
        return lambda linear: ranks.rows(linear, [(num_heads, linear.out_features // num_heads)])

    def out(linear: nn.Linear) -> nn.Module:
        return ranks.summed_columns(linear, spec.num_q_heads)

    def norm(num_heads: int) -> Cut:
        """Make the cut of a norm over each head by itself, or over all heads together (OLMo)."""

        def cut(norm: Any) -> nn.Module:
            width = norm.weight.numel()
            if width == spec.head_dim:
                return _whole(norm)
            weight = ranks.parameter(norm.weight, [(num_heads, width // num_heads)])
            return RMSNormOverRanks(weight, norm.variance_epsilon, ranks)

        return cut

    def scales_of_keys(norm: Any) -> nn.Module:
        norm.temp = ranks.parameter(norm.temp, [(spec.num_kv_heads, 1)])
        return _whole(norm)

    return {
        "q_proj": rows(spec.num_q_heads),
        "k_proj": rows(spec.num_kv_heads),
        "v_proj": rows(spec.num_kv_heads),
        "q_norm": norm(spec.num_q_heads),
        "k_norm": norm(spec.num_kv_heads),
        "q_layernorm": norm(spec.num_q_heads),
        "k_layernorm": norm(spec.num_kv_heads),
        "qkv_proj": lambda projection: projection.shard(ranks),
        "qk_norm": scales_of_keys,
        "g_proj": rows(spec.num_q_heads),
        "o_proj": out,
        "out_proj": out,
        "linear_q_adapter_list": _in_adapters(rows(spec.num_q_heads)),
        "linear_k_adapter_list": _in_adapters(rows(spec.num_kv_heads)),
        "linear_v_adapter_list": _in_adapters(rows(spec.num_kv_heads)),
    }


def _latent_cuts(module: Any, spec: LatentSpec, ranks: Ranks) -> Mapping[str, Cut]:
    latent_attention = module.latent_attention.shard(ranks)

    def rows(linear: nn.Linear) -> nn.Module:
        return ranks.rows(linear, [(spec.num_heads, linear.out_features // spec.num_heads)])

    return {
        "q_proj": rows,
        "q_a_proj": _whole,
        "q_a_layernorm": _whole,
        "q_b_proj": rows,
        "kv_a_proj_with_mqa": _whole,
        "kv_a_layernorm": _whole,
        "kv_b_proj": lambda _: latent_attention.kv_b_proj,
        "latent_attention": lambda _: latent_attention,
        "g_proj": rows,
        "o_proj": lambda linear: ranks.summed_columns(linear, spec.num_heads),
    }


def _feed_forward_cuts(ranks: Ranks, experts: Experts, done: Done) -> Mapping[str, Cut]:
    """Define the cuts of MLPs and mixtures of experts; the ranks' outputs are to be summed."""

    def rows(linear: nn.Linear, num_blocks: int = 1) -> nn.Module:
        width = linear.out_features // num_blocks
        divide("the width of an MLP", width, ranks.size)
        return ranks.rows(linear, [(width, 1)] * num_blocks)

    def columns(linear: nn.Linear) -> nn.Module:
        return ranks.columns(linear, linear.in_features)

    def inside(module: nn.Module) -> nn.Module:
        _cut_children(module, cuts, done)
        return module

    def whole_experts(module: Any) -> nn.Module:
        return TokensOfRank(ExpertParallel(module, ranks))

    def gate_and_up(linear: nn.Linear) -> nn.Module:
        return rows(linear, num_blocks=2)

    cuts: dict[str, Cut] = {
        "w1": rows,
        "w3": rows,
        "w2": columns,
        "gate_proj": rows,
        "up_proj": rows,
        "down_proj": columns,
        "gate_up_proj": gate_and_up,
        "gate_up_proj_adapter_list": _in_adapters(gate_and_up),
        "input_linear": gate_and_up,
        "output_linear": columns,
        "experts": whole_experts if experts == "all_to_all" else lambda own: own.shard(ranks),
        "shared_expert": inside,
        "shared_experts": inside,
        "shared_expert_gate": _whole,
        "gate": _whole,
        "router": _whole,
        "routed_expert_down_proj": _whole,
        "routed_expert_norm": lambda norm: nn.Sequential(SumOverRanks(nn.Identity(), ranks), norm),
        "routed_expert_up_proj": lambda linear: OwnColumns(
            ranks.columns(linear, linear.in_features), ranks
        ),
        "fc1_latent_proj": _whole,
        "fc2_latent_proj": ranks.count_bias_once,
    }
    return cuts
