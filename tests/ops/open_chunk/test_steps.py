"""Steps by open chunks: the states and outputs of steps that store each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from tests.ops.recurrent_triton import on_device
from tests.ops.ssd.step_lightning_cases import FAMILY as LIGHTNING
from tests.ops.ssd.step_mamba2_cases import FAMILY as MAMBA2
from tests.ops.step_family import Family, Inputs
from tests.ops.triton_interpreter import interprets
from torch_hybrid.ops.open_chunk import OPEN_TOKENS
from torch_hybrid.ops.triton.devices import interpreted

NUM_STEPS = 2 * OPEN_TOKENS + 3
SLOTS = 8
FAMILIES = {family.op.__name__: family for family in (GATED, KIMI, MAMBA2, LIGHTNING)}
# Families whose tokens add the same to any state, so that states are advanced by the same numbers.
STATELESS = (MAMBA2, LIGHTNING)
of_each = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
CONTRACT = "(plays or opcheck) and not gpu"
test_in_the_interpreter = interprets(CONTRACT)
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="runs in the interpreter")


def steps(family: Family, case: Any, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """What the steps of a play change: a token of two sequences, from the fourth step on of three.

    The second sequence starts from its slot 2 once more in the sixth step, and goes on in slot 5.
    """
    for step in range(NUM_STEPS):
        seen = [step, step, max(0, step - 3)]
        slots = [1, 2 if step < 5 else 5, 3]
        starts = [slots[0], 2 if step < 6 else 5, slots[2]]
        lengths = (1, 1, int(step > 2))
        inputs = family.make_inputs(replace(case, lengths=lengths), dtype, seed=step)
        initial = [start if count else 0 for start, count in zip(starts, seen, strict=True)]
        yield {
            **{name: getattr(inputs, name) for name in (*inputs.per_token, "cu_seqlens")},
            "initial_indices": torch.tensor(initial, dtype=torch.int32),
            "state_indices": torch.tensor(slots, dtype=torch.int32),
        }


def with_slots(inputs: Inputs) -> Any:
    """The inputs with pools of NaN: nobody has a state."""
    pools = {
        name: pool.new_full((SLOTS, *pool.shape[1:]), torch.nan)
        for name, pool in inputs.held().items()
    }
    return inputs.changed(**pools)


def play(family: Family, case: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Steps by open chunks, and then a closing: outputs and states are as exact as those of the
    reference or, on a GPU, of steps that store each state, and slots that nobody owns keep their
    bits."""
    first = with_slots(family.make_inputs(case, dtype))
    exact, rounded = first.exact(), first.copy()
    own, storing = (on_device(first.copy(), device) for _ in range(2))
    chunk = own.empty_chunk()
    errors = []
    for changes in steps(family, case, dtype):
        given = {name: x for name, x in changes.items() if x is not None}
        floats = {n: x.double() for n, x in given.items() if x.is_floating_point()}
        moved = {name: x.to(device) for name, x in given.items()}
        exact = replace(exact, **given | floats)
        rounded, own, storing = (
            replace(rounded, **given),
            replace(own, **moved),
            replace(storing, **moved),
        )
        expected, usual = family.by_reference(exact), family.by_reference(rounded)
        is_compared = device != "cpu" or family in STATELESS
        stored = family.run(storing, "triton").cpu() if is_compared else usual
        out = family.op(*own.args(), **own.options(), chunk=chunk, impl="triton").cpu()
        errors.append([error(x, expected) for x in (out, usual, stored)])
    close(family, own, chunk)
    own, storing = on_device(own, "cpu"), on_device(storing, "cpu")
    live = rounded.state_indices.long()
    of_states = [error(x.state[live], exact.state[live]) for x in (own, rounded)]
    for mine, *others in (map(max, zip(*errors, strict=True)), of_states):
        assert mine <= 2 * max(others) + torch.finfo(dtype).eps
    if family in STATELESS:
        assert torch.equal(own.state[live], storing.state[live])
    for name in own.held().keys() - {"state"}:
        assert torch.equal(getattr(own, name)[live], getattr(rounded, name)[live])
    nobodys = [0, 4, 6, 7]
    for pool in (chunk.cpu(), *own.held().values()):
        assert pool[nobodys].isnan().all()


def error(x: Tensor, exact: Tensor) -> float:
    """Of the largest value."""
    return float((x.double() - exact).abs().max() / exact.abs().max())


def close(family: Family, inputs: Any, chunk: Tensor) -> None:
    """Close the chunks of all sequences, which have started."""
    nothing = inputs.tokens(slice(0))
    no_tokens = {"cu_seqlens": torch.zeros_like(inputs.cu_seqlens)}
    given = replace(inputs, **nothing, **no_tokens, initial_indices=inputs.state_indices)
    out = family.op(*given.args(), **given.options(), chunk=chunk, impl="triton")
    assert len(out) == 0


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "name"),
    [
        (GATED, "three_value_heads"),
        (KIMI, "odd_dims"),
        (MAMBA2, "odd_dims"),
        (MAMBA2, "bounded_steps"),
        (LIGHTNING, "odd_dims"),
        (LIGHTNING, "ungated"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.op.__name__,
)
def test_plays(family: Family, name: str):
    play(family, family.cases[name], torch.float32)


@needs_interpreter
@of_each
def test_opcheck(family: Family):
    """The schema names all that a step changes, and the fake is as its results."""
    inputs = family.mixed()
    given = inputs.changed(**{name: pool.nan_to_num() for name, pool in inputs.held().items()})
    options = given.options() | {"chunk": given.empty_chunk(fill=0.0), "impl": "triton"}
    op = getattr(torch.ops.torch_hybrid, family.op.__name__).default
    torch.library.opcheck(op, given.args(), options)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, id=f"{name}-{label}")
        for name, family in FAMILIES.items()
        for label, case in family.cases.items()
    ],
)
def test_plays_on_a_gpu(family: Family, case: Any, dtype: torch.dtype):
    play(family, case, dtype, "cuda")


@of_each
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 64}, r"chunk must have \d+ numbers a slot, got 64"),
        ({"impl": "cpp"}, "open"),
        ({"records": True}, "chunk must be None in a step that verifies drafts, got a tensor"),
    ],
    ids=["width", "impl", "records"],
)
def test_errors(family: Family, changes: dict[str, Any], message: str):
    inputs = family.mixed(lengths=(1, 1), num_padding_tokens=0)
    chunk = inputs.empty_chunk()[:, : changes.get("width")]
    given: dict[str, Any] = {"chunk": chunk.contiguous(), "impl": changes.get("impl", "triton")}
    if "records" in changes:
        given |= {
            "records": inputs.empty_records(2, fill=0.0),
            "accepted": torch.zeros_like(inputs.state_indices),
        }
    with pytest.raises(ValueError, match=message):
        family.op(*inputs.args(), **inputs.options(), **given)


def test_room_for_records():
    """The layout is that of caches which are kept: keys, values, decays, totals, marks."""
    inputs = GATED.mixed(lengths=(1, 1), num_padding_tokens=0)
    assert inputs.empty_chunk().shape[1] == 960
