"""Token mixers as ordinary modules: ``forward(inputs, plan, cache)``."""

from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.layers.lightning_attention import LightningAttention
from torch_hybrid.layers.mamba import Mamba
from torch_hybrid.layers.mamba2 import Mamba2
from torch_hybrid.layers.mlstm import Mlstm
from torch_hybrid.layers.paged_attention import PagedAttention
from torch_hybrid.layers.rg_lru import RgLru
from torch_hybrid.layers.rwkv import ChannelMix, TimeMix
from torch_hybrid.layers.short_convolution import ShortConvolution

__all__ = [
    "ChannelMix",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LatentAttention",
    "LightningAttention",
    "Mamba",
    "Mamba2",
    "Mlstm",
    "PagedAttention",
    "RgLru",
    "ShortConvolution",
    "TimeMix",
]
