"""OLMo-hybrid: gated delta rule that may have negative eigenvalues, and full attention."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.family import (
    Family,
    Swap,
    delta_rule_spec,
    head_dim_of,
    mixer_from,
    specs_by_layer_type,
    weights_of,
)
from torch_hybrid.specs import DeltaRuleSpec, LayerSpec

NORM_EPS = 1e-5  # of the gated norm: fixed by the model, whatever config.rms_norm_eps says


def _mixer(module: Any, spec: DeltaRuleSpec) -> GatedDeltaNet:
    rows = weights_of(
        module.q_proj,
        module.k_proj,
        module.v_proj,
        module.g_proj,
        module.b_proj,
        module.a_proj,
    )
    return mixer_from(module, spec, rows, norm=module.o_norm, out=module.o_proj)


class OlmoHybridFamily(Family):
    model_types = ("olmo_hybrid",)
    swaps: ClassVar = {"gated_delta_rule": Swap(attribute="linear_attn", make=_mixer)}

    def specs(self, config: Any) -> list[LayerSpec]:
        beta_scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        linear = delta_rule_spec(config, norm_eps=NORM_EPS, beta_scale=beta_scale)
        return specs_by_layer_type(config, linear, head_dim=head_dim_of(config))
