"""Modules of one's own, of mixers of any kinds, and a loop that serves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_hybrid as th
from torch_hybrid.backends.step import LayerStep
from torch_hybrid.layers import (
    ChannelMix,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mlstm,
    PagedAttention,
    RgLru,
    ShortConvolution,
    TimeMix,
)
from torch_hybrid.layers.biased_attention import BiasedAttention, BranchConvolution
from torch_hybrid.layers.convolved_projection import ConvolvedProjection
from torch_hybrid.layers.indexed_attention import IndexedAttention
from torch_hybrid.layers.indexed_latent_attention import IndexedLatentAttention
from torch_hybrid.layers.jet_block import JetBlock
from torch_hybrid.layers.lightning_attention import geometric_slopes
from torch_hybrid.layers.ngram_embedding import NgramEmbedding
from torch_hybrid.layers.rotary import Rotary
from torch_hybrid.layers.sink_attention import SinkAttention
from torch_hybrid.specs import (
    BranchConvolutionSpec,
    ConvolvedProjectionSpec,
    IndexedAttentionSpec,
    IndexedLatentSpec,
    JetBlockSpec,
    LayerSpec,
    NgramSpec,
)

DIM, HEAD, VOCAB = 32, 16, 61
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=HEAD, scale=HEAD**-0.5)
# Called with x [T, DIM], tokens and positions [T], and the layer's step.
Mix = Callable[[Tensor, Tensor, Tensor, LayerStep], Tensor]


class Block(nn.Module):
    """A mixer behind a norm."""

    def __init__(self, specs: tuple[LayerSpec, ...], mix: Mix, *parts: nn.Module) -> None:
        super().__init__()
        self.specs, self.mix, self.parts = specs, mix, nn.ModuleList(parts)
        self.norm = nn.RMSNorm(DIM)

    def forward(self, x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        return x + self.mix(self.norm(x), tokens, positions, step)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 4)


def alone(mixer: Any) -> Block:
    """A mixer that takes x, plan and cache."""

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        return mixer(x, *step.mixer()[1:])

    return Block((mixer.spec,), mix, mixer)


def rotary_of(positions: Tensor, width: int) -> Rotary:
    angles = positions[:, None].float() / torch.arange(1, 1 + width // 2)
    return Rotary(angles.cos(), angles.sin())


def lightning(*, rotates: bool) -> Block:
    spec = th.LightningSpec(num_heads=2, head_dim=HEAD)
    mixer = LightningAttention(DIM, spec, geometric_slopes(2))

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        rotary = rotary_of(positions, HEAD) if rotates else None
        return mixer(x, *step.mixer()[1:], rotary)

    return Block((spec,), mix, mixer)


def paged(window: int = 0) -> Block:
    spec = th.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=HEAD, scale=HEAD**-0.5, window=window
    )
    qkv, mixer, out = linear(DIM, 8 * HEAD), PagedAttention(spec), linear(4 * HEAD, DIM)

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        q, k, v = qkv(x).unflatten(-1, (-1, HEAD)).split([4, 2, 2], dim=1)
        return out(mixer(q, k, v, *step.mixer()[1:]).flatten(1))

    return Block((spec,), mix, qkv, mixer, out)


def latent() -> Block:
    spec = th.LatentSpec(
        num_heads=2, latent_rank=32, nope_dim=HEAD, rope_dim=8, v_dim=HEAD, scale=0.2
    )
    q, row, out = linear(DIM, 2 * 24), linear(DIM, 40), linear(2 * HEAD, DIM)
    mixer = LatentAttention(spec, linear(32, 2 * 32))

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        rows = row(x).split([32, 8], dim=-1)
        return out(mixer(q(x).unflatten(-1, (2, 24)), *rows, *step.mixer()[1:]).flatten(1))

    return Block((spec,), mix, q, row, out, mixer)


def convolved_projection() -> Block:
    projection = ConvolvedProjectionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=HEAD, channel_width=2, head_width=2
    )
    mixer, attention = ConvolvedProjection(DIM, projection), PagedAttention(FULL)
    out = linear(4 * HEAD, DIM)

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        qkv = mixer(x, *step.mixer(projection.kind)[1:])
        return out(attention(*qkv, *step.mixer(FULL.kind)[1:]).flatten(1))

    return Block((projection, FULL), mix, mixer, attention, out)


def branches(attention: type[BiasedAttention] | type[SinkAttention]) -> Block:
    """Attention with biases by distance, whose keys and values and output are convolved."""
    spec = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=HEAD, scale=0.25, reach=12)
    conv = BranchConvolutionSpec(num_kv_heads=2, head_dim=HEAD, channels=DIM, conv_width=4)
    shared: dict[str, Any] = {
        "o_proj": linear(4 * HEAD, DIM),
        "conv_weight": parameter(4 * HEAD, 4),
        "profiles": parameter(12, 3),
        "log_floor": 8,
        "log_alpha": 0.1,
    }
    if attention is BiasedAttention:
        norms = {"q_norm": nn.RMSNorm(HEAD), "k_norm": nn.RMSNorm(HEAD)}
        mixer = BiasedAttention(spec, in_proj=linear(DIM, 8 * HEAD + 12), **norms, **shared)
    else:
        scales = {"q_scale": parameter(4, HEAD), "mix_scale": parameter(4, 3)}
        clips = {"qk_clip": 4.0, "mix_clip": 2.0, "norm_eps": 1e-6}
        in_proj = linear(DIM, 4 * (HEAD + 3 + HEAD + 1) + 4 * HEAD)
        mixer = SinkAttention(spec, in_proj=in_proj, **scales, **clips, **shared)
    branch = BranchConvolution(parameter(DIM, 4), "attention")

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        convolution = step.mixer(conv.kind)[1:]
        return branch(mixer(x, *step.mixer(spec.kind)[1:], *convolution), *convolution)

    return Block((spec, conv), mix, mixer, branch)


def indexed() -> Block:
    spec = IndexedAttentionSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=HEAD,
        scale=0.25,
        num_index_heads=2,
        index_dim=HEAD,
        rope_dim=8,
        block_size=4,
        top_k=2,
    )
    mixer = IndexedAttention(
        spec,
        q_proj=linear(DIM, 8 * HEAD),
        k_proj=linear(DIM, 2 * HEAD),
        v_proj=linear(DIM, 2 * HEAD),
        o_proj=linear(4 * HEAD, DIM),
        q_norm=nn.RMSNorm(HEAD),
        k_norm=nn.RMSNorm(HEAD),
        index_proj=linear(DIM, 3 * HEAD),
        index_q_norm=nn.RMSNorm(HEAD),
        index_k_norm=nn.RMSNorm(HEAD),
    )

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        return mixer(x, rotary_of(positions, 8), *step.mixer()[1:])

    return Block((spec,), mix, mixer)


def indexed_latent() -> Block:
    spec = IndexedLatentSpec(
        num_heads=2,
        latent_rank=32,
        nope_dim=HEAD,
        v_dim=HEAD,
        scale=0.25,
        num_index_heads=2,
        index_dim=HEAD,
        block_size=4,
        top_k=2,
    )
    return alone(
        IndexedLatentAttention(
            spec,
            q_a_proj=linear(DIM, 24),
            q_a_norm=nn.RMSNorm(24),
            q_b_proj=linear(24, 2 * HEAD),
            kv_a_proj=linear(DIM, 32),
            kv_a_norm=nn.RMSNorm(32),
            kv_b_proj=linear(32, 4 * HEAD),
            o_proj=linear(2 * HEAD, DIM),
            index_q_proj=linear(24, 2 * HEAD),
            index_k_proj=linear(DIM, HEAD),
            index_k_norm=nn.RMSNorm(HEAD),
            index_gate_proj=linear(DIM, HEAD),
            index_head_proj=linear(DIM, 2),
            gate_bias=parameter(4, HEAD),
        )
    )


def ngram() -> Block:
    spec = NgramSpec(ngram_size=3, channels=DIM, conv_width=4)
    sizes = torch.tensor([31, 37, 41, 43])
    mixer = NgramEmbedding(
        spec,
        table=parameter(int(sizes.sum()), 8),
        multipliers=torch.tensor([3, 5, 7]),
        head_sizes=sizes,
        head_offsets=sizes.cumsum(0) - sizes,
        eos=1,
        key_proj=linear(32, DIM),
        value_proj=linear(32, DIM),
        key_norm=nn.RMSNorm(DIM),
        stream_norm=nn.RMSNorm(DIM),
        conv_norm=nn.RMSNorm(DIM),
        conv_weight=parameter(DIM, 4),
    )

    def mix(x: Tensor, tokens: Tensor, positions: Tensor, step: LayerStep) -> Tensor:
        return mixer(x, tokens, *step.mixer()[1:])

    return Block((spec,), mix, mixer)


def channel_mix() -> Block:
    return alone(ChannelMix(th.ChannelMixSpec(dim=DIM, width=48)))


def jet_block() -> Block:
    spec = JetBlockSpec(num_heads=2, head_k_dim=HEAD, head_v_dim=24, conv_width=4, filter_rank=6)
    return alone(JetBlock(DIM, spec))


BLOCKS: dict[str, Callable[[], Block]] = {
    "jet_block": jet_block,
    "paged_attention": paged,
    "sliding_window": partial(paged, window=9),
    "latent_attention": latent,
    "indexed_attention": indexed,
    "indexed_latent_attention": indexed_latent,
    "biased_attention": partial(branches, BiasedAttention),
    "sink_attention": partial(branches, SinkAttention),
    "convolved_projection": convolved_projection,
    "gated_delta_rule": lambda: alone(
        GatedDeltaNet(
            DIM,
            th.DeltaRuleSpec(
                num_k_heads=2, num_v_heads=4, head_k_dim=HEAD, head_v_dim=HEAD, conv_width=4
            ),
        )
    ),
    "kimi_delta_attention": lambda: alone(
        KimiDeltaAttention(
            DIM, th.KimiDeltaSpec(num_heads=2, head_k_dim=HEAD, head_v_dim=HEAD, conv_width=4)
        )
    ),
    "mamba2": lambda: alone(
        Mamba2(
            DIM,
            th.Mamba2Spec(num_heads=4, head_dim=HEAD, state_dim=HEAD, num_groups=2, conv_width=4),
        )
    ),
    "mamba": lambda: alone(
        Mamba(DIM, th.MambaSpec(channels=48, state_dim=8, dt_rank=4, conv_width=4))
    ),
    "lightning_attention": partial(lightning, rotates=False),
    "lightning_attention_rotated": partial(lightning, rotates=True),
    "mlstm": lambda: alone(
        Mlstm(DIM, th.MlstmSpec(num_heads=2, head_k_dim=HEAD, head_v_dim=24, gate_softcap=15.0))
    ),
    "short_convolution": lambda: alone(
        ShortConvolution(DIM, th.ShortConvolutionSpec(channels=40, conv_width=3))
    ),
    "rg_lru": lambda: alone(RgLru(DIM, th.RgLruSpec(num_heads=2, head_dim=20, conv_width=4))),
    "time_mix": lambda: alone(TimeMix(th.TimeMixSpec(dim=DIM, channels=24))),
    "channel_mix": channel_mix,
    "ngram_embedding": ngram,
}


class OwnModule(nn.Module):
    """A language model of these blocks, that a user would write."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in names)
        self.table = th.LayerTable.from_specs([block.specs for block in self.blocks])
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor, step: th.Step) -> Tensor:
        """[T, VOCAB]."""
        x = self.embed(tokens)
        for layer_id, block in enumerate(self.blocks):
            x = block(x, tokens, positions, step.at(layer_id))
        return self.head(F.rms_norm(x, (DIM,)))


class Loop:
    """Sequences of a module of one's own, and steps of them.

    Args:
        module: whose layers are served.
        buckets: as of ``HybridCache.make_batch``.
        options: of ``th.Backends``; without any, what ``make_backends`` takes by default.
    """

    def __init__(
        self, module: OwnModule, buckets: Sequence[int] | None = None, **options: Any
    ) -> None:
        self.table, self.buckets = module.table, buckets
        self.cache = th.HybridCache(self.table, max_seqs=20, kv_tokens=2048, page_size=16)
        names = th.Backends(**options) if options else None
        self.backends = th.make_backends(self.table, self.cache.sizes, names)

    def arguments(
        self, seqs: Sequence[th.Sequence], tokens: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor, th.Step]:
        """Make what the module is called with."""
        mode = th.Mode.DECODE if max(map(len, tokens)) <= 1 else th.Mode.EXTEND
        options = {} if self.buckets is None else {"buckets": self.buckets}
        batch = self.cache.make_batch(seqs, tokens, **options)
        plans = th.plan_all(self.backends, batch, mode)
        step = th.Step(plans=plans, caches=self.cache.pools, table=self.table)
        return batch.tokens, batch.positions, step

    def run(
        self, call: Any, seqs: Sequence[th.Sequence], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the logits of the new tokens, [T, VOCAB]; the sequences hold them then."""
        lengths = [len(new) for new in tokens]
        with torch.inference_mode():
            logits = call(*self.arguments(seqs, tokens))[: sum(lengths)].clone()
        self.cache.commit(seqs, lengths)
        return logits
