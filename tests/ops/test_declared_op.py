"""What every declared op is held to, from its fields and one valid call of it.

Inputs are those of ``tests/ops/every_op.py``: float32, sequences of several lengths, one of them
empty, rows of padding behind. Indices out of range are ``tests/hostile/test_indices.py``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops.contract import (
    assert_same_bits,
    assert_within_budget,
    impls_on,
    skip_reason,
)
from tests.ops.declared import oracle_of
from tests.ops.every_op import CALLS, Call, call_of, op_of
from tests.ops.pages import offsets
from tests.ops.triton_interpreter import Interpreter, needs_triton
from torch_hybrid.ops.core.declare import DECLARED, Pool, Rows, Strided
from torch_hybrid.ops.core.registration import NAMESPACE, REGISTERED

CALLED = {name: call_of(name) for name in CALLS}
DECLARATIONS = {name: DECLARED[op_of(name)] for name in CALLS if op_of(name) in DECLARED}
SCHEMAS = Path(__file__).with_name("schemas.txt")
# What rows of no sequence hold, where a result has not 0: places of blocks that were not chosen,
# and the sum of no exponentials.
PADDING: dict[str, tuple[float, ...]] = {
    "select_blocks": (-1,),
    "pooled_selection_step": (-1,),
    "paged_attention_with_lse": (0, -math.inf),
    "ragged_attention_with_lse": (0, -math.inf),
}
PAIRS = {"kv"}  # pools of keys and of values, which stand before pages
# They return states and gradients of weights beside rows; tests/functional has their oracle.
TRAINED = {op for op in DECLARATIONS if op.endswith(("_forward", "_backward"))}
OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
COUNTS = {*OFFSETS, "accepted"}  # 0 where a sequence has nothing to do

# Implementations of which a library chooses the order of sums by how far apart rows lie; "triton"
# leaves some products to it.
BY_STRIDES = {("linear", "torch"), ("linear", "triton")}
# Those of which it chooses it by how many rows there are.
BY_COMPANY = {
    ("gated_delta_step, drafts", "composed"),
    ("gated_delta_step, drafts", "torch"),  # its parts by torch
    ("gated_pooling", "torch"),
    ("ssd_step, drafts", "composed"),
}
COMPUTED = {("pooled_selection_step", "block_keys")}  # pools of a model's dtype, not of copied rows


def forms(*, of: Callable[[str], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Parametrize a test over the declared ops that it is about, in each implementation."""
    found = [
        pytest.param(op, impl, id=f"{op}, {impl}", marks=pytest.mark.skipif(bool(why), reason=why))
        for op in DECLARATIONS
        if of(op)
        for impl, why in impls_here(op).items()
    ]
    return pytest.mark.parametrize(("op", "impl"), found)


def impls_here(name: str) -> dict[str, str]:
    """The implementations on a CPU, interpreted ones too; each with why it cannot run, or ""."""
    features = DECLARATIONS[name].cls(**CALLED[name].given).features()
    known = REGISTERED[op_of(name)]
    return {
        impl: skip_reason(known[impl], "cpu") or "" for impl in impls_on("cpu", known, features)
    }


def has_sequences(op: str) -> bool:
    return not DECLARATIONS[op].kinds.keys().isdisjoint(OFFSETS)


def has_drafts(op: str) -> bool:
    return "records" in CALLED[op].given


def overload(op: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), op_of(op)).default


def tensors(call: Call) -> dict[str, Tensor]:
    return {name: x for name, x in call.given.items() if isinstance(x, Tensor)}


def kinds_of(call: Call) -> Mapping[str, Any]:
    return DECLARED[call.op.__name__].kinds


def cut(call: Call, *, rows: int, seqs: int | None = None) -> Call:
    """Keep the first rows of a call, and its first sequences."""
    given, kinds = dict(call.given), kinds_of(call)
    sizes = {kinds[named_by(call)].dims[0]: rows}
    if seqs is not None:
        sizes |= {"N": seqs, "N + 1": seqs + 1, "num_offsets": seqs + 1, "num_offsets - 1": seqs}
    for name in tensors(call):
        for axis, letter in enumerate(kinds[name].dims):
            if letter in sizes:
                given[name] = given[name].narrow(axis, 0, sizes[letter]).clone()
    return replace(call, given=given)


def named_by(call: Call) -> str:
    """Find the tensor whose rows an op is about."""
    kinds = kinds_of(call)
    named = (name for name, kind in kinds.items() if kind.dims[0] == "T")
    return next(named, None) or next(n for n, kind in kinds.items() if not isinstance(kind, Pool))


def ends_of(call: Call) -> Tensor | None:
    """Find the offsets of a call's sequences, if it has such."""
    return next((call.given[name] for name in OFFSETS if name in call.given), None)


def pools(call: Call) -> dict[str, Tensor]:
    kinds = kinds_of(call)
    return {n: x for n, x in tensors(call).items() if isinstance(kinds[n], Pool)}


def run(call: Call, impl: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and the pools afterwards; the call's own tensors stay as they are."""
    return run_in_place(call.changed(), impl)


def run_in_place(call: Call, impl: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    return results(call.run(impl)), pools(call)


def results(returned: Any) -> list[Tensor]:
    return [x for x in tree_leaves(returned) if x is not None]


# ---- as the compiler sees it -------------------------------------------------------------------


def test_schemas() -> None:
    """Rewrite the table with ``python -m tests.ops.test_declared_op``."""
    assert SCHEMAS.read_text() == schemas()


def schemas() -> str:
    return "".join(f"{overload(op)._schema}\n" for op in sorted({*map(op_of, CALLS)}))


@forms()
def test_opcheck(op: str, impl: str) -> None:
    call = CALLED[op].changed()
    for pool in call.mutated():
        pool.nan_to_num_()  # opcheck compares what it leaves, and NaN is no equal of NaN
    given = {**call.given, "impl": impl}
    arguments = {each.name: each for each in overload(op)._schema.arguments}
    defaults = inspect.signature(call.op).parameters
    full = {n: given[n] if n in given else defaults[n].default for n in arguments}
    args = tuple(full[n] for n, each in arguments.items() if not each.kwarg_only)
    named = {n: full[n] for n, each in arguments.items() if each.kwarg_only}
    torch.library.opcheck(overload(op), args, named)


@pytest.mark.parametrize("op", DECLARATIONS)
def test_one_trace_serves_all_sizes(op: str) -> None:
    """All implementations, each a call of one graph."""
    call = CALLED[op]
    impls = [impl for impl, why_not in impls_here(op).items() if not why_not]
    names = [n for n, x in call.given.items() if any(isinstance(t, Tensor) for t in tree_leaves(x))]
    options = {n: x for n, x in call.given.items() if n not in {*names, "impl"}}

    def step(*args: Any) -> list[Tensor]:
        given = dict(zip(names, args, strict=True)) | options
        return [x + 1 for impl in impls for x in results(call.op(**given, impl=impl))]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    with _config.patch(use_duck_shape=False):
        for i, each in enumerate(sizes(call)):
            given = each.changed().given
            with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
                compiled(*(given[name] for name in names))


def sizes(call: Call) -> Iterator[Call]:
    """The call, and smaller ones of it, with more slots or pages in their pools."""
    yield call
    grown = {n: x.repeat_interleave(2, int(n in PAIRS)) for n, x in pools(call).items()}
    call = replace(call, given={**call.given, **grown})
    if (ends := ends_of(call)) is None:
        yield cut(call, rows=2)
        return
    for seqs in (3, 2):
        yield cut(call, rows=max(2, int(ends[seqs])), seqs=seqs)


# ---- memory ------------------------------------------------------------------------------------


@forms()
def test_rows_may_lie_apart(op: str, impl: str) -> None:
    """What is beside a row is not read, nor what is beside a head where heads may lie apart too."""
    call, kinds = CALLED[op], DECLARATIONS[op].kinds
    may_be = {n: k.last_dim for n, k in kinds.items() if isinstance(k, Rows) or k.last_dim}
    rows = {n: x for n, x in tensors(call).items() if n in may_be and x.is_floating_point()}
    dense = call.changed(**{n: x.contiguous() for n, x in rows.items()})
    outs, left = run(dense, impl)
    lying = {n: apart(x, of_heads=may_be[n]) for n, x in rows.items()}
    spread, spread_left = run_in_place(call.changed(**lying), impl)
    equal = torch.testing.assert_close if (op, impl) in BY_STRIDES else assert_same_bits
    for a, b in zip([*outs, *left.values()], [*spread, *spread_left.values()], strict=True):
        equal(b, a)


def apart(x: Tensor, *, of_heads: bool) -> Tensor:
    """Copy x so that its rows, or those of its heads, are parts of wider ones, NaN beside them."""
    flat = x if of_heads else x.flatten(1)
    wide = torch.cat([flat, torch.full_like(flat, torch.nan)], -1)
    return (
        wide[..., : flat.shape[-1]].view_as(x)
        if of_heads
        else (wide[:, : flat.shape[1]].unflatten(1, x.shape[1:]))
    )


def poisoned(call: Call) -> Call:
    """Fill the slots and pages that no sequence reads, and rows of no sequence."""
    given, kinds = call.changed().given, kinds_of(call)
    for name, pool in pools(call).items():
        reads = given["initial_indices"] if is_of_slots(call, name) else pages_of(call, name)
        poison = torch.nan if pool.is_floating_point() else -(2**40)
        by_slot(name, given[name])[~is_in(reads, by_slot(name, pool))] = poison
    end = int(ends_of(call)[-1])
    for name in tensors(call):
        if isinstance(kinds[name], Rows):
            given[name][end:] = torch.nan
    return replace(call, given=given)


@forms(of=lambda op: has_sequences(op) and op not in TRAINED)
def test_what_no_sequence_has_is_neither_read_nor_written(op: str, impl: str) -> None:
    """Rows of padding come out as nothing, and slots that no sequence writes keep their bits."""
    call = poisoned(CALLED[op])
    outs, left = run(call, impl)
    expected, written = run(CALLED[op], impl)
    end = int(ends_of(call)[-1])
    assert end < len(call.given[named_by(call)])
    for out, same in zip(outs, expected, strict=True):
        assert_same_bits(out, same)
    assert_nothing(op, [out[end:] for out in outs])
    for name, before in pools(CALLED[op]).items():
        pool, after, clean, before = (
            by_slot(name, x) for x in (pools(call)[name], left[name], written[name], before)
        )
        kept, same, changed = ~differs(after, pool), ~differs(after, clean), differs(clean, before)
        if is_of_slots(call, name):
            assert kept[~is_in(call.given["state_indices"], pool)].all()
        else:
            assert kept[~is_in(pages_of(call, name), pool)][1:].all()
            changed[0] = False  # the null page takes rows of padding
        assert same[changed].all()
        assert (same | kept)[1:].all()


def assert_nothing(op: str, outs: list[Tensor]) -> None:
    for out, nothing in zip(outs, PADDING.get(op, (0,) * len(outs)), strict=True):
        assert torch.equal(out, torch.full_like(out, nothing))


def is_of_slots(call: Call, pool: str) -> bool:
    """Tell a pool that ``state_indices`` name slots of from one of pages."""
    return kinds_of(call)[pool].dims[0] == "S" and "state_indices" in call.given


def pages_of(call: Call, pool: str) -> Tensor:
    """Find the pages of a pool that sequences have: of what is written, where nothing is read."""
    if "page_table" in call.given:
        return call.given["page_table"]
    return call.given["slot_mapping"] // call.given[pool].shape[1]


def by_slot(name: str, pool: Tensor) -> Tensor:
    """View a pool with slots or pages first."""
    return pool.transpose(0, 1) if name in PAIRS else pool


def is_in(index: Tensor, pool: Tensor) -> Tensor:
    """Tell of each slot of a pool whether an index names it; the null slot never is."""
    named = torch.zeros(len(pool), dtype=torch.bool)
    named[index.flatten().long()] = True
    named[0] = False
    return named


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Elements of which the bits are not the same."""
    return (a != b) & ~((a != a) & (b != b))


@forms(of=lambda op: "state_indices" in DECLARATIONS[op].kinds)
def test_the_null_slot_stores_nothing(op: str, impl: str) -> None:
    call = CALLED[op]
    slots = torch.zeros_like(call.given["state_indices"])
    slots[0] = kept = call.given["state_indices"][0]
    outs, left = run(call.changed(state_indices=slots), impl)
    expected, written = run(call, impl)
    for out, stored in zip(outs, expected, strict=True):
        assert torch.equal(out, stored)
    for name, before in pools(call).items():
        if is_of_slots(call, name):
            assert_same_bits(left[name][kept], written[name][kept])
            left[name][kept] = before[kept]
            assert_same_bits(left[name], before)


@forms(of=lambda op: "initial_indices" in DECLARATIONS[op].kinds and not has_drafts(op))
def test_a_start_from_another_slot_leaves_it_untouched(op: str, impl: str) -> None:
    """A fork, or a restored prefix: what several sequences start from is there afterwards."""
    call = CALLED[op]
    held = {n: pool for n, pool in pools(call).items() if is_of_slots(call, n)}
    num_slots = len(next(iter(held.values())))
    slots, starts = call.given["state_indices"], call.given["initial_indices"].clone()
    starts[2:] = starts[0] * (slots[2:] > 0)
    begun = {n: pool.index_copy(0, slots.long(), pool[starts.long()]) for n, pool in held.items()}
    in_place = call.changed(**begun, initial_indices=slots * (starts > 0))
    elsewhere = call.changed(
        **{n: torch.cat([pool, torch.zeros_like(pool)]) for n, pool in held.items()},
        initial_indices=starts,
        state_indices=slots + (num_slots * (slots > 0)).int(),
    )
    (outs, left), (expected, written) = run(elsewhere, impl), run(in_place, impl)
    for out, other in zip(outs, expected, strict=True):
        assert_same_bits(out, other)
    for name, pool in held.items():
        assert_same_bits(left[name][:num_slots], pool)
        of = slots[differs(written[name], begun[name]).flatten(1).any(1)[slots.long()]].long()
        new = differs(written[name][of], begun[name][of])
        assert_same_bits(left[name][of + num_slots][new], written[name][of][new])


@forms(of=lambda op: has_sequences(op) and op not in TRAINED)
def test_a_sequence_has_the_bits_that_it_has_alone(op: str, impl: str) -> None:
    """Outputs, and what it writes, whichever sequences and rows of padding stand beside it."""
    call = CALLED[op]
    outs, left = run(call, impl)
    equal = torch.testing.assert_close if (op, impl) in BY_COMPANY else assert_same_bits
    num_seqs = len(ends_of(call)) - 1
    for seqs in (*([n] for n in range(num_seqs)), [*reversed(range(num_seqs))]):
        few, rows = part(call, seqs)
        own, own_left = run(few, impl)
        for out, alone in zip(outs, own, strict=True):
            equal(alone, out[rows])
        for name, before in pools(call).items():
            new = differs(own_left[name], before)
            by_slot(name, new)[0] = False
            equal(own_left[name][new], left[name][new])


def part(call: Call, seqs: Sequence[int]) -> tuple[Call, Tensor]:
    """Take some sequences of a call, in this order and without padding; and find their rows."""
    given, taken = dict(call.given), {"N": torch.tensor(seqs)}
    for name in reversed(OFFSETS):
        if name in given:
            spans = [*pairwise(given[name].tolist())]
            rows = torch.cat([torch.arange(*spans[n]) for n in seqs])
            taken["num_keys" if name == "cu_seqlens_k" else "T"] = rows
            given[name] = offsets([spans[n][1] - spans[n][0] for n in seqs])
    for name in tensors(call).keys() - set(OFFSETS):
        for axis, letter in enumerate(kinds_of(call)[name].dims):
            if letter in taken:
                given[name] = given[name].index_select(axis, taken[letter])
    return replace(call, given=given), taken["T"]


@forms(of=lambda op: op not in TRAINED)
def test_nothing_to_do(op: str, impl: str) -> None:
    calls = [cut(CALLED[op], rows=0, seqs=0 if has_sequences(op) else None)]
    if has_sequences(op):
        calls.append(cut(CALLED[op], rows=2, seqs=0))
        seqs = cut(CALLED[op], rows=2, seqs=2)
        none = {n: torch.zeros_like(x) for n, x in tensors(seqs).items() if n in COUNTS}
        calls.append(seqs.changed(**none))
    for call in calls:
        outs, left = run(call, impl)
        assert all(len(out) == len(call.given[named_by(call)]) for out in outs)
        assert_nothing(op, outs)
        for name, before in pools(call).items():
            assert_same_bits(left[name], before)


@needs_triton
def test_memory_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
) -> None:
    interpreter.run(
        record_property,
        Path(__file__),
        "triton and (no_sequence or null_slot or nothing_to_do or lie_apart or another_slot "
        "or alone and (paged or latent or select) and not (lse or invariant))",
    )


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", DECLARATIONS)
def test_errors_name_the_argument(op: str) -> None:
    """Shapes, dtypes and layouts other than the fields', refused before any write."""
    call = CALLED[op]
    for name, wrong, text in wrong_ones(op, call):
        tried = call.changed(**{name: wrong})
        with pytest.raises(ValueError, match=f"^{name} must ") as error:
            tried.run("torch")
        assert text in str(error.value)
        for pool in pools(call).keys() - {name}:
            assert_same_bits(tried.given[pool], call.given[pool])
    with pytest.raises(ValueError, match=r"^impl must be one of .*, got 'tpu'$"):
        call.changed().run("tpu")


def wrong_ones(op: str, call: Call) -> Iterator[tuple[str, Tensor, str]]:
    """Change one tensor of a call; say what the error has to tell."""
    declaration = DECLARATIONS[op]
    for name, x in tensors(call).items():
        kind, shape = declaration.kinds[name], list(x.shape)
        if isinstance(kind, Strided) or not kind.has_shape:
            continue
        yield name, x[None], "got "
        for axis, letter in enumerate(kind.dims):
            if declaration.bound.get(letter) != (name, axis):
                longer = torch.cat([x, x.narrow(axis, 0, 1)], axis)
                yield name, longer, f"{name} must have shape {shape}, got {list(longer.shape)}"
        other = torch.float64 if x.is_floating_point() else torch.int16
        if name != declaration.floating:
            allowed = kind.dtype if isinstance(kind.dtype, tuple) else (x.dtype,)
            text = f"must have dtype {' or '.join(map(str, allowed))}, got {other}"
            yield name, x.to(other), text
        yield name, x.repeat_interleave(2, -1)[..., ::2], "contiguous"


# ---- digits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# verify_contract.py holds drafts
@forms(of=lambda op: not has_drafts(op) and op not in TRAINED)
def test_it_is_as_exact_as_the_reference(op: str, impl: str, dtype: torch.dtype) -> None:
    if not DECLARATIONS[op].floating and dtype != torch.float32:
        pytest.skip(f"{op} has no dtype of its own")
    if dtype not in REGISTERED[op_of(op)][impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    call, oracle = in_dtype(CALLED[op], dtype), oracle_of(DECLARATIONS[op])
    doubles = {n: x.double() for n, x in tensors(call).items() if x.is_floating_point()}
    exact, rounded, own = call.changed(**doubles), call.changed(), call.changed()
    outs = results(own.run(impl))
    # An op may return the first of what its reference does.
    expected = [
        results(oracle(DECLARATIONS[op].cls(**each.given)))[: len(outs)]
        for each in (exact, rounded)
    ]
    found = [*zip(outs, *expected, strict=True)]
    for name, pool in pools(own).items():
        if kinds_of(own)[name].dtype is torch.float32 or (op, name) in COMPUTED:
            found.append((pool, exact.given[name], rounded.given[name]))
        else:  # rows that are kept as they are
            assert_same_bits(pool, rounded.given[name])
    for actual, right, near in found:
        if not actual.is_floating_point():
            assert torch.equal(actual, right)
            continue
        seen = right.isfinite()
        assert torch.equal(actual.isfinite(), seen)
        assert_within_budget(actual[seen], right[seen].double(), near[seen])


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """Round what has the dtype of the op's floating tensors."""
    kinds, floating = kinds_of(call), DECLARED[call.op.__name__].floating
    own = call.given[floating].dtype if floating else None
    given = {
        name: x.to(dtype)
        for name, x in tensors(call).items()
        if kinds[name].dtype is None or (kinds[name].dtype == "any" and x.dtype == own)
    }
    several = {n: x for n, x in call.given.items() if isinstance(x, list) and floating}
    given |= tree_map_only(Tensor, lambda x: x.to(dtype), several)
    return call.changed(**given)


if __name__ == "__main__":
    SCHEMAS.write_text(schemas())
