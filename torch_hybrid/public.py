"""All names of ``import torch_hybrid``; loading them registers the ops with torch."""

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.prefix import PrefixPolicy
from torch_hybrid.backends.select import Backends, select
from torch_hybrid.backends.step import Step, make_backends, plan_all
from torch_hybrid.batch import Batch, make_batch
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.caches.snapshot import Snapshot
from torch_hybrid.errors import CapacityError, PromptTooLongError, UnsupportedError
from torch_hybrid.graphs.agreement import Agreement
from torch_hybrid.graphs.kv_scales import kv_scales
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.stepping.embeds import Embeds
from torch_hybrid.models.adapt import adapt
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.load import from_pretrained
from torch_hybrid.models.quantize import quantize
from torch_hybrid.models.shard import shard
from torch_hybrid.packing import Packing
from torch_hybrid.sampling import Grammar, Sampling, TokenLogprob, token_logprobs
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.prefix_cache import PrefixCache, PrefixStats
from torch_hybrid.serving.request import Output, Request, TokenEvent
from torch_hybrid.serving.speculation import DraftCounts, Drafter, Ngram, Speculation
from torch_hybrid.serving.stats import EngineStats
from torch_hybrid.specs import (
    AttentionSpec,
    ChannelMixSpec,
    DeltaRuleSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerTable,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MlstmSpec,
    RgLruSpec,
    ShortConvolutionSpec,
    TimeMixSpec,
)
from torch_hybrid.training.make_trainable import make_trainable

__all__ = [
    "Agreement",
    "AttentionSpec",
    "Backends",
    "Batch",
    "CapacityError",
    "ChannelMixSpec",
    "DeltaRuleSpec",
    "DraftCounts",
    "Drafter",
    "Embeds",
    "Engine",
    "EngineStats",
    "Grammar",
    "HybridCache",
    "HybridModel",
    "KimiDeltaSpec",
    "LatentSpec",
    "LayerTable",
    "LightningSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MlstmSpec",
    "Mode",
    "Ngram",
    "Output",
    "Packing",
    "PrefixCache",
    "PrefixPolicy",
    "PrefixStats",
    "PromptTooLongError",
    "Report",
    "Request",
    "RgLruSpec",
    "Runner",
    "Sampling",
    "Sequence",
    "ShortConvolutionSpec",
    "Snapshot",
    "Speculation",
    "Step",
    "TimeMixSpec",
    "TokenEvent",
    "TokenLogprob",
    "UnsupportedError",
    "adapt",
    "from_pretrained",
    "kv_scales",
    "make_backends",
    "make_batch",
    "make_trainable",
    "plan_all",
    "quantize",
    "select",
    "shard",
    "token_logprobs",
]
