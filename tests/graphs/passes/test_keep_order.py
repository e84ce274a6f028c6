"""What Inductor is told about a scheduled graph holds whatever was compiled before it."""

from __future__ import annotations

import pytest
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from torch_hybrid.graphs.passes.keep_order import KeepHalves, check_order, keep_order


def test_choices_of_a_plain_graph_before_it_do_not_stay():
    plain = type(V.choices)  # made and kept by the first use
    assert issubclass(plain, InductorChoices)
    with keep_order(()):
        assert type(V.choices) is KeepHalves
    assert type(V.choices) is plain


def test_code_in_another_order_than_the_schedule_is_an_error():
    planned = ["torch_hybrid.linear", "torch_hybrid.paged_attention", "torch_hybrid.linear"]
    linear, attention = (f"torch.ops.{name}.default(x)" for name in planned[:2])
    check_order("\n".join([linear, attention, linear]), planned)
    check_order("\n".join([linear, attention]), planned)  # what is of weights alone is there once
    with pytest.raises(RuntimeError, match="compiled code must keep the schedule's order of ops"):
        check_order("\n".join([attention, linear, attention]), planned)
