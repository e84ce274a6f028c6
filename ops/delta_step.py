"""One token of each sequence through the mixer of a delta rule, whatever its decay: what the ops of
such steps are given, what they ask of it, and their form in vectorised torch; and the same of steps
that verify drafts.

Here decays are those of value heads, or of each of their channels of K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_activation, check_lengths, check_width, convolve
from torch_hybrid.ops.core.recurrence import check_slots, check_tokens
from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes
from torch_hybrid.ops.delta_rule._torch import l2_normalize
from torch_hybrid.ops.pointwise import sigmoid
from torch_hybrid.ops.ragged_chunks import initial_states, live_sequences, store_states
from torch_hybrid.ops.verify import check_records, verify_by_steps

# As they stand in the ops' schemas.
SCHEMA = (
    "Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor A_log, Tensor dt_bias, Tensor norm_weight, Tensor(a!) conv_state, Tensor(b!) state, "
    "Tensor cu_seqlens, Tensor initial_indices, Tensor state_indices"
)


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors of a step, in the order of its op; N sequences, T tokens, S slots."""

    qkv: Tensor  # [T, 2 H K + HV V]
    z: Tensor  # [T, HV V]
    b: Tensor  # [T, HV]
    a: Tensor  # [T, HV], or [T, HV K] where channels decay on their own
    conv_weight: Tensor  # [2 H K + HV V, W]
    conv_bias: Tensor | None  # [2 H K + HV V]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV], or [HV, K] where channels decay on their own
    norm_weight: Tensor  # [V]
    conv_state: Tensor  # [S, W - 1, 2 H K + HV V]
    state: Tensor  # [S, HV, V, K]
    cu_seqlens: Tensor  # [N + 1]
    initial_indices: Tensor  # [N]
    state_indices: Tensor  # [N]

    @property
    def widths(self) -> list[int]:
        """Channels of q, of k and of v."""
        v_size = self.state.shape[1] * self.state.shape[2]
        k_size = (self.qkv.shape[1] - v_size) // 2
        return [k_size, k_size, v_size]


def check_step(x: StepTensors, *, activation: str, by_channel: bool) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype, layout or value."""
    check_activation(activation)
    _check_sizes(x, by_channel)
    num_tokens, channels = x.qkv.shape
    num_slots, num_v_heads, v_dim, k_dim = x.state.shape
    width, dtype = x.conv_weight.shape[1], x.qkv.dtype
    check_tokens(
        {
            "qkv": (x.qkv, x.qkv.shape, dtype),
            "z": (x.z, (num_tokens, num_v_heads * v_dim), dtype),
            "b": (x.b, (num_tokens, num_v_heads), dtype),
            "a": (x.a, (num_tokens, num_v_heads * (k_dim if by_channel else 1)), dtype),
        }
    )
    parameters: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "conv_weight": (x.conv_weight, (channels, width)),
        "conv_bias": (x.conv_bias, (channels,)),
        "A_log": (x.A_log, (num_v_heads,)),
        "dt_bias": (x.dt_bias, (num_v_heads, k_dim) if by_channel else (num_v_heads,)),
        "norm_weight": (x.norm_weight, (v_dim,)),
        "conv_state": (x.conv_state, (num_slots, width - 1, channels)),
    }
    check_shapes(parameters)
    wide = {"A_log": x.A_log, "dt_bias": x.dt_bias, "norm_weight": x.norm_weight}
    dtypes = {name: each.dtype for name, each in wide.items() if each.dtype == torch.float32}
    check_dtypes({name: (each, dtypes.get(name, dtype)) for name, (each, _) in parameters.items()})
    check_contiguous(**{name: tensor for name, (tensor, _) in parameters.items()})
    check_slots(x.state, x.state.shape[1:], x.cu_seqlens, x.initial_indices, x.state_indices)


def _check_sizes(x: StepTensors, by_channel: bool) -> None:
    """q and k take what v leaves of the channels: whole heads, which divide those of v, or are as
    many where channels decay on their own."""
    for name, tensor, dims in (
        ("qkv", x.qkv, 2),
        ("state", x.state, 4),
        ("conv_weight", x.conv_weight, 2),
    ):
        if tensor.ndim != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    check_width(x.conv_weight)
    channels = x.qkv.shape[1]
    _, num_v_heads, v_dim, k_dim = x.state.shape
    of_keys = channels - num_v_heads * v_dim
    if by_channel and of_keys != num_v_heads * 2 * k_dim:
        wanted = num_v_heads * (2 * k_dim + v_dim)
        raise ValueError(f"qkv must have {wanted} channels, those of state, got {channels}")
    num_k_heads = of_keys // (2 * k_dim)
    if num_k_heads < 1 or of_keys % (2 * k_dim) or num_v_heads % num_k_heads:
        raise ValueError(
            f"qkv must have 2 H {k_dim} + {num_v_heads * v_dim} channels, where H divides the "
            f"{num_v_heads} heads of state, got {channels}"
        )


def step_in_torch(
    x: StepTensors,
    *,
    log_decay: Callable[[Tensor], Tensor],
    gated_norm: Callable[[Tensor, Tensor], Tensor],
    activation: str,
    scale: float,
    beta_scale: float = 1.0,
) -> Tensor:
    """All sequences that have a token together, rounded where the parts of a mixer round.

    Args:
        x: the tensors; both pools are updated in place.
        log_decay: a [N, HV] or [N, HV K] to float32 [N, HV, 1 or K].
        gated_norm: outputs of the rule and their gates, both [N, HV, V], to the op's.
        activation, scale, beta_scale: as of the ops.
    """
    seqs = live_sequences(
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        num_tokens=x.qkv.shape[0],
        num_slots=x.state.shape[0],
    )
    if seqs.max_length > 1:
        check_lengths(x.cu_seqlens)
    token = seqs.starts
    num_heads, v_dim, k_dim = x.state.shape[1:]

    past = x.conv_state[seqs.initial].where((seqs.initial > 0)[:, None, None], 0.0)
    window = torch.cat([past, x.qkv[token][:, None]], 1)
    is_stored = seqs.slots > 0
    x.conv_state[seqs.slots[is_stored]] = window[is_stored, 1:]
    mixed = convolve(window, x.conv_weight, x.conv_bias, activation)
    q, k, v = mixed.float().split(x.widths, 1)
    q, k = (l2_normalize(part.unflatten(1, (-1, k_dim))) for part in (q, k))
    group = num_heads // k.shape[1]
    q, k = (q * scale).repeat_interleave(group, 1), k.repeat_interleave(group, 1)

    beta = sigmoid(x.b[token].float()) * beta_scale
    S = initial_states(x.state, seqs).mul_(log_decay(x.a[token]).exp()[..., None, :])
    u = beta[..., None] * (v.unflatten(1, (num_heads, v_dim)) - (S @ k[..., None])[..., 0])
    S.add_(u[..., None] * k[..., None, :])
    o = (S @ q[..., None])[..., 0].to(x.z.dtype)
    store_states(x.state, seqs, S)

    out = torch.zeros_like(x.z, memory_format=torch.contiguous_format)
    out[token] = gated_norm(o, x.z[token].view_as(o)).flatten(1)
    return out


def check_verify(
    x: StepTensors, records: Tensor, accepted: Tensor, *, activation: str, by_channel: bool
) -> None:
    """As ``check_step``, and of what a step that verifies drafts takes beside."""
    check_step(x, activation=activation, by_channel=by_channel)
    check_records(
        records,
        accepted,
        num_slots=x.state.shape[0],
        width=x.qkv.shape[1] + x.b.shape[1] + x.a.shape[1],
        dtype=x.qkv.dtype,
        num_seqs=x.state_indices.shape[0],
    )


def verify_by_delta_steps(
    step: Callable[..., Tensor],
    *tensors: Tensor | None,
    **options: Any,
) -> Tensor:
    """A step that verifies drafts, by a launcher of the decode step: records are [qkv | b | a]."""
    *of_step, records, accepted = tensors
    x = StepTensors(*of_step)  # type: ignore[arg-type]
    parts = [x.qkv, x.b, x.a]
    widths = [part.shape[1] for part in parts]

    def advance(
        rows: Tensor, token: Tensor | None, pools: Sequence[Tensor], offsets: Tensor, own: Tensor
    ) -> Tensor:
        qkv, b, a = rows.split(widths, 1)
        z = x.z.new_zeros(len(rows), x.z.shape[1]) if token is None else x.z[token]
        conv_state, state = pools
        given = replace(
            x,
            qkv=qkv,
            z=z,
            b=b,
            a=a,
            conv_state=conv_state,
            state=state,
            cu_seqlens=offsets,
            initial_indices=own,
            state_indices=own,
        )
        return step(*(getattr(given, field.name) for field in fields(given)), **options)

    assert records is not None
    assert accepted is not None
    return verify_by_steps(
        advance,
        torch.cat(parts, 1),
        torch.zeros_like(x.z, memory_format=torch.contiguous_format),
        [x.conv_state, x.state],
        records,
        accepted,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
    )
