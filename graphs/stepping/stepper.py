"""Path of one step: from tokens, through plan, compilation and run, to what the sequences hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.batch import Batch
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence as HeldSequence
from torch_hybrid.graphs.capturing.capture_policy import CapturePolicy
from torch_hybrid.graphs.capturing.cuda_graph import on_capture_stream
from torch_hybrid.graphs.step import Inputs, Variant
from torch_hybrid.graphs.stepping.background import BackgroundSteps
from torch_hybrid.graphs.stepping.embeds import Embeds, GivenRows
from torch_hybrid.graphs.stepping.execution import Execution
from torch_hybrid.graphs.stepping.planner import Logits, StepPlanner
from torch_hybrid.graphs.stepping.steps import Steps
from torch_hybrid.ops.native.ahead import Builds

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Stepper:
    """Planner and runner of steps: it pads and compiles a step, runs it, and counts its tokens."""

    cache: HybridCache  # states of the sequences
    planner: StepPlanner  # pads and plans batches
    steps: Steps | BackgroundSteps  # compiled or eager steps
    execution: Execution  # runs planned steps
    builds: Builds  # builds of the native kernels that steps call
    capture: CapturePolicy | None  # which steps are captured in CUDA graphs; None captures none
    given: GivenRows | None  # buffer of rows that replace embeddings; None if steps take none
    num_position_axes: int  # position axes of the model
    check_batch: Callable[[Batch], None] | None  # called with the batch of each step before it runs
    device: torch.device  # device on which steps run

    def __post_init__(self) -> None:
        self._is_built = False

    def plan(
        self,
        seqs: Sequence[HeldSequence],
        tokens: Sequence[Sequence[int]],
        mode: Mode,
        *,
        num_drafts: Sequence[int] | None = None,
        logits: Logits = "all",
        positions: Tensor | None = None,
        embeds: Embeds | None = None,
    ) -> tuple[Variant, Inputs]:
        """Reserve the pages of new tokens, and plan and compile their step.

        An error leaves all states unchanged.

        Args:
            seqs: sequences of the step.
            tokens: new tokens of each.
            mode: mode of the step.
            num_drafts: number of each sequence's last tokens that are drafts; by default none.
            logits: "last" returns the logits of each sequence's last token, "all" those of every
                token.
            positions: positions of the new tokens; by default they follow the committed ones.
            embeds: rows that replace embeddings of some tokens.

        Returns:
            The step's variant, compiled, and its inputs.
        """
        self.execution.join()  # the batch may copy pages on the device
        places = None
        if self.given is not None and mode.tokens_per_seq is None:
            places = () if embeds is None else embeds.places
        if mode.num_drafts and num_drafts is None:
            num_drafts = [0] * len(seqs)
        batch = self.cache.make_batch(
            seqs,
            tokens,
            positions=positions,
            num_position_axes=self.num_position_axes,
            table_width=self.planner.table_width,
            num_drafts=num_drafts,
            embed_places=places,
        )
        self.check(batch)
        variant, planned = self.planner.plan(batch, mode, logits)
        self.compile(variant, planned)
        if self.given is not None and embeds is not None:
            self.given.write(embeds)
        return variant, planned

    def plan_idle(self) -> tuple[Variant, Inputs]:
        """Plan and compile a step without sequences."""
        idle, planned = self.planner.plan_idle()
        self.check(planned.parts[0].batch)
        self.compile(idle, planned)
        return idle, planned

    def check(self, batch: Batch) -> None:
        """Call the user's ``check_batch`` with the batch of a step."""
        if self.check_batch is not None:
            self.check_batch(batch)

    def compile(self, variant: Variant, first: Inputs | None = None) -> None:
        """Compile a variant if steps are compiled, and wait for the kernels of first steps.

        ``first`` are the inputs of the step that will run first, if they are known.
        """
        if not self.steps.is_ready(variant):
            self._prepare(variant, first)
            self.steps.save_if_new()
        if not self._is_built:
            self.builds.wait_for_first()
            self._is_built = True

    def _prepare(self, variant: Variant, first: Inputs | None) -> None:
        if self.capture is None:
            self.steps.prepare(variant, first)
            return
        with on_capture_stream(self.device):  # tracing runs a step once
            record = self.steps.prepare(variant, first)
        if record is not None:
            self.capture.check(variant, record.ops)

    def advance(
        self,
        seqs: Sequence[HeldSequence],
        lengths: Sequence[int],
        variant: Variant,
        run: Callable[[], ResultT],
    ) -> ResultT:
        """Run a step and count ``lengths`` new tokens of its sequences; cut off, it breaks them."""
        are_read = variant.mode.tokens_per_seq is None
        return self.run(seqs, run, lambda: self.cache.commit(seqs, lengths, are_read=are_read))

    def run(
        self,
        seqs: Sequence[HeldSequence],
        run: Callable[[], ResultT],
        commit: Callable[[], None],
    ) -> ResultT:
        """Run a step of sequences, then ``commit`` its tokens; cut off, it breaks the sequences."""
        try:
            result = run()
            commit()
        except BaseException:
            self.cache.mark_broken(seqs)
            raise
        return result
