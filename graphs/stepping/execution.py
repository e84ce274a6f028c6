"""Execution of planned steps: on static inputs, called or replayed, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.graphs.capturing.capture_policy import CapturePolicy
from torch_hybrid.graphs.capturing.launch import Draws, LastTokens, Launched, StepInputs, num_logits
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.graphs.step import Inputs, Variant
from torch_hybrid.graphs.stepping.background import BackgroundSteps
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.stepping.steps import Steps
from torch_hybrid.sampling import Draw, DrawKind

_NO_DRAWS = Draws.nothing(0)


@dataclass(eq=False)
class Execution:
    """Executor of a runner's steps on its device, one after another."""

    steps: Steps | BackgroundSteps  # the runner's steps; a step that runs has been prepared
    planner: StepPlanner  # planner that made the inputs; it knows their largest sizes
    last: LastTokens  # the tokens that were sampled last
    capture: CapturePolicy | None  # which steps are captured in CUDA graphs; None captures none
    max_seqs: int  # most sequences of the runner
    device: torch.device  # device on which steps run

    def __post_init__(self) -> None:
        draws = Draws.nothing(max(self.max_seqs, 2))
        self._inputs = {
            variant: StaticInputs(
                StepInputs(inputs=self.planner.largest(variant), draws=draws), self.device
            )
            for variant in self.planner.forms
        }
        self._under_way: Launched | None = None  # the step that was launched last

    @property
    def nbytes(self) -> int:
        """Bytes of the static inputs."""
        return sum(inputs.nbytes for inputs in self._inputs.values())

    @property
    def num_buckets(self) -> int:
        """Number of buckets that steps have used so far."""
        return sum(inputs.num_buckets for inputs in self._inputs.values())

    def logits(self, variant: Variant, inputs: Inputs) -> Tensor:
        """Run a step whose inputs are on the host, and return its logits, padding included."""
        return self._run(variant, StepInputs(inputs=inputs, draws=_NO_DRAWS), None)

    def launch(
        self,
        variant: Variant,
        inputs: Inputs,
        places: Sequence[int],
        draws: Sequence[Draw | None],
    ) -> Launched:
        """Start a step that samples; its inputs are on the host.

        Args:
            variant: variant of the step.
            inputs: inputs; a token may stand for one that was sampled last (``capturing.launch``).
            places: place of each sequence of the step among the tokens sampled last.
            draws: how to sample the token of each sequence; None samples none.
        """
        kind = DrawKind.of(draws)
        made = Draws.of(places, draws, kind, num_logits(inputs))
        drawn = self._run(variant, StepInputs(inputs=inputs, draws=made), kind)
        self._under_way = Launched(drawn, len(draws))
        return self._under_way

    def wait(self) -> None:
        """Wait for the step that was launched last, and so for all steps before it."""
        if self._under_way is not None:
            self._under_way.result()

    def join(self) -> None:
        """Make this thread's later device work wait for the launched steps of any stream."""
        if self._under_way is not None:
            self._under_way.join(self.device)

    def _run(self, variant: Variant, planned: StepInputs, kind: DrawKind | None) -> Tensor:
        """Run a step.

        Returns:
            Its logits, or with a ``kind`` the sampled tokens. The next step overwrites them.
        """
        self.join()
        static = self._inputs[variant]
        value = static.refresh(planned)
        with self.steps.running(variant) as step:
            run = self.last.wrap(step, kind)
            if self.capture is None or not self.steps.is_final(variant):
                return run(value)
            return self.capture.run(variant, run, static, value, planned, kind)
