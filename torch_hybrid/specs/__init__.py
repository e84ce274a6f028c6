"""Specs: frozen facts about a model's layers, and the table that dispatch uses.

    layer                 the protocol of all specs
    pools                 tensors that a layer keeps between steps
    full_attention        attention by keys and values, or by latents
    indexed_attention     attention to blocks that an indexer selects
    delta_rules           recurrences with convolutions: gated delta rule, Kimi's, Jet-Nemotron's
    state_spaces          Mamba2, Mamba
    linear_recurrences    lightning attention, gated linear recurrent units, mLSTM, RWKV's mixers
    convolutions          short convolutions, those of projections and branches
    past_tokens           n-grams, and hidden states for a head that drafts
    table                 the mixers of each layer, and the indices of their pools

A layer's spec is a frozen value in the file of its kind.
"""

from torch_hybrid.specs.convolutions import (
    BranchConvolutionSpec,
    ConvolvedProjectionSpec,
    ShortConvolutionSpec,
)
from torch_hybrid.specs.delta_rules import DeltaRuleSpec, JetBlockSpec, KimiDeltaSpec
from torch_hybrid.specs.full_attention import AttentionSpec, LatentSpec
from torch_hybrid.specs.indexed_attention import IndexedAttentionSpec, IndexedLatentSpec
from torch_hybrid.specs.layer import LayerFamily, LayerSpec
from torch_hybrid.specs.linear_recurrences import (
    MOST_GATE_SOFTCAP,
    ChannelMixSpec,
    LightningSpec,
    MlstmSpec,
    RgLruSpec,
    TimeMixSpec,
)
from torch_hybrid.specs.past_tokens import KEPT_HIDDEN, NgramSpec, PreviousHiddenSpec
from torch_hybrid.specs.pools import RECORDS, SCALES, STATE_RECORDS, Pool
from torch_hybrid.specs.state_spaces import Mamba2Spec, MambaSpec
from torch_hybrid.specs.table import LayerEntry, LayerTable

__all__ = [
    "KEPT_HIDDEN",
    "MOST_GATE_SOFTCAP",
    "RECORDS",
    "SCALES",
    "STATE_RECORDS",
    "AttentionSpec",
    "BranchConvolutionSpec",
    "ChannelMixSpec",
    "ConvolvedProjectionSpec",
    "DeltaRuleSpec",
    "IndexedAttentionSpec",
    "IndexedLatentSpec",
    "JetBlockSpec",
    "KimiDeltaSpec",
    "LatentSpec",
    "LayerEntry",
    "LayerFamily",
    "LayerSpec",
    "LayerTable",
    "LightningSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MlstmSpec",
    "NgramSpec",
    "Pool",
    "PreviousHiddenSpec",
    "RgLruSpec",
    "ShortConvolutionSpec",
    "TimeMixSpec",
]
