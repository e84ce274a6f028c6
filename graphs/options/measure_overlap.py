"""two_batch_overlap="auto": the sizes of steps at which two halves are faster than one batch.

Between two all-reduces a rank computes its shard of a layer. Two halves hide all-reduces behind
that. They lose time by smaller GEMMs, and by kernels that run beside messages. The balance depends
on the link, the device and the model, so both are measured as a step would run them. GEMMs with as
many FLOPs stand for the layers, and messages of the same size for the all-reduces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_hybrid.graphs.options.options import MakeTrial, Options
from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.two_batch import NEVER_CUT, OverlapPolicy
from torch_hybrid.ranks import Ranks

# The share of a whole step's time that halves must stay below: attention and small kernels, for
# which GEMMs stand here, lose more by being cut.
PAYS_BELOW = 0.9
SMALLEST = 256  # tokens; below, halves lose over any link
_STAGES = 3  # all-reduces of a measured run
_ROUNDS = 5  # timed runs; the fastest counts
_LONGEST = 0.5  # seconds: after a longer run, larger sizes are not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a rank for one token between two messages, on average over a step."""

    flops: float
    elements: int  # elements of a message

    @classmethod
    def of(cls, step: Callable[[], object], num_tokens: int) -> Work:
        """Count the work of an eager step of ``num_tokens`` tokens, which runs once.

        Raises:
            ValueError: the ranks exchange nothing in it.
        """
        from torch.utils.flop_counter import FlopCounterMode  # imports triton, which takes long

        sent = _Messages()
        with FlopCounterMode(display=False) as counter, sent:
            step()
        if not sent.elements:
            raise ValueError("the ranks of this model exchange nothing in a step")
        count = len(sent.elements)
        return cls(
            flops=counter.get_total_flops() / (count * num_tokens),
            elements=max(1, sum(sent.elements) // (count * num_tokens)),
        )


# The collective that gathers logits, after the halves are joined.
_AFTER_THE_HALVES = "all_gather_into_tensor"


class _Messages(TorchDispatchMode):
    """A dispatch mode that notes the elements that each collective within the halves sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        is_sent = func.namespace == "_c10d_functional" and "wait" not in name
        if is_sent and not name.startswith(_AFTER_THE_HALVES):
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Seconds of the same work on ``num_tokens`` tokens, as one batch and as two halves."""

    num_tokens: int
    whole: float
    halves: float

    @property
    def pays(self) -> bool:
        """True if halves are enough faster to cut a step of this size."""
        return self.halves < PAYS_BELOW * self.whole

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: {1e3 * self.halves:.2f} ms in halves, "
            f"{1e3 * self.whole:.2f} whole"
        )


def measure_overlap(model: Model, options: Options, make_trial: MakeTrial) -> tuple[Trial, ...]:
    """Measure whole and halved work over the link of the ranks that share a model.

    Args:
        model: the model; its ranks call this together.
        options: options of a runner.
        make_trial: makes an uncompiled runner, of which one step is counted.

    Returns:
        A trial for each size, ascending. Empty if the model is not shared, the runner does not
        prefill, or its steps are too small to be cut.
    """
    ranks = model.ranks
    if ranks is None or ranks.size == 1 or not options.prefill or options.max_tokens < SMALLEST:
        return ()
    eager = make_trial(
        model,
        max_seqs=1,
        max_tokens=SMALLEST,
        kv_tokens=SMALLEST,
        page_size=options.page_size,
        compile=False,
        backends=options.backends,
    )
    work = Work.of(lambda: eager.extend(eager.new_sequences(1), [[0] * SMALLEST]), SMALLEST)
    return try_halves(
        work,
        ranks,
        max_tokens=options.max_tokens,
        dtype=model.dtype,
        device=model.device,
    )


def try_halves(
    work: Work, ranks: Ranks, *, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Trial, ...]:
    """Measure from small steps to large ones, up to the first size at which halves pay.

    All ranks call this together, and get the times of the slowest.
    """
    layers = _Layers(work, ranks, dtype, device)
    trials: list[Trial] = []
    num_tokens = SMALLEST
    while num_tokens <= max_tokens:
        x = torch.ones(num_tokens, work.elements, dtype=dtype, device=device)
        whole, halves = _fastest((layers.whole, layers.halves), x, ranks)
        trials.append(Trial(num_tokens=num_tokens, whole=whole, halves=halves))
        if trials[-1].pays or whole > _LONGEST:
            break
        num_tokens *= 2
    return tuple(trials)


def policy_of(trials: tuple[Trial, ...]) -> OverlapPolicy:
    """Make the policy that cuts steps from the first size on at which halves paid, or none.

    Decode is never cut: each half would read all weights.
    """
    paid = [trial.num_tokens for trial in trials if trial.pays]
    return OverlapPolicy(min_extend_tokens=min(paid)) if paid else NEVER_CUT


class _Layers:
    """Stand-in for layers: GEMMs and an all-reduce, ``_STAGES`` times."""

    def __init__(self, work: Work, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
        # A chain of GEMMs of about an MLP's shape, with as many FLOPs in all. A width that is no
        # multiple of 64 would run several times slower than a model's GEMMs.
        pairs = max(1, round(work.flops / (16 * work.elements**2)))
        width = 64 * max(1, round(work.flops / (4 * work.elements * pairs * 64)))
        generator = torch.Generator(device).manual_seed(0)
        scale = (work.elements * width) ** -0.25  # keeps the magnitude of the activations
        self.weights = [
            scale * torch.randn(*size, dtype=dtype, device=device, generator=generator)
            for size in [(work.elements, width), (width, work.elements)] * pairs
        ]
        self.ranks = ranks

    def whole(self, x: Tensor) -> None:
        for _ in range(_STAGES):
            x = torch.ops._c10d_functional.wait_tensor(self._started(x))

    def halves(self, x: Tensor) -> None:
        """Run both halves by turns: the message of one is in flight while the other computes."""
        halves = list(x.chunk(2))
        sent = [self._started(half) for half in halves]
        for _ in range(_STAGES - 1):
            for i in (0, 1):
                sent[i] = self._started(torch.ops._c10d_functional.wait_tensor(sent[i]))
        for message in sent:
            torch.ops._c10d_functional.wait_tensor(message)

    def _started(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        started: Tensor = torch.ops._c10d_functional.all_reduce(x, "sum", self.ranks.group_name)
        return started


def _fastest(runs: Sequence[Callable[[Tensor], None]], x: Tensor, ranks: Ranks) -> list[float]:
    """Measure the fastest run of each in seconds, on the slowest rank; they take turns."""
    for run in runs:
        run(x)
    rounds = [[_seconds(run, x, ranks) for run in runs] for _ in range(_ROUNDS)]
    fastest = torch.tensor(rounds, dtype=torch.float64, device=x.device).amin(0)
    seconds: list[float] = _over_ranks(fastest, "max", ranks).tolist()
    return seconds


def _seconds(run: Callable[[Tensor], None], x: Tensor, ranks: Ranks) -> float:
    _over_ranks(x[0, :1].clone(), "sum", ranks)  # a barrier
    _synchronize(x.device)
    start = time.perf_counter()
    run(x)
    _synchronize(x.device)
    return time.perf_counter() - start


def _over_ranks(x: Tensor, how: str, ranks: Ranks) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(x, how, ranks.group_name)
    total: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return total


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
