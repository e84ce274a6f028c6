"""Steps that verify drafts, of mixers between their projections: beside the floor of their bytes,
of which nearly all are states, and with no drafts beside the decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from benchmarks.gpu.case import BF16, Case, Inputs, Turns, own
from benchmarks.gpu.delta_rules import KIMI_LINEAR, QWEN3_NEXT
from tests.ops.delta_rule import step_cases as delta
from tests.ops.delta_rule import step_gated_cases as gated
from tests.ops.delta_rule import step_kimi_cases as kimi
from tests.ops.ssd import step_lightning_cases as lightning
from tests.ops.ssd import step_mamba2_cases as ssd
from tests.ops.step_family import Family
from torch_hybrid.ops.step_implementations import VERIFY

MOST_DRAFTS = 3
# New tokens of each sequence, and accepted records before them.
COUNTS = ((1, 0), (4, 0), (4, 3))
SEQUENCES = (1, 8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """A layer's step, made and called as the op's tests do.

    Attributes:
        op, model: what figures are called.
        case: for lengths of sequences, what the family's ``make_inputs`` takes.
        family: of the step.
    """

    op: str
    model: str
    case: Callable[..., Any]
    family: Family


def _heads(sizes: tuple[int, int, int, int]) -> dict[str, int]:
    return dict(zip(("num_k_heads", "num_v_heads", "k_dim", "v_dim"), sizes, strict=True))


MIXERS = (
    Mixer(
        op="GDN",
        model="Qwen3-Next",
        case=partial(delta.Case, **_heads(QWEN3_NEXT), options=(("beta_scale", 1.0),)),
        family=gated.FAMILY,
    ),
    Mixer(
        op="KDA",
        model="Kimi-Linear",
        case=partial(delta.Case, **_heads(KIMI_LINEAR), options=(("gate_lower_bound", None),)),
        family=kimi.FAMILY,
    ),
    Mixer(
        op="Mamba2",
        model="Nemotron-H",
        case=partial(ssd.Case, num_groups=8, num_heads=128, k_dim=128, v_dim=64, norm_groups=8),
        family=ssd.FAMILY,
    ),
    Mixer(
        op="lightning",
        model="Ling",
        case=partial(lightning.Case, num_heads=32, dim=128, rotary_dim=64, norm_groups=8),
        family=lightning.FAMILY,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts(Inputs):
    """The tensors of a step's op, its records, and how many of these were accepted."""

    changed: ClassVar[tuple[str, ...]] = ("state", "conv_state", "records")

    of_step: Any
    state: Tensor
    conv_state: Tensor  # empty where nothing is convolved
    records: Tensor
    accepted: Tensor
    pools: tuple[str, ...] = field(default=())  # those that the op has

    @classmethod
    def make(cls, mixer: Mixer, num_seqs: int, num_new: int, num_accepted: int) -> Self:
        """Made on a CPU, whose random numbers tests take, and moved to where tensors are wanted."""
        device = torch.get_default_device()
        with torch.device("cpu"):
            drawn = mixer.family.make_inputs(mixer.case(lengths=(num_new,) * num_seqs), BF16)
            rows, records = drawn.tensors(), torch.randn_like(drawn.empty_records(MOST_DRAFTS))
            accepted = torch.full((num_seqs,), num_accepted, dtype=torch.int32)
        pools = {name: pool.nan_to_num() for name, pool in drawn.held().items()}
        tensors = {name: x for name, x in (rows | pools).items() if x is not None}
        moved = {name: x.to(device) for name, x in tensors.items()}
        moved["initial_indices"] = moved["state_indices"]
        return cls(
            of_step=replace(drawn, **moved),
            state=moved["state"],
            conv_state=moved.get("conv_state", records.new_empty(0).to(device)),
            records=records.to(device),
            accepted=accepted.to(device),
            pools=tuple(pools),
        )

    def args(self) -> tuple[Tensor | None, ...]:
        """What the step's op takes."""
        own: tuple[Tensor | None, ...] = self.of_step.changed(
            **{name: getattr(self, name) for name in self.pools}
        ).args()
        return own

    @property
    def num_bytes(self) -> float:
        """A state read and written; tokens, of which outputs are as wide as a gate."""
        num_seqs, of_tokens = len(self.accepted), self.of_step.tokens(slice(None)).values()
        per_slot = sum(getattr(self, name)[0].nbytes for name in self.pools)
        num_accepted, num_new = int(self.accepted[0]), len(next(iter(of_tokens))) // num_seqs
        num_records = num_seqs * (num_accepted + num_new - 1)
        out = 2 * num_seqs * num_new * self.state.shape[1] * self.state.shape[2]
        rows = sum(x.nbytes for x in of_tokens)
        return 2 * num_seqs * per_slot + num_records * self.records[0, 0].nbytes + rows + out


def call(inputs: Drafts, impl: str, *, mixer: Mixer) -> Tensor:
    """One call of this package's op."""
    drafts = {"records": inputs.records, "accepted": inputs.accepted}
    return mixer.family.op(*inputs.args(), **drafts, **inputs.of_step.options(), impl=impl)


def _decode(inputs: Sequence[Drafts], mixer: Mixer, impl: str = "triton") -> Turns:
    """The decode step of the same tokens, where none is a draft."""

    def step(each: Drafts) -> Tensor:
        return mixer.family.op(*each.args(), **each.of_step.options(), impl=impl)

    return Turns(calls=[partial(step, each) for each in inputs])


def cases() -> Iterator[Case]:
    """Of 1 to 64 sequences: no drafts, three, and three after three that were accepted."""
    for mixer in MIXERS:
        for num_seqs in SEQUENCES:
            for num_new, num_accepted in COUNTS:
                yield _case(mixer, num_seqs, num_new, num_accepted)


def _case(mixer: Mixer, num_seqs: int, num_new: int, num_accepted: int) -> Case:
    after = f" after {num_accepted}" if num_accepted else ""
    is_decode = num_new == 1 and not num_accepted
    return Case(
        op=f"{mixer.op} drafts",
        model=mixer.model,
        shape=f"{num_seqs}x{num_new}{after}",
        make=partial(Drafts.make, mixer, num_seqs, num_new, num_accepted),
        reference=partial(call, impl="torch", mixer=mixer),
        own=own(
            {
                n: i
                for n, i in mixer.family.implementations.items()
                if i.capability.features >= VERIFY
            },
            partial(call, mixer=mixer),
        ),
        others={"decode step": partial(_decode, mixer=mixer)} if is_decode else {},
    )
