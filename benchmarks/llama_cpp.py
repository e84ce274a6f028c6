"""Beside llama.cpp: the same weights, tokens and threads, by turns in one process.

    python -m benchmarks.llama_cpp [--model NAME] [--dtype NAME] [--threads N] [--weights int8]

It needs llama-cpp-python, built for this machine, and gguf:

    CMAKE_ARGS=-DGGML_NATIVE=on pip install --no-binary llama-cpp-python llama-cpp-python gguf

The random weights are written as a GGUF file, in the same dtype, and llama.cpp keeps its KV cache
in that dtype too. Nothing is timed before its logits agree with ours, at a prefill and at decodes
of each size, which shows that the file is right; ours agree with transformers'. In float32 they are
compared without its flash attention, which rounds values to float16; what is timed has it, as it is
the default.

With --weights int8 or int4, ours are made integers by ``th.quantize``, llama.cpp's are Q8_0 or
Q4_K_M by its own program, and ours as they were take turns with both.

    decode 1, 8, 32  of sequences of 128 to 512 tokens
    prefill 512      of one prompt
    serving          of 16 requests at once: prompts of 16 to 512 tokens, 32 new ones each, greedy

Decode takes turns with a read of the bytes that a step must move, and prefill with its
multiply-adds, which are the floors (``benchmarks.floor``).
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.ceilings import Peak
from benchmarks.contestants import Ours
from benchmarks.decode import NUM_CHECKED
from benchmarks.floor import Read, step_bytes, step_flops
from benchmarks.llama_cpp_contestant import LlamaCpp, quantized_gguf
from benchmarks.llama_cpp_weights import LLAMA_CPP, write_gguf
from benchmarks.mixers import Row
from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.results import Results, arguments, parse, title
from benchmarks.serve import Tokens, make_prompts, num_equal, serve
from benchmarks.timing import Times, interleave
from torch_hybrid import Engine, Runner, adapt, quantize

# Largest difference of logits, of the largest logit. In float32 that of tiny models was 1.5e-5
# (granitemoehybrid), 1.4e-4 (qwen3_5) and 1.3e-3 (falcon_h1); in bfloat16 each rounds at other
# places. A file that is wrong is off by all of it.
DIFFERENCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
# Each rounds random weights in its own way, and llama.cpp what they multiply too: by a file that is
# wrong, 1.4 would be expected (int4 was off by 0.97). That it is right shows without ``--weights``.
DIFFERENCE_OF_INTEGERS = {"int8": 0.3, "int4": 1.2}
NUM_NEW = 32
STEP_TOKENS = 1024  # of a step of serving
PARTS = ("decode", "prefill", "serving")


def missing() -> str:
    """What has to be installed first; empty when all is there."""
    names = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
    return " and ".join(name for module, name in names.items() if find_spec(module) is None)


def serve_llama(model: LlamaCpp, prompts: Tokens, num_new: int, *, max_seqs: int) -> Tokens:
    """All prompts at once, continuously batched: decodes first, then prompts in chunks."""
    waiting = deque(enumerate(prompts))
    made: Tokens = [[] for _ in prompts]
    left: dict[int, list[int]] = {}  # by slot: tokens that are to be computed
    request: dict[int, int] = {}
    free = list(range(max_seqs))
    while waiting or left:
        while waiting and free:
            slot = free.pop()
            request[slot], prompt = waiting.popleft()
            left[slot] = list(prompt)
            model.restart(slot)
        room = STEP_TOKENS
        step: dict[int, Sequence[int]] = {}
        for slot in sorted(left, key=lambda slot: len(left[slot]) > 1):
            if chunk := left[slot][:room]:
                step[slot] = chunk
                room -= len(chunk)
        drawn = model.extend(step).argmax(-1).tolist()
        for slot, token in zip(step, drawn, strict=True):
            del left[slot][: len(step[slot])]
            if left[slot]:
                continue
            made[request[slot]].append(token)
            left[slot] = [token]
            if len(made[request[slot]]) == num_new:
                del left[slot]
                free.append(slot)
    return made


class Match:
    """Ours and llama.cpp, side by side.

    Args:
        options: of the command line.
        theirs: the same weights.
        max_seqs: that both hold.
        max_len: tokens of each.
    """

    def __init__(
        self, options: argparse.Namespace, path: Path, *, max_seqs: int, max_len: int
    ) -> None:
        hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
        write_gguf(hf_model, options.model, path)
        self.oracle = Oracle(hf_model)
        sizes = {
            "max_seqs": max_seqs,
            "max_tokens": STEP_TOKENS,
            "kv_tokens": max_seqs * (max_len + 16),
        }
        model = adapt(copy.deepcopy(hf_model))
        self.others: dict[str, Ours] = {}
        self.has_integers = options.weights != "auto"
        if self.has_integers:
            plain = Runner(adapt(copy.deepcopy(hf_model)), **sizes)
            self.others[f"ours, {options.dtype}"] = Ours(plain)
            quantize(model, options.weights)
            path = quantized_gguf(path, options.weights)
        self.model = model
        self.runner = Runner(model, **sizes)
        self.ours = Ours(self.runner)
        self.read = Read(model.parameters())
        self.peak = Peak(options.torch_dtype)
        llama = partial(
            LlamaCpp,
            path,
            max_seqs=max_seqs,
            max_len=max(max_len, STEP_TOKENS),
            num_threads=torch.get_num_threads(),
            dtype=options.torch_dtype,
        )
        self.llama = llama()
        # The same file, mapped once more: its pages are shared.
        self.compared = llama(flash=False) if options.torch_dtype is torch.float32 else self.llama
        self.allowed = DIFFERENCE_OF_INTEGERS.get(options.weights, DIFFERENCE[options.torch_dtype])
        self.largest = 0.0  # difference of logits so far

    def agree(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        """Compare logits.

        Raises:
            SystemExit: they are not the same model's; there is nothing to report then.
        """
        off = ((ours - theirs).abs().max() / ours.abs().max()).item()
        self.largest = max(self.largest, off)
        if not off <= self.allowed:
            raise SystemExit(
                f"{what}: logits of llama.cpp are {off:.1e} of the largest one off ours, and "
                f"{self.allowed:.0e} is allowed: no figures"
            )

    def prefill(self, prompt: list[int], rounds: int) -> tuple[dict[str, Times], Times]:
        """One prompt, whole, and its floor."""

        def ours(contestant: Ours) -> Tensor:
            seqs = contestant.runner.new_sequences(1)
            logits = contestant.runner.extend(seqs, [prompt])
            contestant.runner.free(seqs)
            return logits

        def theirs(llama: LlamaCpp) -> Tensor:
            llama.restart(0)
            return llama.extend({0: prompt})

        for contestant in (self.ours, *self.others.values()):
            contestant.start([])
        for llama in {self.llama, self.compared}:
            llama.start([[0]])
        logits = ours(self.ours)
        for checked in self.others.values() if self.has_integers else [self.ours]:
            self.oracle.check("ours", ours(checked), [prompt])
        self.agree("prefill", logits, theirs(self.compared))
        runs = {"ours": partial(ours, self.ours), "llama.cpp": partial(theirs, self.llama)}
        runs |= {name: partial(ours, other) for name, other in self.others.items()}
        floor = partial(self.peak, step_flops(self.model, [Row(len(prompt), 0)]))
        times = interleave(runs | {"floor": floor}, rounds=rounds)
        return times, times.pop("floor")

    def decode(self, prompts: Tokens, rounds: int) -> tuple[dict[str, Times], Times]:
        """A token for each of these sequences, and its floor."""
        tokens = [1] * len(prompts)
        for contestant in {self.ours, self.llama, *self.others.values()}:
            contestant.start(prompts)
        if self.compared is not self.llama:
            self.compared.start(prompts[:NUM_CHECKED])
        logits, theirs = self.ours.step(tokens), self.compared.step(tokens[:NUM_CHECKED])
        self.agree(f"decode {len(prompts)}", logits[:NUM_CHECKED], theirs)
        contestants = {"ours": self.ours, "llama.cpp": self.llama, **self.others}
        runs = {name: partial(each.step, tokens) for name, each in contestants.items()}
        rows = [Row(1, len(prompt)) for prompt in prompts]
        floors = {
            "read": partial(self.read, step_bytes(self.model, rows)),
            "multiply": partial(self.peak, step_flops(self.model, rows)),
        }
        times = interleave(runs | floors, rounds=rounds)
        turns = zip(times.pop("read").runs, times.pop("multiply").runs, strict=True)
        return times, Times(tuple(map(max, turns)))

    def serve(self, prompts: Tokens, num_new: int, rounds: int) -> tuple[dict[str, Times], str]:
        """Requests at once, and how many tokens are the same."""
        self.ours.start([])
        self.llama.start([[0]] * len(prompts))
        engine, count = Engine(self.runner), len(prompts)
        ours = partial(serve, engine, prompts, num_new)
        theirs = partial(serve_llama, self.llama, prompts, num_new, max_seqs=count)
        equal = num_equal(ours(), theirs())
        times = interleave({"ours": ours, "llama.cpp": theirs}, rounds=rounds, warm_up=0)
        return times, f"serving: {equal} of {count * num_new} tokens are the same"


def _prompts(count: int, vocab_size: int, longest: int) -> Tokens:
    draw = random.Random(count)
    lengths = [draw.randint(longest // 4, longest) for _ in range(count)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _add(results: Results, what: str, times: dict[str, Times], floor: Times | None = None) -> None:
    ours, theirs, *others = times.values()
    over_floor = "" if floor is None else ours.over(floor)
    figures: list[object] = [ours.best * 1e3, theirs.best * 1e3, ours.over(theirs), over_floor]
    for other in others:
        figures += [other.best * 1e3, ours.over(other)]
    results.add(what, *figures)


def main() -> None:
    """Compare, then print; one line where llama.cpp is not there."""
    parser = arguments("Ours beside llama.cpp.")
    parser.set_defaults(model="qwen3_5")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights", choices=["auto", "int8", "int4"], default="auto")
    options = parse(parser)
    if lacking := missing():
        print(f"llama.cpp is left out: install {lacking}")
        return
    if options.model not in LLAMA_CPP:
        print(f"{options.model} is left out: it is not written for llama.cpp, "
              f"{', '.join(LLAMA_CPP)} are")  # fmt: skip
        return
    longest, num_new, count = (48, 4, 4) if options.quick else (512, NUM_NEW, 16)
    rounds = 2 if options.quick else options.rounds
    max_seqs, max_len = max(*options.batches, count), longest + rounds + num_new + 16
    beside = [f"{options.dtype} ms", f"ours over {options.dtype}"]
    beside = [] if options.weights == "auto" else beside
    results = Results(
        title=title(options, "Beside llama.cpp"),
        columns=["", "ours ms", "llama.cpp ms", "ours over llama.cpp", "over its floor", *beside],
    )
    with TemporaryDirectory() as folder:
        match = Match(options, Path(folder, "model.gguf"), max_seqs=max_seqs, max_len=max_len)
        vocab_size = match.runner.vocab_size
        for batch in options.batches if "decode" in options.parts else []:
            times, floor = match.decode(_prompts(batch, vocab_size, longest), rounds)
            _add(results, f"decode {batch}", times, floor)
        if "prefill" in options.parts:
            [prompt] = _prompts(1, vocab_size, longest)
            prompt = (prompt * 4)[:longest]
            _add(results, f"prefill {longest}", *match.prefill(prompt, rounds))
        if "serving" in options.parts and options.weights == "auto":
            prompts = make_prompts(count, vocab_size, longest=longest)
            times, note = match.serve(prompts, num_new, min(rounds, 3))
            _add(results, f"serving {count} requests", times)
            results.notes.append(note)
        for llama in {match.llama, match.compared}:
            llama.close()
    results.notes.append(f"largest difference of logits: {match.largest:.1e} of the largest one")
    results.emit(options)


if __name__ == "__main__":
    main()
