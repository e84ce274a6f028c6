"""Mamba2 alone, and the parts of all families with such mixers: their spec, and our mixer with
their weights."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mamba2 import Mamba2
from torch_hybrid.models.family import Family, Swap, require
from torch_hybrid.specs import Mamba2Spec


def mamba2_spec(config: Any, *, gate: str) -> Mamba2Spec:
    """Return the spec of the Mamba2 layers, for configs that call their fields ``mamba_*``."""
    require(config, "hidden_act", config.hidden_act, ["silu"])
    # None: no limit, as time steps are positive by themselves.
    dt_min, dt_max = config.time_step_limit or (0.0, float("inf"))
    return Mamba2Spec(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_dim=config.mamba_d_state,
        num_groups=config.mamba_n_groups,
        conv_width=config.mamba_d_conv,
        activation=config.hidden_act,
        dt_min=dt_min,
        dt_max=dt_max,
        gate=gate,
        norm_groups=config.mamba_n_groups,
        norm_eps=config.rms_norm_eps,
    )


def mamba2_from(module: Any, spec: Mamba2Spec) -> Mamba2:
    """Make our mixer with the weights of a transformers module, which all families name alike."""
    with on_meta():
        mixer = Mamba2(module.in_proj.in_features, spec, conv_bias=False)
    mixer.in_proj, mixer.out_proj = module.in_proj, module.out_proj
    conv = module.conv1d
    mixer.conv_weight = nn.Parameter(conv.weight.squeeze(1), requires_grad=False)
    mixer.conv_bias = conv.bias
    mixer.A_log, mixer.dt_bias, mixer.D = module.A_log, module.dt_bias, module.D
    if spec.gate != "no_norm":
        mixer.norm_weight = module.norm.weight
    return mixer


class Mamba2Family(Family):
    model_types = ("mamba2",)
    swaps: ClassVar = {"mamba2": Swap(attribute="mixer", make=mamba2_from)}
    hf_takes_masks = False

    def specs(self, config: Any) -> list[Mamba2Spec]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        dt_min, dt_max = config.time_step_limit
        spec = Mamba2Spec(
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            state_dim=config.state_size,
            num_groups=config.n_groups,
            conv_width=config.conv_kernel,
            activation=config.hidden_act,
            dt_min=dt_min,
            dt_max=dt_max,
            gate="before_norm",
            norm_groups=config.n_groups,
            norm_eps=config.layer_norm_epsilon,
        )
        return [spec] * config.num_hidden_layers
