"""Mixers of transformers that train: boundaries of packed sequences, and differentiable ops."""

from __future__ import annotations

from torch_hybrid.training.mixers.delta_rules import (
    GatedDeltaNet,
    JointGatedDeltaNet,
    KimiDeltaAttention,
    LowRankGateKimiDeltaAttention,
    SeparateGatedDeltaNet,
)
from torch_hybrid.training.mixers.indexed_attention import (
    IndexedAttention,
    IndexedLatentAttention,
)
from torch_hybrid.training.mixers.inkling import (
    AddedConvolution,
    BiasedAttention,
    DynamicSinkAttention,
    ScaledConvolution,
    SeeingModel,
    SeparateSinkAttention,
    SharedExperts,
    SinkAttention,
)
from torch_hybrid.training.mixers.lightning import LightningAttention
from torch_hybrid.training.mixers.mamba import Mamba, NormedMamba, ZambaMamba
from torch_hybrid.training.mixers.mamba2 import FalconH1Mamba2, Mamba2
from torch_hybrid.training.mixers.ngrams import GatedNgrams, LayerWithNgrams, NgramEmbedding
from torch_hybrid.training.mixers.rg_lru import RecurrentBlock
from torch_hybrid.training.mixers.rwkv import ChannelMix, TimeMix
from torch_hybrid.training.mixers.short_conv import ShortConv
from torch_hybrid.training.mixers.twin import KnowsPackings, Twin
from torch_hybrid.training.mixers.xlstm import Mlstm, XlstmDecoder
from torch_hybrid.training.mixers.zaya import ConvolvedProjection

__all__ = ["TWINS", "Twin"]

# By the class names of transformers' mixers, and of decoders that hand nothing to theirs.
TWINS: dict[str, type[Twin]] = {
    "Qwen3NextGatedDeltaNet": JointGatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "LaraMiniGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextGatedDeltaNet": GatedDeltaNet,
    "Qwen4ExpTextAttention": IndexedAttention,
    "Qwen4ExpTextDecoderLayer": LayerWithNgrams,
    "Qwen4ExpTextPLELayer": GatedNgrams,
    "Qwen4ExpTextNGramEmbedding": NgramEmbedding,
    "OlmoHybridGatedDeltaNet": SeparateGatedDeltaNet,
    "KimiLinearDeltaAttention": LowRankGateKimiDeltaAttention,
    "Glm5NextTextLinearAttention": LowRankGateKimiDeltaAttention,
    "Glm5NextTextAttention": IndexedLatentAttention,
    "BailingHybridDeltaAttention": KimiDeltaAttention,
    "MambaMixer": Mamba,
    "FalconMambaMixer": NormedMamba,
    "JambaMambaMixer": NormedMamba,
    "ZambaMambaMixer": ZambaMamba,
    "Mamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Zamba2MambaMixer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "RecurrentGemmaRecurrentBlock": RecurrentBlock,
    "MiniMaxLightningAttention": LightningAttention,
    "InklingAttention": BiasedAttention,
    "InklingShortConvolution": AddedConvolution,
    "InklingSharedExperts": SharedExperts,
    "InklingModel": SeeingModel,
    "Inkling2SlidingAttention": SinkAttention,
    "Inkling2FullAttention": DynamicSinkAttention,
    "Inkling2ShortConvolution": ScaledConvolution,
    "Inkling2LoopSlidingAttention": SeparateSinkAttention,
    "Inkling2LoopFullAttention": DynamicSinkAttention,
    "Inkling2LoopShortConvolution": ScaledConvolution,
    "xLSTMModel": XlstmDecoder,
    "xLSTMLayer": Mlstm,
    "RwkvSelfAttention": TimeMix,
    "RwkvFeedForward": ChannelMix,
    "ZayaCCAProjection": ConvolvedProjection,
    "JetBlock": KnowsPackings,
    "KimiK3DeltaAttention": KnowsPackings,
    "BailingMoeV2_5LinearAttention": KnowsPackings,
    "BailingMoeV2_5Attention": KnowsPackings,
}
