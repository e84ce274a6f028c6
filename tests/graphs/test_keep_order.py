"""What Inductor is told about a scheduled graph holds whatever was compiled before it."""

from __future__ import annotations

from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from torch_hybrid.graphs.keep_order import KeepLanes, keep_order


def test_choices_of_a_plain_graph_before_it_do_not_stay():
    plain = type(V.choices)  # made and kept by the first use
    assert issubclass(plain, InductorChoices)
    with keep_order(()):
        assert type(V.choices) is KeepLanes
    assert type(V.choices) is plain
