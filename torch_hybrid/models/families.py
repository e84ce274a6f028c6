"""The families of models that are served, by the model types of their configs."""

from __future__ import annotations

from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.bailing_hybrid import BailingHybridFamily
from torch_hybrid.models.bamba import BambaFamily
from torch_hybrid.models.deepseek_v3 import DeepseekV3Family
from torch_hybrid.models.falcon_h1 import FalconH1Family
from torch_hybrid.models.family import Family
from torch_hybrid.models.glm5_next import Glm5NextFamily
from torch_hybrid.models.granitemoehybrid import GraniteMoeHybridFamily
from torch_hybrid.models.inkling import InklingFamily
from torch_hybrid.models.inkling2 import Inkling2Family
from torch_hybrid.models.jamba import JambaFamily
from torch_hybrid.models.kimi_linear import KimiLinearFamily
from torch_hybrid.models.lfm import Lfm2Family, Lfm3Family
from torch_hybrid.models.mamba import MambaFamily
from torch_hybrid.models.mamba2 import Mamba2Family
from torch_hybrid.models.minimax import MiniMaxFamily
from torch_hybrid.models.nemotron_h import NemotronHFamily
from torch_hybrid.models.olmo_hybrid import OlmoHybridFamily
from torch_hybrid.models.qwen3 import Qwen3Family
from torch_hybrid.models.qwen3_5 import Qwen35Family
from torch_hybrid.models.qwen3_next import Qwen3NextFamily
from torch_hybrid.models.qwen4_exp import Qwen4ExpFamily
from torch_hybrid.models.recurrent_gemma import RecurrentGemmaFamily
from torch_hybrid.models.rwkv import RwkvFamily
from torch_hybrid.models.xlstm import XlstmFamily
from torch_hybrid.models.zamba import ZambaFamily
from torch_hybrid.models.zamba2 import Zamba2Family
from torch_hybrid.models.zaya import ZayaFamily

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        BailingHybridFamily(),
        BambaFamily(),
        DeepseekV3Family(),
        FalconH1Family(),
        Glm5NextFamily(),
        GraniteMoeHybridFamily(),
        InklingFamily(),
        Inkling2Family(),
        JambaFamily(),
        KimiLinearFamily(),
        Lfm2Family(),
        Lfm3Family(),
        MambaFamily(),
        Mamba2Family(),
        MiniMaxFamily(),
        NemotronHFamily(),
        OlmoHybridFamily(),
        Qwen3Family(),
        Qwen35Family(),
        Qwen3NextFamily(),
        Qwen4ExpFamily(),
        RecurrentGemmaFamily(),
        RwkvFamily(),
        XlstmFamily(),
        ZambaFamily(),
        Zamba2Family(),
        ZayaFamily(),
    )
    for model_type in family.model_types
}

# Hybrids that transformers has and this package has no op for.
NOT_SERVED = {
    "nemo_speechlm": "speech to transcribe, of which its text part alone hears nothing",
}


def family_of(model_type: Any) -> Family:
    """Return the family of a model type.

    Raises:
        UnsupportedError: no family that is served has this model type.
    """
    if model_type in NOT_SERVED:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported: it has {NOT_SERVED[model_type]}"
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported; supported are {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def architecture_of(config: Any) -> Architecture:
    """Return the architecture that a transformers config describes.

    Raises:
        UnsupportedError: the model type, or a field of the config, is not known here.
    """
    return Architecture.of(config, family_of(config.model_type))
