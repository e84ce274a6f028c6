"""The pass that writes sums over rows as such that have one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.graphs.passes.test_passes import run
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, make_model
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass
from torch_hybrid.graphs.passes.own_functions import with_own_functions
from torch_hybrid.graphs.passes.row_sums import own_sums, row_sums

HERE: dict[str, Any] = {"impl": "torch", "devices": ("cpu",)}
SUMS = Pass("row_sums", partial(row_sums, **HERE))
OWN = own_sums(**HERE)
# What models write: norms, routers, streams, the choice among residuals.
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean_of_squares": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "mean_of_product": lambda x: (x.float() * x.float()).mean(dim=-1),
    "squares": lambda x: torch.mean(x.float().square(), -1),
    "mean": lambda x: x.mean(-1),
    "mean_of_streams": lambda x: x.mean(dim=-2),
    "sum": lambda x: x.sum(dim=(-1,), keepdim=True),
    "sum_of_streams": lambda x: torch.sum(x, 1, dtype=torch.float32),
    "norm": lambda x: torch.norm(x, p=2, dim=-1, keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, ord=2, dim=-1),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "softmax_of_streams": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "logsumexp_of_streams": lambda x: torch.logsumexp(x, dim=1),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],), x[0, 0], 1e-3),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],), x[0, 0], x[0, 1], 1e-3),
}
# Every form in which their steps sum (function, dims, dtype) is in the graph of another family.
WRITTEN_BY_OTHERS = {
    *("bailing_hybrid", "bamba", "deepseek_v3", "falcon_h1", "falcon_h1_norm", "inkling2", "jamba"),
    *("granitemoehybrid", "granitemoehybrid_dense", "kimi_k3", "kimi_linear", "lfm2", "lfm3"),
    *("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_next", "qwen3_next_dense", "recurrent_gemma", "zamba2"),
}
# What leaves elements as they are, or computes each by itself; ``amax`` and ``topk`` compare them.
_ELEMENTWISE = {
    *("abs", "add", "amax", "cat", "chunk", "clamp", "clamp_min", "clone", "concatenate"),
    *("contiguous", "copy_", "cos", "detach", "div", "div_", "embedding", "eq", "exp", "expand"),
    *("flatten", "gather", "gelu", "index", "log", "log_sigmoid", "masked_fill", "maximum", "mul"),
    *("narrow", "neg", "new_zeros", "pad", "pow", "reciprocal", "relu", "repeat", "reshape"),
    *("rsqrt", "rsub", "scatter_", "select", "sigmoid", "sign", "silu", "sin", "slice", "softplus"),
    *("split", "split_with_sizes", "sqrt", "square", "squeeze", "sub", "tanh", "tensor_split"),
    *("to", "topk", "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    *("where", "zeros_like"),
}


def rows(num_columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return (torch.randn(5, 3, num_columns, generator=generator) + 0.25).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [2, 40])
@pytest.mark.parametrize("name", WRITTEN)
def test_values(name: str, num_columns: int, dtype: torch.dtype):
    """In a graph, and of a model that runs as it is."""
    x, fn = rows(num_columns, dtype), WRITTEN[name]
    expected = fn(x)
    out, _, _ = run(fn, x, passes=(SUMS,))
    assert isinstance(out, Tensor)
    uncompiled = with_own_functions(fn, OWN)(x)
    for found in (out, uncompiled):
        error = torch.finfo(dtype).eps  # logs of what is nearly 1 are nearly 0
        torch.testing.assert_close(found, expected, atol=2 * error, rtol=2 * error)


def test_what_is_not_finite():
    x = rows(40, torch.float32)
    x[0], x[1, 0, 3], x[2, 0, 3] = -torch.inf, torch.inf, torch.nan
    for fn in (lambda x: x.logsumexp(-1), lambda x: x.softmax(-1), lambda x: x.log_softmax(-1)):
        for rows_of in (x, x[..., :5]):  # many and few
            found = with_own_functions(fn, OWN)(rows_of)
            torch.testing.assert_close(found, fn(rows_of), equal_nan=True)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As most models have it."""
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * hidden.to(x.dtype)


def test_text_of_a_norm():
    """Whose input is read as it was before it was cast."""
    x = rows(40, torch.bfloat16)
    _, graph, _ = run(norm, x, x[0, 0], passes=(SUMS,))
    assert_expected_inline(
        graph,
        """\
hidden = to(x, torch.float32)
power_sum_default = power_sum.default(x, 2, None)
unsqueeze = unsqueeze(power_sum_default, 2)
truediv = truediv(unsqueeze, 40)
to_2 = to(truediv, torch.float32)
add = add(to_2, 1e-06)
rsqrt = rsqrt(add)
hidden_1 = mul(hidden, rsqrt)
to_1 = to(hidden_1, torch.bfloat16)
mul_1 = mul(l_weight_, to_1)""",
    )


def test_text_of_a_norm_of_the_residual_stream():
    """The sum is not of what is added up, which is made where it is used."""

    def step(x: Tensor, out: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + out
        return residual, norm(residual, weight)

    x = rows(40, torch.float32)
    _, graph, _ = run(step, x, 2 * x, x[0, 0], passes=(SUMS,))
    assert "power_sum.default(x, 2, l_out_)" in graph
    x = x.bfloat16()
    _, graph, _ = run(step, x, 2 * x, x[0, 0], passes=(SUMS,))
    assert_expected_inline(
        graph,
        """\
residual = add(x, l_out_)
hidden = to(residual, torch.float32)
power_sum_default = power_sum.default(x, 2, l_out_)
unsqueeze = unsqueeze(power_sum_default, 2)
truediv = truediv(unsqueeze, 40)
to_2 = to(truediv, torch.float32)
add_1 = add(to_2, 1e-06)
rsqrt = rsqrt(add_1)
hidden_1 = mul(hidden, rsqrt)
to_1 = to(hidden_1, torch.bfloat16)
mul_1 = mul(l_weight_, to_1)""",
    )


def test_text_of_a_few():
    _, graph, _ = run(lambda x: x / x.sum(-1, keepdim=True), rows(3, torch.float32), passes=(SUMS,))
    assert_expected_inline(
        graph,
        """\
select = select(x, 2, 0)
to = to(select, torch.float32)
select_1 = select(x, 2, 1)
to_1 = to(select_1, torch.float32)
select_2 = select(x, 2, 2)
to_2 = to(select_2, torch.float32)
add = add(to, to_1)
add_1 = add(add, to_2)
unsqueeze = unsqueeze(add_1, 2)
to_3 = to(unsqueeze, torch.float32)
truediv = truediv(x, to_3)""",
    )


def test_what_a_graph_writes_to_is_read_as_it_was():
    def cast_before(x: Tensor) -> Tensor:
        wide = x.float()
        x.mul_(2)
        return wide.pow(2).mean(-1)

    def squared_before(x: Tensor) -> Tensor:
        squares = x.pow(2)
        x.mul_(2)
        return squares.mean(-1)

    for fn, dtype, read in (
        (cast_before, torch.bfloat16, "power_sum.default(wide, 2, None)"),
        (squared_before, torch.float32, "power_sum.default(squares, 1, None)"),
    ):
        out, graph, _ = run(fn, rows(40, dtype), passes=(SUMS,))
        torch.testing.assert_close(out, fn(rows(40, dtype)))
        assert read in graph


def test_other_devices_keep_theirs():
    for_gpus = Pass("row_sums", row_sums)
    _, graph, _ = run(WRITTEN["sum"], rows(40, torch.float32), passes=(for_gpus,))
    assert "power_sum" not in graph


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: x.cumsum(-1), "calls cumsum, whose order of additions depends on the graph"),
        (lambda x: x.std(-1), "calls std, whose"),
        (lambda x: x.norm(p=1, dim=-1), "norms of rows have p=2, the model has 1"),
        (lambda x: x.sum((-1, -2)), r"sums over several dims at once, \(-1, -2\) of \[5, 3, 40\]"),
        (lambda x: x.mean(), "sums over several dims at once, None of"),
    ],
)
def test_other_sums_are_refused(fn: Callable[[Tensor], Tensor], told: str):
    x = rows(40, torch.float32)
    with pytest.raises(th.UnsupportedError, match=told):
        with_own_functions(fn, OWN)(x)


class Looking(TorchDispatchMode):
    """Notes the names of ATen's ops on floating point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        first = first[0] if isinstance(first, list | tuple) and first else first
        if isinstance(first, Tensor) and first.is_floating_point() and func.namespace == "aten":
            self.seen.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_no_sum_is_left_in_a_step(family: str):
    """Of a graph, and of a model that runs as it is: all else goes element by element."""
    model = th.adapt(make_model(family, **FEWEST_LAYERS[family]).bfloat16())
    sizes = {"max_seqs": 4, "max_tokens": 192, "kv_tokens": 400, "batch_invariant": True}
    prompts = [[*range(3, 40)], [5]]
    plain = th.Runner(model, **sizes, compile=False)
    with Looking() as as_it_is:
        found = with_own_functions(plain.extend, OWN)(plain.new_sequences(2), prompts)
    assert as_it_is.seen <= _ELEMENTWISE
    if family in WRITTEN_BY_OTHERS:
        return
    with run_as_traced():
        traced = th.Runner(model, **sizes, passes=[*DEFAULT_PASSES, SUMS])
        logits = traced.extend(traced.new_sequences(2), prompts)
        with Looking() as in_graph:
            traced.extend(traced.new_sequences(2), prompts)
    torch.testing.assert_close(found, logits, atol=0.1, rtol=0.02)
    assert in_graph.seen <= _ELEMENTWISE
