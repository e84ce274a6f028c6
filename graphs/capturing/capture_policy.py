"""Policy of CUDA graphs: the steps of a runner that are captured, and why others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.capturing.cuda_graph import CapturedSteps, why_not_capturable
from torch_hybrid.graphs.capturing.launch import StepInputs
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.graphs.step import Inputs, Variant, map_tensors

CudaGraphs = Literal["auto", "on", "off"]


class CapturePolicy:
    """Policy that captures each bucket of a runner's steps when it first comes.

    A variant whose ops cannot be captured is called instead, or refused.

    Args:
        device: device of the model; on a CPU a replay calls the step.
        must: refuse steps that cannot be captured, instead of noting why.
    """

    def __init__(self, device: torch.device, *, must: bool) -> None:
        self._device, self._must = device, must
        self._steps = CapturedSteps(device)
        self._refused: dict[str, tuple[str, ...]] = {}  # name of a variant to the reasons

    @classmethod
    def of(
        cls, cuda_graphs: CudaGraphs, device: torch.device, *, compiles: bool
    ) -> CapturePolicy | None:
        """Make the policy of a runner's ``cuda_graphs``; None if nothing is captured.

        Raises:
            ValueError: ``cuda_graphs`` is not "auto", "on" or "off".
            UnsupportedError: "on" would capture steps that are not compiled.
        """
        if cuda_graphs not in ("auto", "on", "off"):
            raise ValueError(f"cuda_graphs must be 'auto', 'on' or 'off', got {cuda_graphs!r}")
        must, is_cuda = cuda_graphs == "on", device.type == "cuda"
        if must and is_cuda and not compiles:
            raise UnsupportedError("cuda_graphs='on' captures compiled steps, got compile=False")
        may = must or (cuda_graphs == "auto" and is_cuda and compiles)
        return cls(device, must=must) if may else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the captured buckets, in order."""
        return self._steps.names

    @property
    def nbytes(self) -> int:
        """Device memory that capturing took."""
        return self._steps.nbytes

    @property
    def seconds(self) -> float:
        """Time that capturing took."""
        return self._steps.seconds

    @property
    def refused(self) -> Mapping[str, tuple[str, ...]]:
        """Reasons why variants are not captured, by variant."""
        return dict(self._refused)

    def check(self, variant: Variant, calls: Iterable[str]) -> None:
        """Note why a compiled variant cannot be captured.

        Args:
            variant: the compiled variant.
            calls: its ops, as ``op[implementation]``.

        Raises:
            UnsupportedError: there is a reason, and the policy must capture every step.
        """
        reasons = why_not_capturable(calls) if self._device.type == "cuda" else ()
        if reasons and self._must:
            listed = "\n".join(f"  {reason}" for reason in reasons)
            raise UnsupportedError(
                f"{variant.name} steps cannot be captured in a CUDA graph:\n{listed}"
            )
        if reasons:
            self._refused[variant.name] = reasons

    def captures(self, variant: Variant) -> bool:
        """Tell whether steps of a compiled variant can be captured."""
        return variant.name not in self._refused

    @property
    def has_room(self) -> bool:
        """False where another bucket might take the memory that later steps need."""
        return self._steps.has_room

    def holds(
        self, variant: Variant, static: StaticInputs, value: StepInputs, planned: StepInputs
    ) -> bool:
        """Tell whether the bucket of a step, given as to ``run``, is captured."""
        return _key(variant, static, value, planned) in self._steps

    def run(
        self,
        variant: Variant,
        step: Callable[[StepInputs], Tensor],
        static: StaticInputs,
        value: StepInputs,
        planned: StepInputs,
        build_kernels: Callable[[Variant, Inputs], None],
    ) -> Tensor:
        """Replay the captured graph of a step's bucket; capture the graph first if there is none.

        Args:
            variant: variant of the step, which can be captured.
            step: function to capture.
            static: static storage of the inputs.
            value: inputs as views of ``static``, which holds them now.
            planned: the same inputs on the host.
            build_kernels: builds kernels that a captured step calls.

        Returns:
            The logits; the next replay overwrites them.
        """
        key = _key(variant, static, value, planned)
        if key not in self._steps:
            static.refresh(map_tensors(torch.zeros_like, planned))
            name = _bucket_name(variant, value.inputs)
            build_kernels(variant, value.inputs)
            self._steps.capture(key, lambda: step(value), name=name)
            static.refresh(planned)
        return self._steps.replay(key)


def _key(
    variant: Variant, static: StaticInputs, value: StepInputs, planned: StepInputs
) -> tuple[object, ...]:
    """Identify a bucket. The captured step keeps ``value`` alive: no other object gets its id."""
    return variant, id(value), static.host_values(planned)


def _bucket_name(variant: Variant, inputs: Inputs) -> str:
    """Name a bucket for reports: "extend: 128 tokens, 8 sequences of 64 pages"."""
    batch = inputs.parts[0].batch
    has_any_lengths = variant.mode.tokens_per_seq is None or variant.mode.num_chained
    tokens = f"{batch.num_tokens} tokens, " if has_any_lengths else ""
    seqs = "1 sequence" if batch.num_seqs == 1 else f"{batch.num_seqs} sequences"
    return f"{variant.name}: {tokens}{seqs} of {batch.page_table.shape[1]} pages"
