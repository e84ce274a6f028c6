"""The families of models that are served, by the model types of their configs."""

from __future__ import annotations

from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.bailing_hybrid import BAILING_HYBRID
from torch_hybrid.models.bamba import BAMBA
from torch_hybrid.models.deepseek_v3 import DEEPSEEK_V3
from torch_hybrid.models.falcon_h1 import FALCON_H1
from torch_hybrid.models.family import Family, require
from torch_hybrid.models.glm5_next import GLM5_NEXT
from torch_hybrid.models.granitemoehybrid import GRANITEMOEHYBRID
from torch_hybrid.models.inkling import INKLING
from torch_hybrid.models.inkling2 import INKLING2
from torch_hybrid.models.jamba import JAMBA
from torch_hybrid.models.kimi_linear import KIMI_LINEAR
from torch_hybrid.models.lfm import LFM2, LFM3
from torch_hybrid.models.mamba import MAMBA
from torch_hybrid.models.mamba2 import MAMBA2
from torch_hybrid.models.minimax import MINIMAX
from torch_hybrid.models.nemotron_h import NEMOTRON_H
from torch_hybrid.models.olmo_hybrid import OLMO_HYBRID
from torch_hybrid.models.qwen3 import QWEN3
from torch_hybrid.models.qwen3_5 import QWEN3_5
from torch_hybrid.models.qwen3_next import QWEN3_NEXT
from torch_hybrid.models.qwen4_exp import QWEN4_EXP
from torch_hybrid.models.recurrent_gemma import RECURRENT_GEMMA
from torch_hybrid.models.rwkv import RWKV
from torch_hybrid.models.xlstm import XLSTM
from torch_hybrid.models.zamba import ZAMBA
from torch_hybrid.models.zamba2 import ZAMBA2
from torch_hybrid.models.zaya import ZAYA
from torch_hybrid.specs import LayerTable

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        BAILING_HYBRID,
        BAMBA,
        DEEPSEEK_V3,
        FALCON_H1,
        GLM5_NEXT,
        GRANITEMOEHYBRID,
        INKLING,
        INKLING2,
        JAMBA,
        KIMI_LINEAR,
        LFM2,
        LFM3,
        MAMBA,
        MAMBA2,
        MINIMAX,
        NEMOTRON_H,
        OLMO_HYBRID,
        QWEN3,
        QWEN3_5,
        QWEN3_NEXT,
        QWEN4_EXP,
        RECURRENT_GEMMA,
        RWKV,
        XLSTM,
        ZAMBA,
        ZAMBA2,
        ZAYA,
    )
    for model_type in family.model_types
}

# Hybrids that transformers has and this package has no op for.
NOT_SERVED = {
    "nemo_speechlm": "speech to transcribe, of which its text part alone hears nothing",
}


def family_of(model_type: Any) -> Family:
    """The family of a model type.

    Raises:
        UnsupportedError: none is served that has it.
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


def table_of(config: Any) -> LayerTable:
    """The mixers of a transformers config, before any weight is read.

    Raises:
        UnsupportedError: the model type, or a field of the config, is not known here.
    """
    family, text = family_of(config.model_type), config.get_text_config()
    require(config, "text_config.model_type", text.model_type, family.model_types)
    return LayerTable.from_specs(family.specs(text))
