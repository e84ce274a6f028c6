"""State space duality, what else it computes, and the selective scan, to train with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from tests.functional.recurrence import LENGTHS, Recurrence, Results, Tensors
from torch_hybrid.functional import lightning_attention, mlstm, selective_scan, ssd
from torch_hybrid.ops.ssd.reference import ssd_step


@dataclass(frozen=True, kw_only=True, eq=False)
class Ssd(Recurrence):
    """Mamba2's recurrence."""

    heads: int = 6
    groups: int = 2
    dims: tuple[int, int] = (24, 16)

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make x, dt, A, B, C, D, dt_bias and initial states; decays from almost 1 to e^-20."""
        T, H, G, (P, N) = sum(lengths), self.heads, self.groups, self.dims
        rows = [torch.randn(T, H, P), torch.randn(T, H), -torch.logspace(-4, 0.7, H)]
        rows += [torch.randn(T, G, N) / 4, torch.randn(T, G, N) / 4]
        heads = [torch.randn(H), torch.randn(H)]
        made = [*rows, *heads, torch.randn(len(lengths), H, P, N)]
        work = torch.promote_types(dtype, torch.float32)
        return [x.to(dtype if at in self.by_token else work) for at, x in enumerate(made)]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Walk through ``ssd_step``."""
        (x, dt, B, C), (A, D, dt_bias), out = rows, shared, []
        step = softplus(dt + dt_bias).clamp(*self.options["dt_limit"])
        B, C = (each.repeat_interleave(self.heads // self.groups, 1) for each in (B, C))
        for t in range(len(x)):
            state, o = ssd_step(state, C[t], B[t], x[t], step[t] * A, step[t])
            out.append(o + D[:, None] * x[t])
        return torch.stack(out), state

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Run transformers' chunks in torch."""
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        (x, dt, B, C), (A, D, dt_bias) = rows, shared
        y, final = mamba2_chunk_scan(
            *(x[None], dt[None], A, B[None], C[None]),
            chunk_size=64,
            D=D,
            dt_bias=dt_bias,
            initial_states=state[None],
            dt_softplus=True,
            **self.options,
            return_final_states=True,
        )
        return y[0], final[0]

    def op_arguments(self, xs: Tensors, cu_seqlens: Tensor) -> tuple[Tensors, dict[str, object]]:
        x, dt, A, B, C, D, _, states = xs
        return [C, B, x, dt * A, dt, D, cu_seqlens, states], {"scale": 0.5}


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearAttention(Recurrence):
    """Lightning attention, and mLSTM, whose memory has more rows than there are values."""

    heads: int = 3
    dims: tuple[int, int] = (16, 24)
    num_rows: int = 24
    op: str = "ssd"
    like: int = 2
    rounding: tuple[float, float] = (2**-6, 2**-8)

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make arguments; heads forget within a token or hardly ever, gates reach their caps."""
        T, N, H, (K, V) = sum(lengths), len(lengths), self.heads, self.dims
        work = torch.promote_types(dtype, torch.float32)
        q, k, v = torch.randn(T, H, K), torch.randn(T, H, K), torch.randn(T, H, V)
        if self.shared:
            gates, state = [torch.tensor([20.0, 0.3, 0.0])], torch.randn(N, H, V, K)
        else:
            gates = [15 * torch.tanh(5 * torch.randn(T, H) / 15) for _ in range(2)]
            state = torch.randn(N, H, V + 1, K)
            state = torch.cat([state, *[state[:, :, V:]] * (self.num_rows - V - 1)], 2)
        return [x.to(dtype) for x in (q, k, v)] + [x.to(work) for x in (*gates, state)]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        (q, k, v, *gates), out, V = rows, [], self.dims[1]
        if shared:
            decay, weight = (-shared[0]).exp().expand(v.shape[:2]), torch.ones_like(v[..., 0])
        else:
            decay, weight = gates[1].sigmoid(), gates[0].exp()
            v = pad(v, (0, self.num_rows - V), value=1.0)
        for t in range(len(q)):
            write = (weight[t, :, None] * v[t])[..., None] * k[t, :, None]
            state = decay[t, :, None, None] * state + write
            out.append(k.shape[-1] ** -0.5 * (state @ q[t, ..., None])[..., 0])
        o = torch.stack(out)
        return o if shared else o[..., :V] / o[..., V:][..., :1].abs().clamp(min=1.0), state

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Run transformers' chunks of mLSTM; of lightning attention, the walk."""
        if shared:
            return self.walk(rows, shared, state)
        from transformers.models.xlstm import modeling_xlstm as xlstm

        q, k, v, i, f = (x.transpose(0, 1)[None] for x in rows)
        S, V = state, self.dims[1]
        h, (C, n, m) = xlstm.wrap_chunkwise_arbitrary_sequence_length(
            xlstm.mlstm_chunkwise_native_autograd,
            xlstm.mlstm_recurrent_sequence_native,
            xlstm.mlstm_recurrent_step_native,
            *(q, k, v, f, i, S[:, :V].mT[None], S[:, V][None], S.new_zeros(1, self.heads, 1)),
            eps=0.0,
        )
        final = torch.cat([C[0].mT, *[n[0, :, None]] * (self.num_rows - V)], 1)
        return h[0].transpose(0, 1), final * m[0, ..., None].exp()

    def weights(self, xs: Tensors) -> Tensors:
        """Make random weights; of several normalizers, of one."""
        out, states = super().weights(xs)
        states[:, :, self.dims[1] + 1 :] = 0.0
        return [out, states]


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectiveScan(Recurrence):
    """Mamba's recurrence, of groups of more channels than a vector, and than a block."""

    channels: int = 140
    state_dim: int = 12
    groups: int = 2
    num_draws: int = 3

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make x, dt, A, B, C, D, z, dt_bias and initial states; rates from 1e-4 to 16."""
        T, E, N = sum(lengths), self.channels, self.state_dim
        rows = [torch.randn(T, E), torch.randn(T, E), -torch.logspace(-4, 1.2, E * N).view(E, N)]
        rows += [torch.randn(T, self.groups, N) / 2 for _ in "BC"]
        own = [torch.randn(E), torch.randn(T, E), torch.randn(E) - 1]
        made = [*rows, *own, torch.randn(len(lengths), E, N)]
        work = torch.promote_types(dtype, torch.float32)
        return [x.to(dtype if at in self.by_token else work) for at, x in enumerate(made)]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        (x, dt, B, C, z), (A, D, dt_bias), out = rows, shared, []
        step = softplus(dt + dt_bias)
        B, C = (each.repeat_interleave(self.channels // self.groups, 1) for each in (B, C))
        state = torch.zeros_like(A) if state is None else state
        for t in range(len(x)):
            state = (step[t][:, None] * A).exp() * state + (step[t] * x[t])[:, None] * B[t]
            out.append(((state * C[t]).sum(1) + D * x[t]) * silu(z[t]))
        return torch.stack(out), state

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Run transformers' scan, which has one group and starts from zeros; else the walk."""
        if self.has_states:
            return self.walk(rows, shared, state)
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        (x, dt, B, C, z), (A, D, dt_bias) = rows, shared
        y, final = mamba_selective_scan(
            *(x.mT[None], dt.mT[None], A, B[:, 0].mT[None], C[:, 0].mT[None]),
            D=D,
            z=z.mT[None],
            delta_bias=dt_bias,
            delta_softplus=True,
            return_last_state=True,
        )
        return y[0].mT, final[0]


SSD = Ssd(
    function=ssd,
    op="ssd",
    names=("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state"),
    shared=("A", "D", "dt_bias"),
    num_optional=2,
    decay="A",
    decays=(0.0, -20.0),
    reads_padding=("dt",),
    options={"dt_limit": (0.01, 4.0)},
)
LIGHTNING = LinearAttention(
    function=lightning_attention,
    names=("q", "k", "v", "slopes", "initial_state"),
    shared=("slopes",),
)
MLSTM = LinearAttention(
    function=mlstm,
    names=("q", "k", "v", "i", "f", "initial_state"),
    num_rows=32,
    reads_padding=("i", "f"),
)
SCAN = SelectiveScan(
    function=selective_scan,
    op="selective_scan",
    names=("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"),
    shared=("A", "D", "dt_bias"),
    num_optional=3,
    decay="A",
    decays=(0.0, -200.0),
    lengths=LENGTHS | {"borders": (7, 8, 9, 31, 32, 33), "mixed": (5, 100, 1, 0, 66)},
)
