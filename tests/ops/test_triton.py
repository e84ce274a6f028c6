"""Triton kernels of ops by their declarations: in the interpreter, compiled for GPUs that are not
there, and on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.causal_conv1d.cases import Case as Convolution
from tests.ops.contract import assert_same_bits, assert_within_budget
from tests.ops.declared import oracle_of
from tests.ops.registered import public_ops
from tests.ops.triton_compile import Launch, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_shapes_fit
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import DECLARED, Pool

OPS = Path(__file__).parent
BF16 = torch.bfloat16
HALVES = (BF16, torch.float16)
# Of several segments of 8 tokens, of one, of none; the second begins within one of the first's.
SEGMENTS = {"lengths": (41, 33, 8, 0, 1), "num_padding_tokens": 3}
ONE_EACH, LONG = {"N": 64, "T": 64}, {"N": 4, "T": 8192}
SHORTER = {"N": 4, "T": 2048}
# Of a recurrence of vectors: where a state is carried from segment to segment.
VECTORS = """
    (triton and not triton_invariant and (exact and not recurrentgemma and not rwkv_4 or nearly_one
    or no_exponential or segments or first_token) or triton_invariant and segments_are_the_whole)
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """An op in a folder of its name.

    Attributes:
        interpreted: what of its tests the interpreter can do in seconds; the whole of it:
            TRITON_INTERPRET=1 pytest tests/ops/FOLDER -k triton.
        shapes: launches that are compiled: dtype, sizes by their letters in the declaration, and
            arguments by name.
        options: those of all shapes.
        padding: what makes inputs with rows and sequences of padding, where cases have none.
    """

    name: str
    interpreted: str
    shapes: Mapping[str, tuple[Any, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALVES)
    padding: Mapping[str, Any] = field(default_factory=lambda: {"padding": (3, 2)})
    note: Callable[[Launch], str] = lambda launch: ""

    @property
    def cases(self) -> Any:
        return import_module(f"tests.ops.{self.name}.cases")

    def make_inputs(self, case: Any, dtype: torch.dtype, **options: Any) -> Any:
        return self.cases.make_inputs(case, dtype=dtype, **self.padding, **options)

    def record(
        self, target: str, dtype: torch.dtype, given: Mapping[str, Any]
    ) -> Mapping[str, Launch]:
        """Note what the launcher launches, on tensors without memory."""
        declaration, given = DECLARED[self.name], {**self.options, **given}
        names = {each.name: each.default is None for each in fields(declaration.cls)}
        sizes = {"S": given["N"] + 1, **given}

        def empty(kind: Any) -> Tensor:
            own = {None: dtype, "work": torch.float32}.get(kind.dtype, kind.dtype)
            shape = [eval(size, {}, sizes) for size in kind.dims]
            return torch.empty(shape, dtype=own, device="meta")

        tensors = {
            name: empty(kind)
            for name, kind in declaration.kinds.items()
            if name in given.get("optional", ()) or not names[name]
        }
        options = {name: value for name, value in given.items() if name in names}
        launcher = vars(import_module(f"torch_hybrid.ops.{self.name}._triton"))[self.name]
        with launches_on(target) as launches:
            launcher(declaration.cls(**{**tensors, **options, "impl": "triton"}))
        return launches


def carried(launch: Launch) -> str:
    """End a launch's label."""
    return ", carried" * launch.kwargs["CARRIED"]


GATES = {"optional": ("input_gate", "output_gate"), "activation": "none"}
TAPS = {"C": 2048, "W": 4, "H": 16, "optional": ("token_taps",), "activation": "none"}
FAMILIES = (
    Family(
        name="causal_conv1d",
        # It cuts off what a GPU rounds to bfloat16: states of products would differ.
        interpreted="triton and (exact and not qwen3_next and not bamba and not lfm or segments) "
        "and not (gates and bf16)",
        shapes={
            "Qwen3-Next decode 64": (BF16, ONE_EACH | {"C": 8192, "W": 4}),
            "Qwen3-Next extend 8192": (BF16, LONG | {"C": 8192, "W": 4}),
            "Qwen3-Next extend 8192 float32": (torch.float32, LONG | {"C": 8192, "W": 4}),
            "LFM2 decode 64": (BF16, ONE_EACH | GATES | {"C": 2048, "W": 3}),
            "LFM3 extend 8192": (BF16, LONG | GATES | {"C": 2048, "W": 7}),
            "Inkling-2 decode 64": (BF16, ONE_EACH | TAPS),
            "Inkling-2 extend 8192": (BF16, LONG | TAPS),
        },
        options={"bias": None, "activation": "silu"},
        padding={},
    ),
    Family(
        name="gated_pooling",
        interpreted="triton and (float64 and (odd or a_token) or segments)",
        shapes={
            "GLM-5.3 decode 64": (BF16, ONE_EACH | {"D": 128, "B": 16}),
            "GLM-5.3 extend 2048": (BF16, SHORTER | {"D": 128, "B": 16}),
        },
    ),
    Family(
        name="ngram_embedding",
        interpreted="""triton and (reference and (bigrams or five or decode) and not fp16
            or across)""",
        shapes={"Qwen4-Exp decode 64": (BF16, ONE_EACH), "Qwen4-Exp extend 2048": (BF16, SHORTER)},
        options={"R": 1000, "D": 128, "order": 3, "H": 16, "eos": 7},
    ),
    Family(
        name="pooled_selection_step",
        interpreted="""triton and (reference and (odd or a_token or glm5_next and bf16
            or takes_all and fp16) or round_once or step_by_step or several_tiles)""",
        shapes={
            "GLM-5.3 decode 1": (BF16, {"N": 1, "T": 1, "M": 128}),
            "GLM-5.3 decode 64": (BF16, ONE_EACH | {"M": 512}),
        },
        options={"H": 32, "D": 128, "B": 16, "P": 4096, "K": 4, "top_k": 128},
        dtypes=HALVES,
    ),
    Family(
        name="rg_lru",
        interpreted=VECTORS,
        shapes={
            "RecurrentGemma-2B decode 64": (BF16, ONE_EACH | {"C": 2560, "H": 10}),
            "RecurrentGemma-2B 8192": (BF16, LONG | {"C": 2560, "H": 10}),
            "RecurrentGemma-9B 8192 float32": (torch.float32, LONG | {"C": 4096, "H": 16}),
        },
        options={"G": 512},
        padding={},
        note=carried,
    ),
    Family(
        name="select_blocks",
        interpreted="""triton and not triton_invariant and (
            reference and (odd or a_token or many_blocks and bf16) or glm5_next and bf16
            ) or triton_invariant and any_call and bf16""",
        shapes={
            "Qwen4-Exp decode 64": (BF16, ONE_EACH),
            "Qwen4-Exp extend 2048": (BF16, SHORTER),
            "Qwen4-Exp decode 8 float32": (torch.float32, {"N": 8, "T": 8}),
        },
        options={"H": 4, "D": 128, "S": 4096, "B": 4, "M": 2048, "weights": None}
        | {"block_size": 4, "top_k": 512},
    ),
    Family(
        name="wkv",
        interpreted=VECTORS,
        shapes={
            "RWKV-4-1B5 decode 64": (BF16, ONE_EACH | {"C": 2048}),
            "RWKV-4-1B5 8192": (BF16, LONG | {"C": 2048}),
            "RWKV-4-14B 8192 float32": (torch.float32, LONG | {"C": 5120}),
        },
        padding={},
        note=carried,
    ),
)
EACH = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


@needs_triton
@EACH
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None], family: Family
) -> None:
    interpreter.run(record_property, OPS / family.name, " ".join(family.interpreted.split()))


@needs_triton
def test_segments_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
) -> None:
    interpreter.run(record_property, Path(__file__), "interpreted")


@needs_cross_compiler
@EACH
def test_compiles_without_spills(family: Family) -> None:
    assert_shapes_fit(OPS / family.name, family.shapes, family.record, family.note)


@needs_cuda
@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        pytest.param(each, name, dtype, id=f"{each.name}-{name}-{dtype}")
        for each in FAMILIES
        for name in each.cases.CASES
        for dtype in each.dtypes
    ],
)
def test_on_a_gpu(family: Family, name: str, dtype: torch.dtype) -> None:
    inputs = family.make_inputs(family.cases.CASES[name], dtype)
    check(family, inputs, on_device(inputs, "cuda"))


@needs_cuda
def test_a_captured_graph_serves_other_lengths() -> None:
    """Three sequences of a bucket of 80 tokens, replayed with other lengths and slots."""
    family, first = FAMILIES[0], Convolution(lengths=(1, 50, 1), num_padding_tokens=28)
    captured = on_device(family.make_inputs(first, torch.float32), "cuda")
    call(family, captured)  # compiles the kernel, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(family, captured)
    for seed, lengths in enumerate([(2, 0, 70), (32, 33, 1)], 1):
        case = replace(first, lengths=lengths, num_padding_tokens=80 - sum(lengths))
        other = family.make_inputs(case, torch.float32, seed=seed)
        for name, x in tensors_of(captured).items():
            x.copy_(getattr(other, name))
        graph.replay()
        check_results(family, other, captured, out)


@needs_interpreter
@pytest.mark.parametrize("name", ["rg_lru", "wkv"])
def test_segments_interpreted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_segments(name, torch.float32, "cpu", monkeypatch)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", ["rg_lru", "wkv"])
def test_segments_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_segments(name, dtype, "cuda", monkeypatch)


def check_segments(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences in segments are as exact as whole ones, and none knows what is beside it."""
    from torch_hybrid.ops.triton import channel_programs

    monkeypatch.setattr(channel_programs, "_SEGMENT", 8)
    (family,) = (each for each in FAMILIES if each.name == name)
    inputs = family.make_inputs(replace(family.cases.CASES["mixed"], **SEGMENTS), dtype)
    moved = on_device(inputs, device)
    out = check(family, inputs, moved)
    for n, begin, end in ((0, 0, 41), (1, 41, 74)):
        alone = on_device(inputs, device)
        alone = replace(
            alone,
            **alone.tokens(slice(begin, end)),
            cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            initial_indices=alone.initial_indices[n : n + 1],
            state_indices=alone.state_indices[n : n + 1],
        )
        assert torch.equal(call(family, alone), out[begin:end])
        slot = inputs.state_indices[n]
        assert torch.equal(alone.state[slot], moved.state[slot])


def check(family: Family, inputs: Any, moved: Any) -> Tensor:
    """Check that results, and what is left in pools, are as exact as the reference's."""
    out = call(family, moved)
    check_results(family, inputs, moved, out)
    return out


def call(family: Family, inputs: Any) -> Tensor:
    names = (each.name for each in fields(DECLARED[family.name].cls))
    out: Tensor = public_ops()[family.name](
        **{**{name: getattr(inputs, name) for name in names}, "impl": "triton"}
    )
    return out


def check_results(family: Family, inputs: Any, moved: Any, out: Tensor) -> None:
    """Compare with the reference, bit by bit what it does not round: rows that are copied."""
    declaration = DECLARED[family.name]
    reference, exact, own = oracle_of(declaration), inputs.fresh().exact(), inputs.fresh()
    found = [(out, reference(exact), reference(own))]
    for name, kind in declaration.kinds.items():
        if isinstance(kind, Pool):
            found.append(tuple(getattr(each, name) for each in (moved, exact, own)))
    for actual, right, near in found:
        actual, seen = actual.cpu(), right.isfinite()
        if torch.equal(near[seen].double(), right[seen].double()):
            assert_same_bits(actual, near)
        else:
            assert torch.equal(actual.isfinite(), seen)
            assert_within_budget(actual[seen], right[seen], near[seen])


def tensors_of(inputs: Any) -> dict[str, Tensor]:
    given = {name: getattr(inputs, name) for name in Declaration(type(inputs)).kinds}
    return {name: x for name, x in given.items() if x is not None}


def on_device(inputs: Any, device: str) -> Any:
    """Copy tensors to a device, where they lie as the originals do."""
    given = tensors_of(inputs).items()
    return replace(inputs, **{name: x.to(device, copy=True) for name, x in given})
