"""Training steps of whole models on a CPU, beside transformers: forward, loss and backward.

    python -m benchmarks.training_steps [--models NAME ...] [--dtypes NAME ...] [--layers N]
        [--packings 2x512 8x128] [--compile-limit SECONDS] [--rounds N]

Sequences are packed in one row; transformers takes them as a batch, which has no padding here. One
thread runs, and steps take turns. Losses and gradients are compared first. The floor is the time
that the products with weights take, forward once and backward twice, at the rate of multiply-adds
that wait for nothing. While times are taken, malloc keeps what is freed, as ``tune_allocator`` lets
it: else the kernel clears each large tensor of a step anew. Memory is the peak of a fresh process
for each contestant, less what it held before it had a model: weights, their gradients and all else
of a step.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torch_hybrid as th
from benchmarks.ceilings import Peak
from benchmarks.contestants import failure
from benchmarks.memory import MB, reset_peak, resident
from benchmarks.models import make_model
from benchmarks.timing import best_of, interleave
from torch_hybrid.host.malloc import trim, tune_allocator

MODELS = ("qwen3_next", "qwen3_5", "kimi_linear")
# A batch-invariant trainer's server is compiled.
INVARIANT = "ours, batch-invariant"
WHO = ("ours", "ours, compiled", "transformers", "transformers, compiled", INVARIANT)
# Distance of gradients from those of transformers, as a share of their norm. Both round: of twelve
# layers in bfloat16, ours are up to .10 from float32's, those of transformers .16.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the tokens of a step."""

    model: str
    layers: int
    dtype: torch.dtype
    num_seqs: int
    length: int

    def make(self, who: str) -> tuple[Any, Callable[[], Tensor]]:
        """Make a contestant's model, and its step, which returns the loss."""
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"num_hidden_layers": self.layers}
        model = make_model(self.model, self.dtype, **sizes).train().requires_grad_()
        tokens = torch.randint(8, model.config.vocab_size, (self.num_seqs, self.length))
        given: dict[str, Any] = {"use_cache": False}
        if "ours" in who:
            th.make_trainable(model, batch_invariant=who == INVARIANT)
            tokens = tokens.view(1, -1)
            offsets = torch.arange(self.num_seqs + 1) * self.length
            given = {"packing": th.Packing(offsets, capacity=self.num_seqs)}
        call = torch.compile(model, dynamic=False) if "compiled" in who else model

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = call(input_ids=tokens, labels=tokens, **given).loss
            loss.backward()
            return loss.detach()

        return model, step

    def products(self, model: nn.Module) -> int:
        """FLOPs of the products with weights: forward, and backward for inputs and weights."""
        kinds = nn.Linear, nn.Conv1d
        weights = [each.weight for each in model.modules() if isinstance(each, kinds)]
        # Convolutions of single channels are no products.
        taken = sum(weight.numel() for weight in weights if weight.shape[1] > 1)
        config: Any = model.config
        top_k = config.get_text_config().to_dict().get("num_experts_per_tok", 1)
        for name, weight in model.named_parameters():
            if ".experts." in name:
                taken += weight[0].numel() * min(top_k, len(weight))
            elif ".shared_experts." in name and weight.ndim == 3:  # all tokens take Inkling's
                taken += weight.numel()
        return 6 * self.num_seqs * self.length * taken


def check(case: Case, who: str, step: Callable[[], Tensor], model: Any, exact: Any) -> None:
    """Raise ValueError unless a step has the loss and the gradients of transformers'."""
    loss, (expected, grads) = step(), exact
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0.0)
    for name, weight in model.named_parameters():
        distance, size = (weight.grad - grads[name]).norm(), grads[name].norm()
        if not distance <= TOLERANCES[case.dtype] * size:  # a router of one expert has none
            raise ValueError(f"{who}: the gradient of {name} is {distance:.1e} of {size:.1e} away")
    model.zero_grad(set_to_none=True)


def measure_peak(case: Case, who: str) -> None:
    """Print the bytes that two steps hold at most, in this process."""
    make_model(case.model, quick=True)  # imports what it needs
    gc.collect()
    bare = resident("VmRSS")
    _, step = case.make(who)
    step()
    gc.collect()
    trim()
    reset_peak()
    step()
    print(resident("VmHWM") - bare)


def peak(case: Case, who: str) -> float:
    """Measure the peak of a contestant in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.training_steps", "--child", who]
    command += ["--models", case.model, "--dtypes", _short(case.dtype)]
    command += ["--layers", str(case.layers), "--packings", f"{case.num_seqs}x{case.length}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def run(case: Case, *, rate: float, limit: int, rounds: int) -> None:
    """Compare, time and print the contestants of a case."""
    theirs, step = case.make("transformers")
    exact = step(), {name: weight.grad for name, weight in theirs.named_parameters()}
    steps = {"transformers": step}
    for who in WHO:
        if who == "transformers" or (who != "ours" and not limit):
            continue
        model, step = case.make(who)
        if "compiled" in who and (why := failure(step, limit=limit)):
            print(f"{who}: {why}", flush=True)
            continue
        try:
            check(case, who, step, model, exact)
        except ValueError as error:  # transformers, compiled in bfloat16
            if "ours" in who:
                raise
            print(error, flush=True)
            continue
        steps[who] = step
    floor = case.products(theirs) / rate
    theirs.zero_grad(set_to_none=True)
    del exact
    times = interleave(steps, rounds=rounds)
    best = min((who for who in times if "ours" not in who), key=lambda who: times[who].best)
    for who, time in times.items():
        held = "" if "compiled" in who else f"{peak(case, who) / MB:.0f}"
        print(
            f"| {case.model}, {case.layers} layers, {_short(case.dtype)}, "
            f"{case.num_seqs}x{case.length} | {who} | {time.best * 1e3:.0f} "
            f"| {time.best / floor:.2f} | {times[best].over(time):.2f} | {held} |",
            flush=True,
        )


def multiply_add_rate(dtype: torch.dtype) -> float:
    """Measure FLOPs per second of multiply-adds that wait for nothing."""
    multiply_adds = Peak(dtype)
    flops = 32 * multiply_adds.flops  # as long as a step
    return flops / best_of(lambda: multiply_adds(flops), rounds=5)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Measure each case, or in a child the memory of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--packings", nargs="+", default=("2x512", "8x128"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-limit", type=int, default=600, metavar="SECONDS")
    parser.add_argument("--child", choices=WHO, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child is None:
        tune_allocator()
    rates = {}
    for name in options.dtypes if options.child is None else ():
        rates[name] = multiply_add_rate(getattr(torch, name))
        print(f"{name}: {rates[name] / 1e9:.0f} GFLOP/s of multiply-adds", flush=True)
    if not options.child:
        print("| step | who | ms | of the floor | faster than transformers' best | peak MB |")
        print("|---|---|---|---|---|---|")
    for model in options.models:
        for packing in options.packings:
            for name in options.dtypes:
                count, length = map(int, packing.split("x"))
                case = Case(
                    model=model,
                    layers=options.layers,
                    dtype=getattr(torch, name),
                    num_seqs=count,
                    length=length,
                )
                if options.child:
                    measure_peak(case, options.child)
                else:
                    rate, limit = rates[name], options.compile_limit
                    run(case, rate=rate, limit=limit, rounds=options.rounds)


if __name__ == "__main__":
    main()
