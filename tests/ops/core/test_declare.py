"""Declared ops: what follows from the fields, and errors that say what came."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.errors import error_text
from torch_hybrid.ops.core import cpp_launcher
from torch_hybrid.ops.core.capability import NO_FEATURES, Capability, Implementation
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import (
    DECLARED,
    MUTATED,
    NO_DEFAULT,
    NOTHING,
    TRACED,
    Cpp,
    Dense,
    Index,
    Op,
    Pool,
    Rows,
    StatefulOp,
    Strided,
    define,
    like,
    made,
)
from torch_hybrid.ops.core.registration import REGISTERED


@dataclass(slots=True)
class DeclaredSum(StatefulOp):
    """Sum rows into slots of their sequences, and return each row times a factor."""

    x: Annotated[Tensor, Rows("D")]
    weight: Annotated[Tensor, Dense("2 * D", dtype=torch.float32)]
    bias: Annotated[Tensor | None, Dense("D")]
    state: Annotated[Tensor, Pool("D")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    factor: float = field(kw_only=True)
    sign: str = field(default="plus", kw_only=True)
    gate: Annotated[Tensor | None, Rows("D")] = field(default=None, kw_only=True)

    def check(self) -> None:
        """Raise ValueError for an unknown sign."""
        if self.sign not in ("plus", "minus"):
            raise ValueError(f"sign must be 'plus' or 'minus', got {self.sign!r}")


def add(x: DeclaredSum) -> Tensor:
    """Compute the op in torch."""
    for n, slot in enumerate(x.state_indices.tolist()):
        x.state[slot] += x.x[x.cu_seqlens[n] : x.cu_seqlens[n + 1]].sum(0)
    out = x.x * (x.factor if x.sign == "plus" else -x.factor)
    return out if x.bias is None else out + x.bias


ON_A_CPU = Capability(devices=frozenset({"cpu"}), limits={"width": 16})
IMPLEMENTATIONS = {"torch": Implementation(capability=ON_A_CPU, launcher=add)}
declared_sum = define(DeclaredSum, IMPLEMENTATIONS, returns=like("x"), limited={"width": "D"})
REGISTERED.pop("declared_sum")  # which other tests take for the package's


def given(**changes: object) -> dict[str, object]:
    values = {
        "x": torch.ones(3, 10)[:, :5],
        "weight": torch.ones(10),
        "bias": None,
        "state": torch.zeros(4, 5),
        "cu_seqlens": torch.tensor([0, 1, 3], dtype=torch.int32),
        "initial_indices": torch.zeros(2, dtype=torch.int32),
        "state_indices": torch.tensor([2, 3], dtype=torch.int32),
        "factor": 2.0,
        "impl": "torch",
    }
    return values | changes


def call(**changes: object) -> Tensor:
    return declared_sum(**given(**changes))  # type: ignore[arg-type]


def test_the_schema_follows():
    assert_expected_inline(
        str(torch.ops.torch_hybrid.declared_sum.default._schema).replace(", ", ",\n"),
        """\
torch_hybrid::declared_sum(Tensor x,
Tensor weight,
Tensor? bias,
Tensor(a!) state,
Tensor cu_seqlens,
Tensor initial_indices,
Tensor state_indices,
*,
float factor,
str sign="plus",
str impl,
Tensor? gate=None) -> Tensor""",
    )


def test_the_public_function_is_that_of_the_fields():
    signature = inspect.signature(declared_sum)
    positional = [*Declaration(DeclaredSum).kinds][:-1]
    assert [*signature.parameters] == [*positional, "factor", "sign", "impl", "gate"]
    assert signature.parameters["sign"].default == "plus"
    assert signature.parameters["x"].annotation is Tensor
    assert declared_sum.__doc__ == DeclaredSum.__doc__


def test_a_function_mode_sees_the_op_and_nothing_that_it_checks():
    """Each read of a shape would be a call of the mode, in every uncompiled step."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **kwargs or {})

    seen: list[str] = []
    inputs = given(bias=torch.ones(5), gate=torch.ones(3, 5))
    wrong = inputs | {"weight": torch.ones(9)}
    with Mode():
        declared_sum(**inputs)
        with pytest.raises(ValueError, match="weight must have shape"):
            declared_sum(**wrong)
        assert inputs["x"].shape == (3, 5)  # which it sees again, after an error too
    assert seen == ["declared_sum.default", "__get__"]


def test_values_and_mutation():
    state = torch.zeros(4, 5)
    out = call(state=state, bias=torch.ones(5))
    assert torch.equal(out, torch.full((3, 5), 3.0))
    assert state[2].unique().tolist() == [1.0]
    assert state[3].unique().tolist() == [2.0]


def test_a_launcher_hands_its_value_on():
    value = DeclaredSum(**given(impl="mine", sign="minus"))  # type: ignore[arg-type]
    out = declared_sum(value, impl="torch")  # type: ignore[call-arg,arg-type]
    assert torch.equal(out, torch.full((3, 5), -2.0))


@pytest.mark.parametrize("option", [{}, {"sign": "minus"}, {"gate": torch.ones(3, 5)}])
def test_opcheck(option: dict[str, object]):
    values = given(x=torch.ones(3, 5), **option)
    args = [values.pop(name) for name in [*Declaration(DeclaredSum).kinds][:-1]]
    torch.library.opcheck(torch.ops.torch_hybrid.declared_sum.default, args, values)


def test_it_compiles_whole():
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(sign="minus"), call(sign="minus"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": torch.ones(3)}, "x must have 2 dimensions, got [3]"),
        ({"x": torch.ones(3, 5).int()}, "x must be a floating point tensor, got torch.int32"),
        ({"x": torch.ones(5, 3).T}, "x must have contiguous rows, got strides [1, 3]"),
        ({"weight": torch.ones(5)}, "weight must have shape [10], got [5]"),
        (
            {"weight": torch.ones(10).double()},
            "weight must have dtype torch.float32, got torch.float64",
        ),
        ({"bias": torch.ones(4)}, "bias must have shape [5], got [4]"),
        ({"bias": torch.ones(10)[::2]}, "bias must be contiguous, got strides [2]"),
        ({"gate": torch.ones(2, 5)}, "gate must have shape [3, 5], got [2, 5]"),
        ({"state": torch.zeros(4, 6)}, "state must have shape [4, 5], got [4, 6]"),
        ({"sign": "times"}, "sign must be 'plus' or 'minus', got 'times'"),
        ({"impl": "tpu"}, "impl must be one of ['torch'], got 'tpu'"),
        (
            {"state_indices": torch.tensor([2, 9], dtype=torch.int32)},
            "state_indices must be in [0, 4), got 9",
        ),
    ],
)
def test_errors_say_what_came(changes: dict[str, object], text: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
        call(**changes)
    assert str(error.value) == text


def test_sizes_that_no_implementation_takes():
    wide = {"x": torch.ones(3, 17), "weight": torch.ones(34), "state": torch.zeros(4, 17)}
    with pytest.raises(ValueError, match="width 17 is over the limit 16"):
        call(**wide)


def test_a_traceback_shows_the_generated_line():
    with pytest.raises(ValueError, match="contiguous rows") as error:
        call(x=torch.ones(5, 3).T)
    assert "fail_rows('x', x)" in "".join(traceback.format_tb(error.tb))


def test_a_result_of_another_shape():
    @dataclass(slots=True)
    class DeclaredCount(Op):
        """Count the columns of each row."""

        x: Annotated[Tensor, Rows("D")]

    def count(x: DeclaredCount) -> Tensor:
        return torch.full((len(x.x),), x.x.shape[1])

    counted = define(
        DeclaredCount,
        {"torch": Implementation(capability=ON_A_CPU, launcher=count)},
        returns=made(lambda x: x.x.new_empty(len(x.x), dtype=torch.int64)),
    )
    REGISTERED.pop("declared_count")
    compiled = torch.compile(lambda x: counted(x, impl="torch") + 1, fullgraph=True, dynamic=True)
    assert compiled(torch.ones(3, 5)).tolist() == [6, 6, 6]


@dataclass(slots=True)
class DeclaredHeads(Op):
    """Scale the rows of heads."""

    x: Annotated[Tensor, Rows("D")]
    heads: Annotated[Tensor, Rows("H", "E", apart=2, counts="H")]
    rates: Annotated[Tensor, Dense("E", or_float32=True)]
    gate: Annotated[Tensor | None, Rows("D")]
    decay: Annotated[Tensor | None, Rows("H", dtype=torch.float32)]
    size: Annotated[int, NO_DEFAULT] = field(default=32, kw_only=True)


def scale(x: DeclaredHeads) -> Tensor:
    """Compute the op in torch."""
    return x.x * x.size


declared_heads = define(
    DeclaredHeads,
    {"torch": Implementation(capability=ON_A_CPU, launcher=scale)},
    returns=like("x"),
)
REGISTERED.pop("declared_heads")


def given_heads(**changes: Tensor) -> dict[str, Any]:
    values = {
        "x": torch.ones(3, 10).bfloat16(),
        "heads": torch.ones(2, 3, 5).bfloat16().transpose(0, 1),
        "rates": torch.ones(5).bfloat16(),
        "gate": None,
        "decay": None,
    }
    return values | changes


def test_a_default_may_be_the_public_functions_alone():
    assert (out := declared_heads(**given_heads(), impl="torch")).eq(32).all()
    assert torch.equal(declared_heads(**given_heads(), size=32, impl="torch"), out)
    schema = str(torch.ops.torch_hybrid.declared_heads.default._schema)
    assert "*, int size, str impl)" in schema


def test_rows_may_have_a_dtype_of_their_own():
    declared_heads(**given_heads(decay=torch.ones(3, 2)), impl="torch")
    with pytest.raises(ValueError, match=r"^decay must have dtype torch.float32, got .*bfloat16"):
        declared_heads(**given_heads(decay=torch.ones(3, 2).bfloat16()), impl="torch")


def test_parameters_may_be_float32():
    declared_heads(**given_heads(rates=torch.ones(5)), impl="torch")
    with pytest.raises(ValueError, match=r"^rates must have dtype torch.bfloat16, got .*float64"):
        declared_heads(**given_heads(rates=torch.ones(5).double()), impl="torch")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": torch.ones(3, 5)}, "heads must have 3 dimensions, got [3, 5]"),
        ({"heads": torch.ones(3, 2, 4)}, "heads must have shape [3, 2, 5], got [3, 2, 4]"),
        ({"rates": torch.ones(1, 5)}, "rates must have 1 dimensions, got [1, 5]"),
        (
            {"heads": torch.ones(3, 5, 2).bfloat16().mT},
            "heads must have contiguous rows, got strides [10, 1, 2]",
        ),
    ],
)
def test_heads_may_lie_apart_and_sizes_be_of_a_later_field(changes: dict[str, Tensor], text: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is what is compared)
        declared_heads(**given_heads(**changes), impl="torch")
    assert str(error.value) == text


def launcher_of(monkeypatch: pytest.MonkeyPatch, integers: str) -> Callable[..., Any]:
    """Make the launcher of a kernel whose struct declares these integers."""
    tensors = ("x", "heads", "rates", "gate", "decay", "out")
    declared = [(name, "tensor") for name in tensors]
    declared += [(name, "integer") for name in integers.split()]
    monkeypatch.setattr(cpp_launcher, "declared_fields", lambda *_: declared)
    cpp = Cpp("H=num_heads D//H=head_dim")
    return cpp_launcher.load_cpp(Declaration(DeclaredHeads), like("x"), cpp, Path("no.cpp"))


def test_the_call_of_a_cpp_kernel(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cpp_launcher, "kernel", lambda *_, **__: lambda *call: [calls.append(call)])
    launch = launcher_of(
        monkeypatch,
        "num_tokens num_heads head_dim heads_stride heads_head_stride gate_stride is_bf16 "
        "wide_rates wide_gate",
    )
    wide = {"gate": torch.ones(3, 12)[:, :10], "rates": torch.ones(5)}
    out = [launch(DeclaredHeads(**given_heads(**given), impl="cpp")) for given in ({}, wide)]
    assert [call[5] is result for call, result in zip(calls, out, strict=True)] == [True, True]
    assert [call[6:] for call in calls] == [
        (3, 2, 5, 5, 15, 0, True, False, False),
        (3, 2, 5, 5, 15, 12, True, True, True),
    ]


def test_a_cpp_kernel_takes_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TypeError, match=r"no\.cpp takes head_size, which no"):
        launcher_of(monkeypatch, "head_size")


@dataclass(slots=True)
class Tallied(StatefulOp):
    """Base whose fields are given by name, after those of the op."""

    tally: Annotated[Tensor | None, Pool("M", "D + 1")] = field(default=None, kw_only=True)
    counts: Annotated[Tensor | None, Index("N")] = field(default=None, kw_only=True)

    def features(self) -> frozenset[str]:
        """List what the arguments want."""
        return NO_FEATURES if self.tally is None else frozenset({"tally"})


@dataclass(slots=True)
class DeclaredTally(Tallied):
    """Double rows, and tally calls in slots of a pool that may be none."""

    x: Annotated[Tensor, Rows("D")]
    bias: Annotated[Tensor, Pool("D", counts=False)]
    state: Annotated[Tensor, Pool("D")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]

    def check_indices(self) -> None:
        """Raise ValueError for a negative count."""
        if self.counts is not None and int(self.counts.min()) < 0:
            raise ValueError(f"counts must be at least 0, got {self.counts.tolist()}")


def tally_calls(x: DeclaredTally) -> Tensor:
    """Compute the op in torch."""
    x.state[x.state_indices] += 1
    if x.tally is not None and x.counts is not None:
        x.tally[x.state_indices] += x.counts[:, None, None]
    return x.x * 2


declared_tally = define(
    DeclaredTally,
    {
        "torch": Implementation(
            capability=Capability(devices=frozenset({"cpu"}), features=frozenset({"tally"})),
            launcher=tally_calls,
        ),
        "plain": Implementation(capability=ON_A_CPU, launcher=tally_calls),
    },
    returns=like("x"),
)
REGISTERED.pop("declared_tally")


def given_tally(**changes: object) -> dict[str, Any]:
    values: dict[str, Any] = {
        "x": torch.ones(2, 5),
        "bias": torch.zeros(4, 5),
        "state": torch.zeros(4, 5),
        "state_indices": torch.tensor([1, 3], dtype=torch.int32),
        "impl": "torch",
    }
    return values | changes


def of_tally(**changes: object) -> dict[str, Any]:
    tally, counts = torch.zeros(4, 2, 6), torch.tensor([2, 3], dtype=torch.int32)
    return given_tally(**{"tally": tally, "counts": counts} | changes)


def test_a_pool_may_be_none():
    assert_expected_inline(
        str(torch.ops.torch_hybrid.declared_tally.default._schema),
        """torch_hybrid::declared_tally(Tensor x, Tensor(a!) bias, Tensor(b!) state, Tensor state_indices, *, str impl, Tensor(c!)? tally=None, Tensor? counts=None) -> Tensor""",  # noqa: E501
    )
    for values in (given_tally(), of_tally()):
        options = {name: values.pop(name) for name in ("tally", "counts") if name in values}
        args = [values.pop(name) for name in ("x", "bias", "state", "state_indices")]
        overload = torch.ops.torch_hybrid.declared_tally.default
        torch.library.opcheck(overload, args, values | options)


def test_a_pool_that_may_be_none_is_mutated_by_compiled_code():
    def run(x: Tensor, state: Tensor, slots: Tensor, **drafts: Tensor) -> Tensor:
        out = declared_tally(x * 2, torch.zeros_like(state), state, slots, impl="torch", **drafts)
        return out + state.sum() + sum(each.sum() for each in drafts.values())

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for values in (given_tally(), of_tally()):
        drafts = {name: values[name] for name in ("tally", "counts") if name in values}
        state, slots = values["state"], values["state_indices"]
        own = {name: tensor.clone() for name, tensor in drafts.items()}
        expected = run(values["x"], own_state := state.clone(), slots, **own)
        assert torch.equal(compiled(values["x"], state, slots, **drafts), expected)
        assert torch.equal(state, own_state)
        for name, tensor in drafts.items():
            assert torch.equal(tensor, own[name])
        if drafts:
            assert drafts["tally"][[1, 3], 0, 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tally": torch.zeros(4, 6)}, "tally must have 3 dimensions, got [4, 6]"),
        ({"tally": torch.zeros(3, 2, 6)}, "tally must have shape [4, 2, 6], got [3, 2, 6]"),
        ({"tally": torch.zeros(4, 2, 5)}, "tally must have shape [4, 2, 6], got [4, 2, 5]"),
        ({"bias": torch.zeros(3, 5)}, "bias must have shape [4, 5], got [3, 5]"),
        ({"counts": torch.ones(2)}, "counts must have dtype torch.int32, got torch.float32"),
        (
            {"counts": torch.tensor([-1, 0], dtype=torch.int32)},
            "counts must be at least 0, got [-1, 0]",
        ),
        ({"impl": "plain"}, "impl 'plain' cannot take these arguments: it has no tally"),
    ],
)
def test_errors_of_a_pool_that_may_be_none(changes: dict[str, object], text: str):
    with pytest.raises(ValueError, match=re.escape(text)):
        declared_tally(**of_tally(**changes))


def test_what_arguments_do_not_want_no_implementation_needs():
    assert declared_tally(**given_tally(impl="plain")).eq(2).all()


@dataclass(slots=True)
class DeclaredLookUp(Op):
    """Look up the rows of a table that numbers name, plus an addend."""

    numbers: Annotated[Tensor, Dense("T", dtype=torch.int64)]
    table: Annotated[Tensor, Strided("R", "D")]
    addend: Annotated[Tensor | None, Strided("*table.shape")] = None
    factor: Annotated[float, NO_DEFAULT] = field(default=1.0, kw_only=True)

    def check_form(self) -> None:
        """Raise ValueError unless numbers are a vector."""
        if self.numbers.ndim != 1:
            raise ValueError(f"numbers must be [T], got {list(self.numbers.shape)}")


def look_up(x: DeclaredLookUp) -> Tensor:
    """Compute the op in torch."""
    table = x.table if x.addend is None else x.table + x.addend
    return table[x.numbers] * x.factor


declared_look_up = define(
    DeclaredLookUp,
    {"torch": Implementation(capability=ON_A_CPU, launcher=look_up)},
    returns=made(lambda x: x.table.new_empty(len(x.numbers), x.table.shape[1])),
    limited={"width": "table.shape[1]"},
    floats=frozenset(),
)
REGISTERED.pop("declared_look_up")


def test_a_table_that_lies_anyhow():
    table = torch.arange(12.0).view(4, 3).T
    out = declared_look_up(torch.tensor([2, 0]), table, table, factor=2.0, impl="torch")
    assert out.tolist() == [[8, 20, 32, 44], [0, 12, 24, 36]]


def test_a_default_that_the_schema_has_not():
    assert_expected_inline(
        str(torch.ops.torch_hybrid.declared_look_up.default._schema),
        """torch_hybrid::declared_look_up(Tensor numbers, Tensor table, Tensor? addend=None, *, float factor, str impl) -> Tensor""",  # noqa: E501
    )
    out = declared_look_up(torch.tensor([1]), torch.ones(3, 2), impl="torch")
    assert out.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"numbers": torch.ones(2, 1)}, "numbers must be [T], got [2, 1]"),
        ({"numbers": torch.ones(2)}, "numbers must have dtype torch.int64, got torch.float32"),
        ({"table": torch.ones(3)}, "table must have 2 dimensions, got [3]"),
        ({"addend": torch.ones(3, 4)}, "addend must have shape [3, 2], got [3, 4]"),
        ({"addend": torch.ones(3, 2).half()}, "addend must have dtype torch.float32, got "),
        ({"table": torch.ones(3, 2).int()}, "impl 'torch' takes ['torch.bfloat16', "),
        ({"table": torch.ones(3, 17)}, "width 17 is over the limit 16"),
    ],
)
def test_errors_of_tensors_of_integers_and_of_any_strides(changes: dict[str, Tensor], text: str):
    values = {"numbers": torch.tensor([1]), "table": torch.ones(3, 2)} | changes
    with pytest.raises(ValueError, match=re.escape(text)):
        declared_look_up(**values, impl="torch")


def test_layouts_of_the_last_dimension_wide_dtypes_and_two_pools():
    @dataclass(slots=True)
    class DeclaredScores(Op):
        """Rows of heads, which may lie apart, times weights."""

        q: Annotated[Tensor, Rows("H", "D", last_dim=True)]
        weights: Annotated[Tensor, Dense("T", "H", dtype="work")]
        table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
        slots: Annotated[Tensor, Pool("D")]
        pages: Annotated[Tensor, Pool("...")]
        more: Annotated[Tensor, Pool("D", size="P")]
        taps: Annotated[Tensor | None, Dense("T", "K", "2 * K")] = field(default=None, kw_only=True)

        def check(self) -> None:
            """Raise ValueError for pages of several dimensions."""
            if self.pages.ndim > 2:
                raise ValueError(f"pages must have at most 2 dimensions, got {self.pages.ndim}")

    def score(x: DeclaredScores) -> Tensor:
        return x.q * x.weights[..., None]

    scores = define(
        DeclaredScores,
        {"torch": Implementation(capability=ON_A_CPU, launcher=score)},
        returns=like("q"),
        names_ndim=True,
    )
    REGISTERED.pop("declared_scores")
    q, table = torch.ones(3, 2, 8), torch.zeros(2, 6, dtype=torch.int32)
    apart, wide = q[..., :4], torch.ones(3, 2)
    pools = torch.zeros(5, 4), torch.zeros(3), torch.zeros(7, 4)
    assert scores(apart, wide, table[:, :3], *pools, impl="torch").shape == (3, 2, 4)

    def failing(
        q: Tensor, weights: Tensor, table: Tensor, taps: Tensor | None = None, *pages: int
    ) -> str:
        slots, more = (q.new_zeros(num, q.shape[-1]) for num in (5, 7))
        pools = slots, q.new_zeros(pages), more
        return error_text(ValueError, scores, q, weights, table, *pools, impl="torch", taps=taps)

    errors = [
        failing(q[0], wide, table),
        failing(q[..., ::2], wide, table),
        failing(q, wide, table[:, ::2]),
        failing(q.bfloat16(), wide.bfloat16(), table),
        failing(q.double(), wide, table),
        failing(q, wide, table, torch.ones(3, 4)),
        failing(q, wide, table, torch.ones(3, 4, 4)),
        failing(q, wide, table, None, 3, 4, 5),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
q must have 3 dimensions, got 2
q must have a contiguous last dim, got (16, 8, 2)
table must have a contiguous last dim, got (6, 2)
weights must have dtype torch.float32, got torch.bfloat16
weights must have dtype torch.float64, got torch.float32
taps must have 3 dimensions, got 2
taps must have shape [3, 4, 8], got [3, 4, 4]
pages must have at most 2 dimensions, got 3""",
    )


@dataclass(slots=True)
class DeclaredFill(Op):
    """Set the places of tensors of any number to their number in the sequence."""

    tensors: Annotated[Sequence[Tensor], MUTATED]
    others: Sequence[Tensor | None]
    places: Annotated[Tensor, Index("n", counts=True)]
    more: Sequence[Tensor] | None = field(default=None, kw_only=True)

    def check_indices(self) -> None:
        """Raise ValueError for a place that some tensor has not."""
        if any(max(self.places.tolist()) >= len(x) for x in self.tensors):
            raise ValueError("a place is out of range")


def fill(x: DeclaredFill) -> None:
    """Compute the op in torch."""
    for number, tensor in enumerate(x.tensors, len(x.more or ())):
        tensor[x.places.long()] = number


declared_fill = define(
    DeclaredFill,
    {"torch": Implementation(capability=ON_A_CPU, launcher=fill)},
    returns=NOTHING,
    floats=frozenset(),
)
REGISTERED.pop("declared_fill")


def test_tensors_of_any_number_and_a_result_of_nothing():
    tensors = [torch.full((3,), 9.0), torch.full((4, 1), 9)]
    places = torch.tensor([2, 0], dtype=torch.int32)
    declared_fill(tensors, [], places, impl="torch")
    assert [x.flatten().tolist() for x in tensors] == [[0, 9, 0], [1, 9, 1, 9]]
    with pytest.raises(ValueError, match="a place is out of range"):
        declared_fill(tensors, [], places + 1, impl="torch")
    with pytest.raises(ValueError, match=r"places must have dtype torch\.int32"):
        declared_fill(tensors, [], places.long(), impl="torch")
    op = torch.ops.torch_hybrid.declared_fill.default
    torch.library.opcheck(op, (tensors, [], places), {"impl": "torch"})
    declared_fill(tensors, [None, places], places, more=tensors, impl="torch")
    assert tensors[0].tolist() == [2, 9, 2]
    assert_expected_inline(
        str(op._schema),
        """torch_hybrid::declared_fill(Tensor(a!)[] tensors, Tensor?[] others, Tensor places, *, Tensor[]? more=None, str impl) -> ()""",  # noqa: E501
    )


def test_what_was_planned_reaches_those_that_plan():
    @dataclass(slots=True)
    class DeclaredPlan(Op):
        """Return the sum of what was planned, beside each row."""

        x: Annotated[Tensor, Rows("D")]
        planned: Sequence[Tensor] | None = field(default=(), kw_only=True)

    def plan_sum(x: DeclaredPlan) -> Tensor:
        return x.x + sum(x.planned or ())

    def hand_on(x: DeclaredPlan) -> Tensor:
        return planned_op(x, impl="may")

    plans = Implementation(capability=ON_A_CPU, launcher=plan_sum, planner="module:plan")
    planned_op = define(
        DeclaredPlan,
        {
            "must": plans,
            "may": replace(plans, needs_plan=False),
            "hands on": replace(plans, launcher=hand_on),
            "torch": Implementation(capability=ON_A_CPU, launcher=plan_sum),
        },
        returns=like("x"),
    )
    REGISTERED.pop("declared_plan")
    schema = torch.ops.torch_hybrid.declared_plan.default._schema
    assert str(schema).endswith("(Tensor x, *, str impl, Tensor[]? planned=None) -> Tensor")
    x, planned = torch.zeros(2, 3), [torch.tensor(4.0)]
    assert planned_op(x, impl="must", planned=planned).eq(4).all()
    assert planned_op(x, impl="hands on", planned=planned).eq(4).all()
    assert planned_op(x, impl="may").eq(0).all()
    with pytest.raises(ValueError, match="impl 'must' must be given what its planner planned"):
        planned_op(x, impl="must")
    with pytest.raises(ValueError, match="impl 'torch' plans nothing, got 1 planned tensors"):
        planned_op(x, impl="torch", planned=planned)


def test_a_pool_whose_dtype_the_op_checks():
    @dataclass(slots=True)
    class DeclaredCache(Op):
        """Add the number of a pool's rows, of any dtype, to each element."""

        x: Annotated[Tensor, Rows("D")]
        kept: Annotated[Tensor, Pool("D", dtype="any")]

        def features(self) -> frozenset[str] | None:
            """List what the pool wants; one of float32 asks for nothing."""
            if self.kept.dtype == torch.float32:
                return None
            return frozenset({"bytes"} if self.kept.dtype == torch.uint8 else ())

    plain = Implementation(
        capability=replace(ON_A_CPU, features=frozenset({"bytes"})),
        launcher=lambda x: x.x + len(x.kept),
    )
    many = replace(plain, capability=replace(plain.capability, only_with=frozenset({"bytes"})))
    op = define(DeclaredCache, {"torch": plain, "bytes": many}, returns=like("x"))
    REGISTERED.pop("declared_cache")
    x, kept = torch.zeros(2, 3), torch.zeros(5, 3, dtype=torch.uint8)
    assert op(x, kept, impl="torch").eq(5).all()
    assert op(x, kept, impl="bytes").eq(5).all()
    # Who asks for nothing may call what "auto" would not take.
    assert op(x, kept.float(), impl="bytes").eq(5).all()
    with pytest.raises(ValueError, match="it is for bytes alone"):
        op(x, kept.double(), impl="bytes")
    with pytest.raises(ValueError, match="kept must have shape"):
        op(x, kept[:, :2].contiguous(), impl="torch")


def test_ids_of_either_width_and_numbers_of_an_option():
    @dataclass(slots=True)
    class DeclaredIds(Op):
        """Add the first of some numbers to each element, and ids, which have two dtypes."""

        x: Annotated[Tensor, Rows("D")]
        ids: Annotated[Tensor, Dense("T", "D", dtype=(torch.int32, torch.int64))]
        numbers: Sequence[float] | None = field(default=None, kw_only=True)

    first = Implementation(
        capability=ON_A_CPU,
        launcher=lambda x: x.x + x.ids + (0 if x.numbers is None else x.numbers[0]),
    )
    op = define(DeclaredIds, {"torch": first}, returns=like("x"))
    REGISTERED.pop("declared_ids")
    x, ids = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.int64)
    assert op(x, ids, impl="torch").eq(1).all()
    assert op(x, ids.int(), numbers=(2.5, 1.0), impl="torch").eq(3.5).all()
    with pytest.raises(ValueError, match=r"ids must have dtype torch\.int32 or torch\.int64, got"):
        op(x, x, impl="torch")
    schema = str(torch.ops.torch_hybrid.declared_ids.default._schema)
    assert schema.endswith("(Tensor x, Tensor ids, *, float[]? numbers=None, str impl) -> Tensor")


def test_a_dtype_may_be_none_and_rows_be_of_any():
    @dataclass(slots=True)
    class DeclaredCast(Op):
        """Convert rows to the dtype of a pool, or to another."""

        x: Annotated[Tensor, Rows("D", dtype="any")]
        kept: Annotated[Tensor, Pool("D")]
        dtype: torch.dtype | None = field(default=None, kw_only=True)

    plain = Implementation(
        capability=ON_A_CPU, launcher=lambda x: x.x.to(x.dtype or x.kept.dtype, copy=True)
    )
    returns = made(lambda x: x.x.new_empty(x.x.shape, dtype=x.dtype or x.kept.dtype))
    op = define(DeclaredCast, {"torch": plain}, returns=returns)
    REGISTERED.pop("declared_cast")
    schema = str(torch.ops.torch_hybrid.declared_cast.default._schema)
    assert schema.endswith(
        "(Tensor x, Tensor(a!) kept, *, ScalarType? dtype=None, str impl) -> Tensor"
    )
    x, kept = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(5, 3)
    assert op(x, kept, impl="torch").dtype == torch.float32
    assert op(x, kept, dtype=torch.float64, impl="torch").dtype == torch.float64


@dataclass(slots=True)
class DeclaredTwice(Op):
    """Add rows to themselves, so many times."""

    x: Annotated[Tensor, Rows("D")]
    times: Annotated[int | None, TRACED] = field(default=None, kw_only=True)


def twice_in_the_open(x: DeclaredTwice) -> Tensor:
    return x.x * (x.times or 2)


OPEN = {"seen": Implementation(capability=ON_A_CPU, launcher=twice_in_the_open, is_traced=True)}
declared_twice = define(DeclaredTwice, OPEN, returns=like("x"))
REGISTERED.pop("declared_twice")


@pytest.fixture
def is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTERED, "declared_twice", OPEN)


@pytest.mark.usefixtures("is_registered")
def test_a_compiler_sees_within_a_traced_implementation():
    schema = str(torch.ops.torch_hybrid.declared_twice.default._schema)
    assert schema == "torch_hybrid::declared_twice(Tensor x, *, str impl) -> Tensor"
    x, seen = torch.ones(3, 5), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.extend(node.name for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    run = torch.compile(declared_twice, backend=backend, fullgraph=True)
    assert torch.equal(run(x, impl="seen", times=3), 3 * x)
    assert seen == ["mul"]
    with pytest.raises(ValueError, match="x must have 2 dimensions"):
        declared_twice(x[0], impl="seen")


@pytest.mark.usefixtures("is_registered")
def test_a_field_of_a_type_that_no_schema_has():
    @dataclass(slots=True)
    class OfWords(StatefulOp):
        x: Annotated[Tensor, Rows("D")]
        words: list[str]

    with pytest.raises(TypeError, match=r"^field words of OfWords must .*, got list\[str\]$"):
        define(OfWords, IMPLEMENTATIONS, returns=like("x"))


def test_a_value_is_a_call_with_all_its_fields():
    value: Any = DeclaredTwice(torch.ones(3, 5), impl="seen", times=4)
    assert torch.equal(declared_twice(value), torch.full((3, 5), 4.0))
    value.impl = "none"
    with pytest.raises(ValueError, match="impl must be one of"):
        declared_twice(value)


def declare_times(factor: int) -> Callable[..., Tensor]:
    """Run a cell of a notebook, which declares an op."""

    @dataclass(slots=True)
    class DeclaredTimes(Op):
        """Multiply rows by a number."""

        x: Annotated[Tensor, Rows("D")]

    launchers = {"torch": Implementation(capability=ON_A_CPU, launcher=lambda x: x.x * factor)}
    times = define(DeclaredTimes, launchers, returns=like("x"))
    REGISTERED.pop("declared_times")
    return times


def test_a_declaration_that_runs_again_replaces_the_earlier(monkeypatch: pytest.MonkeyPatch):
    x = torch.ones(2, 3)
    for factor in (2, 3):
        times = declare_times(factor)
        compiled = torch.compile(lambda x, times=times: times(x, impl="torch") + 1, fullgraph=True)
        assert torch.equal(times(x, impl="torch"), x * factor)
        assert torch.equal(compiled(x), x * factor + 1)
        torch.library.opcheck(torch.ops.torch_hybrid.declared_times, (x,), {"impl": "torch"})
    monkeypatch.setattr(DECLARED["declared_times"].cls, "__module__", "another")
    with pytest.raises(ValueError, match=r"'declared_times' of .* needs another name: another has"):
        declare_times(4)
    assert torch.equal(times(x, impl="torch"), x * 3)
