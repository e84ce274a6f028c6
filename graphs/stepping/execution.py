"""Runs the planned steps of a runner: on static inputs, called or replayed, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence

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


class Execution:
    """The steps of one runner on its device, one after another.

    Args:
        steps: of which those that are run were prepared.
        planner: made their inputs.
        last: the tokens that were sampled last.
        capture: which steps are captured; None where none is.
        max_seqs: of the runner.
        device: where steps run.
    """

    def __init__(
        self,
        steps: Steps | BackgroundSteps,
        planner: StepPlanner,
        last: LastTokens,
        capture: CapturePolicy | None,
        *,
        max_seqs: int,
        device: torch.device,
    ) -> None:
        self._steps, self._last, self._capture, self._device = steps, last, capture, device
        draws = Draws.nothing(max(max_seqs, 2))
        self._inputs = {
            variant: StaticInputs(StepInputs(inputs=planner.largest(variant), draws=draws), device)
            for variant in planner.forms
        }
        self._under_way: Launched | None = None  # what was launched last

    @property
    def nbytes(self) -> int:
        """Size of the static inputs."""
        return sum(inputs.nbytes for inputs in self._inputs.values())

    @property
    def num_buckets(self) -> int:
        """Sizes of steps so far."""
        return sum(inputs.num_buckets for inputs in self._inputs.values())

    def logits(self, variant: Variant, inputs: Inputs) -> Tensor:
        """Run a step whose inputs are on the host: its logits, padding included."""
        return self._run(variant, StepInputs(inputs=inputs, draws=_NO_DRAWS), None)

    def launch(
        self,
        variant: Variant,
        inputs: Inputs,
        places: Sequence[int],
        draws: Sequence[Draw | None],
    ) -> Launched:
        """Start a step that samples, whose inputs are on the host.

        Args:
            variant: of the step.
            inputs: whose tokens may be some that were sampled last; see ``launch``.
            places: of the step's sequences.
            draws: how a token is drawn for each; None: none is.
        """
        kind = DrawKind.of(draws)
        made = Draws.of(places, draws, kind, num_logits(inputs))
        drawn = self._run(variant, StepInputs(inputs=inputs, draws=made), kind)
        self._under_way = Launched(drawn, len(draws))
        return self._under_way

    def wait(self) -> None:
        """Wait for the step that was launched last, and so for all before it."""
        if self._under_way is not None:
            self._under_way.result()

    def join(self) -> None:
        """Let what this thread starts on the device from now on begin after all that was launched,
        which may be of another thread's stream."""
        if self._under_way is not None:
            self._under_way.join(self._device)

    def _run(self, variant: Variant, planned: StepInputs, kind: DrawKind | None) -> Tensor:
        """The logits of a step, or with a ``kind`` the tokens drawn of them: those are
        overwritten by the next step."""
        self.join()
        static = self._inputs[variant]
        value = static.refresh(planned)
        with self._steps.running(variant) as step:
            run = self._last.wrap(step, kind)
            if self._capture is None or not self._steps.is_final(variant):
                return run(value)
            return self._capture.run(variant, run, static, value, planned, kind)
