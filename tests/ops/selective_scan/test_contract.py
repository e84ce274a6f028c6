"""What every implementation of both execution forms of the selective scan is held to."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers.models.mamba import modeling_mamba as mamba

from tests.ops.contract import assert_same_bits
from tests.ops.recurrent_contract import Expected, Family, Form, RecurrentContract
from tests.ops.selective_scan.cases import CASES, Case, Inputs, make_inputs
from torch_hybrid.ops.selective_scan import selective_scan
from torch_hybrid.ops.selective_scan.op import (
    IMPLEMENTATIONS,
)
from torch_hybrid.ops.selective_scan.reference import selective_scan_reference


class TestContract(RecurrentContract):
    family = Family(
        op=selective_scan,
        implementations=IMPLEMENTATIONS,
        reference=selective_scan_reference,
        cases=CASES,
        make_inputs=make_inputs,
    )

    @pytest.mark.parametrize("decay", [0.0, -1e-3, -1.0, -5.0, -20.0, -50.0])
    def test_any_constant_decay(self, form: Form, decay: float):
        """Here of the slowest state; the others decay faster. A step of infinity has no result."""
        _expect_steps(-decay).check_form(form)

    def test_a_small_decay_survives_large_ones_before_it(self, form: Form):
        _expect_small_steps_after_large_ones().check_form(form)

    def test_a_slow_decay_stays_exact_over_many_chunks(self, form: Form):
        _expect_small_steps_for_long().check_form(form)

    def test_one_row_of_decays_may_serve_all_tokens(self, form: Form):
        inputs = self.family.mixed()
        shared = replace(inputs.copy(), dt=inputs.dt[:1].expand(inputs.dt.shape))
        dense = replace(inputs.copy(), dt=shared.dt.contiguous())
        assert torch.equal(form(shared), form(dense))
        assert_same_bits(shared.state, dense.state)

    @pytest.mark.parametrize("bias", ["own", "float32"])
    def test_a_bias_is_added_in_float32(self, form: Form, bias: str):
        """A sum that is rounded to the inputs' dtype is beyond the budget."""
        inputs = make_inputs(replace(CASES["mixed"], bias=bias), torch.bfloat16)
        expected = Expected.of(selective_scan_reference, inputs)
        expected.check_form(form)
        assert inputs.dt_bias is not None
        rounded = replace(inputs.copy(), dt=inputs.dt + inputs.dt_bias.bfloat16(), dt_bias=None)
        with pytest.raises(AssertionError):
            expected.check(form(rounded), rounded.state)

    @pytest.mark.parametrize("wide", [("A_log",), ("D",), ("A_log", "D")], ids="+".join)
    def test_parameters_may_be_float32(self, form: Form, wide: tuple[str, ...]):
        """Whatever the dtype is; here of values that it cannot hold."""
        inputs = make_inputs(replace(CASES["mixed"], lengths=(5, 0, 40)), torch.bfloat16)
        parameters = {name: 1.001 * getattr(inputs, name).float() for name in wide}
        Expected.of(selective_scan_reference, replace(inputs, **parameters)).check_form(form)


def _softplus_inverse(step: float) -> float:
    return float(torch.tensor(step, dtype=torch.float64).expm1().log()) if step else -1e4


def _with_rates_from_one(inputs: Inputs) -> Inputs:
    rates = torch.arange(1, inputs.A_log.shape[1] + 1).log()
    return replace(inputs, A_log=rates.expand_as(inputs.A_log).contiguous())


@cache
def _expect_steps(step: float) -> Expected:
    inputs = _with_rates_from_one(make_inputs(CASES["mixed"]))
    inputs.dt.fill_(_softplus_inverse(step))
    return Expected.of(selective_scan_reference, inputs)


@cache
def _expect_small_steps_after_large_ones() -> Expected:
    inputs = _with_rates_from_one(make_inputs(replace(CASES["mixed"], lengths=(128,))))
    inputs.dt[:10] = 500.0
    inputs.dt[10:] = _softplus_inverse(1e-4)
    return Expected.of(selective_scan_reference, inputs)


@cache
def _expect_small_steps_for_long() -> Expected:
    inputs = _with_rates_from_one(make_inputs(Case(lengths=(1000,), channels=16)))
    inputs.dt.fill_(_softplus_inverse(1e-4))
    return Expected.of(selective_scan_reference, inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B": torch.zeros(8, 16)}, "B must have 3 dimensions, got [8, 16]"),
        ({"A_log": torch.zeros(48)}, "A_log must have 2 dimensions, got [48]"),
        (
            {"B": torch.zeros(8, 5, 16), "C": torch.zeros(8, 5, 16)},
            "x must have a multiple of the 5 groups of B, got 48",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Tensor], message: str):
    inputs = replace(make_inputs(Case(lengths=(5, 3))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        selective_scan(*inputs.args(), **inputs.options(), impl="chunk_torch")


def test_options_are_checked():
    inputs = make_inputs(Case(lengths=(2,)))
    with pytest.raises(ValueError, match="impl must be one of"):
        selective_scan(*inputs.args(), impl="none")
    with pytest.raises(ValueError, match=r"chunk_size must be one of \[16, 32, 64, 128\], got 20"):
        selective_scan(*inputs.args(), chunk_size=20, impl="chunk_torch")


@pytest.mark.parametrize("bias", ["none", "float32"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_reference_agrees_with_the_scan_of_transformers(is_gated: bool, bias: str):
    """Theirs has a batch dimension, tokens last, and always starts from zeros."""
    inputs = make_inputs(Case(lengths=(40,), is_gated=is_gated, bias=bias))
    inputs = replace(inputs, initial_indices=torch.zeros_like(inputs.initial_indices))
    out = selective_scan_reference(inputs)
    theirs, final = mamba.mamba_selective_scan(
        inputs.x.T[None],
        inputs.dt.T[None],
        -inputs.A_log.exp(),
        inputs.B[:, 0].T[None],
        inputs.C[:, 0].T[None],
        D=inputs.D,
        z=None if inputs.z is None else inputs.z.T[None],
        delta_bias=inputs.dt_bias,
        delta_softplus=True,
        return_last_state=True,
    )
    torch.testing.assert_close(out, theirs[0].T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        inputs.state[inputs.state_indices[0]], final[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("bias", ["none", "float32"])
def test_reference_agrees_with_the_step_of_transformers(bias: str):
    inputs = make_inputs(Case(lengths=(12,), bias=bias))
    slot = int(inputs.state_indices[0])
    state = inputs.state[slot][None].clone()
    out = selective_scan_reference(inputs)
    for t in range(len(out)):
        theirs = mamba.mamba_selective_state_update(
            state,
            inputs.x[t : t + 1],
            inputs.dt[t : t + 1],
            -inputs.A_log.exp(),
            inputs.B[t],
            inputs.C[t],
            D=inputs.D,
            z=inputs.z[t : t + 1],
            dt_bias=inputs.dt_bias,
            dt_softplus=True,
        )
        torch.testing.assert_close(out[t : t + 1], theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.state[slot], state[0], rtol=1e-5, atol=1e-5)
