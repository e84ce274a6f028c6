"""Execution of planned steps: on static inputs, called or replayed, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.graphs.capturing.capture_policy import CapturePolicy
from torch_hybrid.graphs.capturing.launch import Draws, LastTokens, Launched, StepInputs, num_logits
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.graphs.step import Inputs, Variant, map_tensors
from torch_hybrid.graphs.stepping.background import BackgroundSteps
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.stepping.steps import Steps
from torch_hybrid.sampling import USUAL_KINDS, Draw, DrawKind


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
        self._most_draws = max(self.max_seqs, 2)
        draws = Draws.nothing(self._most_draws)
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
        logits, _, is_replay = self._run(variant, self._without_draws(inputs))
        return logits.clone() if is_replay else logits

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
        step = StepInputs(inputs=inputs, draws=made)
        logits, value, _ = self._run(variant, step, reads_last=True)
        self._under_way = Launched(self.last.draw(logits, value.draws, kind), len(draws))
        return self._under_way

    def capture_ahead(self, variant: Variant, inputs: Inputs) -> None:
        """Capture the bucket of a step, if it can be and is not, and look up kernels of its draws.

        All of the step is padding.
        """
        if self.capture is None or not self._captures(variant):
            return
        self.join()
        static = self._inputs[variant]
        step = map_tensors(torch.zeros_like, self._without_draws(inputs))
        if self.capture.holds(variant, static, static.refresh(step), step):
            return
        logits, value, _ = self._run(variant, step)
        may_draw = len(logits) == len(value.draws.places) and not variant.mode.num_chained
        for kind in USUAL_KINDS if may_draw else ():
            self.last.draw(logits, value.draws, kind)

    def wait(self) -> None:
        """Wait for the step that was launched last, and so for all steps before it."""
        if self._under_way is not None:
            self._under_way.result()

    def join(self) -> None:
        """Make this thread's later device work wait for the launched steps of any stream."""
        if self._under_way is not None:
            self._under_way.join(self.device)

    def _run(
        self, variant: Variant, planned: StepInputs, *, reads_last: bool = False
    ) -> tuple[Tensor, StepInputs, bool]:
        """Run a step; with ``reads_last`` its tokens may stand for those sampled last.

        Returns:
            Its logits, its inputs on the device, and whether the next replay overwrites both.
        """
        self.join()
        static = self._inputs[variant]
        value = static.refresh(planned)
        is_captured = self._captures(variant)
        # A captured step serves launches too; a draft head's tokens stand for no others.
        fills = (reads_last or is_captured) and not variant.mode.num_chained
        with self.steps.running(variant) as step:
            run = self.last.reading(step) if fills else lambda value: step(value.inputs)
            if self.capture is None or not is_captured:
                return run(value), value, False
            build = self.steps.build_kernels
            return self.capture.run(variant, run, static, value, planned, build), value, True

    def _captures(self, variant: Variant) -> bool:
        """Tell whether a variant's steps are captured and replayed."""
        can = self.capture is not None and self.capture.captures(variant)
        return can and self.steps.is_final(variant)

    def _without_draws(self, inputs: Inputs) -> StepInputs:
        """Make the inputs of a step that draws nothing, of the sizes of one that draws."""
        draws = Draws.nothing(min(num_logits(inputs), self._most_draws))
        return StepInputs(inputs=inputs, draws=draws)
