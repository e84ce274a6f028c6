"""Mamba and Falcon-Mamba, and the mixer that they share with Jamba."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_hybrid.backends.step import LayerStep
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mamba import Mamba
from torch_hybrid.models.family import Family, Swap, require
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.specs import MambaSpec


def mamba_from(module: Any, spec: MambaSpec) -> Mamba:
    """Make our mixer with the weights of a transformers module, which all families name alike."""
    with on_meta():
        mixer = Mamba(module.in_proj.in_features, spec, conv_bias=False)
    mixer.in_proj, mixer.out_proj = module.in_proj, module.out_proj
    mixer.x_proj, mixer.dt_proj, mixer.dt_bias = module.x_proj, module.dt_proj, module.dt_proj.bias
    mixer.dt_proj.bias = None  # the scan adds it
    conv = module.conv1d
    mixer.conv_weight = nn.Parameter(conv.weight.squeeze(1), requires_grad=False)
    mixer.conv_bias = conv.bias
    mixer.A_log, mixer.D = module.A_log, module.D
    return mixer


class MaskedMambaAdapter(LinearAttentionAdapter):
    """Our mixer for decoder layers that hand it a mask alone: the step comes as that mask."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, attention_mask: LayerStep, **_options: object
    ) -> Tensor:
        return super().forward(hidden_states, step=attention_mask)


def _mixer(module: Any, spec: MambaSpec) -> Mamba:
    mixer = mamba_from(module, spec)
    if spec.norm_eps is not None:
        # Falcon-Mamba's norms have no weights.
        mixer.dt_norm, mixer.B_norm, mixer.C_norm = (
            nn.RMSNorm(
                width,
                eps=spec.norm_eps,
                elementwise_affine=False,
                device="meta",
                dtype=torch.float32,
            )
            for width in (spec.dt_rank, spec.state_dim, spec.state_dim)
        )
    return mixer


class MambaFamily(Family):
    model_types = ("mamba", "falcon_mamba")
    swaps: ClassVar = {"mamba": Swap(attribute="mixer", make=_mixer, adapter=MaskedMambaAdapter)}
    hf_takes_masks = False
    hf_layer_step_arguments = ("attention_mask",)
    hf_step_argument = "attention_mask"

    def specs(self, config: Any) -> list[MambaSpec]:
        require(config, "hidden_act", config.hidden_act, ["silu"])
        spec = MambaSpec(
            channels=config.intermediate_size,
            state_dim=config.state_size,
            dt_rank=int(config.time_step_rank),
            conv_width=config.conv_kernel,
            activation=config.hidden_act,
            norm_eps=config.mixer_rms_eps if config.model_type == "falcon_mamba" else None,
        )
        return [spec] * config.num_hidden_layers
