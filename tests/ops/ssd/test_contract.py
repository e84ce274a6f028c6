"""What every implementation of both execution forms of the recurrence is held to."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.minimax import MiniMaxConfig
from transformers.models.minimax import modeling_minimax as minimax

from tests.ops.pages import offsets
from tests.ops.recurrent_contract import Expected, Family, Form, RecurrentContract
from tests.ops.ssd.cases import CASES, Case, Inputs, make_inputs
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.ops.ssd.op import (
    IMPLEMENTATIONS,
)
from torch_hybrid.ops.ssd.reference import ssd_reference


class TestContract(RecurrentContract):
    family = Family(
        op=ssd,
        implementations=IMPLEMENTATIONS,
        reference=ssd_reference,
        cases=CASES,
        make_inputs=make_inputs,
    )

    def test_a_slow_decay_stays_exact_over_many_chunks(self, form: Form):
        _expect_slow_decay_over_a_thousand_tokens().check_form(form)

    @pytest.mark.parametrize("absent", [("dt",), ("D",), ("dt", "D")], ids="+".join)
    def test_optional_arguments(self, form: Form, absent: tuple[str, ...]):
        inputs = replace(self.family.mixed(), **dict.fromkeys(absent))
        Expected.of(ssd_reference, inputs).check_form(form)


@cache
def _expect_slow_decay_over_a_thousand_tokens() -> Expected:
    inputs = make_inputs(Case(lengths=(1000,), num_groups=1, num_heads=2))
    return Expected.of(ssd_reference, replace(inputs, g=torch.full_like(inputs.g, -1e-4)))


def test_heads_must_divide():
    inputs = make_inputs(Case(lengths=(2,), num_groups=2, num_heads=3))
    with pytest.raises(ValueError, match="v must have a multiple of the 2 heads of k, got 3"):
        ssd(*inputs.args(), **inputs.options(), impl="chunk_torch")


def test_options_are_checked():
    inputs = make_inputs(Case(lengths=(2,)))
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        ssd(*inputs.args(), **inputs.options(), chunk_size=20, impl="chunk_torch")


def test_reference_agrees_with_the_scan_of_bamba():
    """Theirs has a batch dimension; states, groups and D are as here, and q has no scale."""
    inputs, initial = _one_sequence(lightning=False), _one_sequence(lightning=False)
    slot, A = int(inputs.state_indices[0]), inputs.g[:1] / inputs.dt[:1]
    inputs = replace(inputs, g=inputs.dt * A, scale=1.0)
    out = ssd_reference(inputs)
    theirs, final = bamba.mamba2_chunk_scan(
        inputs.v[None],
        inputs.dt[None],
        A[0],
        inputs.k[None],
        inputs.q[None],
        chunk_size=32,
        D=inputs.D,
        initial_states=initial.state[slot][None],
        return_final_states=True,
    )
    torch.testing.assert_close(out, theirs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inputs.state[slot], final[0], rtol=1e-5, atol=1e-5)


def test_reference_agrees_with_the_step_of_bamba():
    inputs, initial = _one_sequence(lightning=False), _one_sequence(lightning=False)
    slot, A = int(inputs.state_indices[0]), inputs.g[:1] / inputs.dt[:1]
    inputs = replace(inputs, g=inputs.dt * A, scale=1.0)
    out = ssd_reference(inputs)
    state = initial.state[slot][None].clone()
    for t in range(len(out)):
        theirs = bamba.mamba2_selective_state_update(
            state,
            inputs.v[t : t + 1],
            inputs.dt[t : t + 1, :, None].expand_as(inputs.v[:1]),
            A[0, :, None, None].expand_as(state[0]),
            inputs.k[t : t + 1],
            inputs.q[t : t + 1],
            D=inputs.D[:, None].expand_as(inputs.v[0]),
        )
        torch.testing.assert_close(out[t], theirs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inputs.state[slot], state[0], rtol=1e-5, atol=1e-5)


def test_reference_agrees_with_the_lightning_attention_of_minimax():
    """A whole mixer of theirs: the projections are ours to repeat, the state comes back [K, V]."""
    config = MiniMaxConfig(
        hidden_size=24,
        num_attention_heads=3,
        head_dim=16,
        num_hidden_layers=4,
        block_size=32,
        layer_types=["linear_attention"] * 4,
    )
    theirs = minimax.MiniMaxLightningAttention(config, layer_idx=1).eval()
    x = torch.randn(1, 70, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, final = theirs(x, None, None)
        qkv = theirs.act_fn(theirs.qkv_proj(x[0])).unflatten(1, (3, 48))
        q, k, v = (part.contiguous() for part in qkv.split(16, dim=2))
        state = torch.zeros(2, 3, 16, 16)
        given = Inputs(
            q=q,
            k=k,
            v=v,
            g=-theirs.slope_rate.flatten().expand(70, 3),
            dt=None,
            D=None,
            state=state,
            cu_seqlens=offsets([70]),
            initial_indices=torch.tensor([0]),
            state_indices=torch.tensor([1]),
            scale=1.0,
        )
        out = ssd_reference(given)
        gate = theirs.output_gate(x[0]).sigmoid()
        out = theirs.out_proj(gate * theirs.norm(out.flatten(1)))
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1], final[0].mT, rtol=1e-5, atol=1e-5)


def _one_sequence(*, lightning: bool) -> Inputs:
    return make_inputs(Case(lengths=(70,), num_heads=6, k_dim=24, lightning=lightning))
