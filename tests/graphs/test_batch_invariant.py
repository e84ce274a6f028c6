"""Logits of a batch-invariant runner have the same bits however their tokens came to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, VOCAB_SIZE, make_model
from torch_hybrid.graphs.check_options import check_invariant

LENGTH = 75  # more than a chunk of a recurrence, a block of keys, a stretch of tokens
CUTS = [1, 32, 2, 33, 7]
# Products of torch in their layers, which are no linear layers.
REFUSED = {"glm5_next": "matmul", "recurrent_gemma": "baddbmm"}
IN_BF16 = ("qwen3_next", "falcon_h1", "bailing_hybrid", "lfm3")  # of different mixers


def make_runner(
    family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: object
) -> th.Runner:
    sizes = {"max_seqs": 5, "max_tokens": 192, "kv_tokens": 640, "page_size": 8, "compile": False}
    model = th.adapt(make_model(family, **FEWEST_LAYERS[family]).to(device, dtype))
    return th.Runner(model, **{**sizes, "batch_invariant": True, **options})


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def in_pieces(runner: th.Runner, prompt: list[int], cuts: Sequence[int]) -> Tensor:
    """The logits after each token of a prompt that comes in pieces."""
    (seq,) = runner.new_sequences(1)
    ends = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
    assert ends[-1] == len(prompt)
    pieces = [prompt[a:b] for a, b in pairwise(ends)]
    logits = [runner.extend([seq], [piece], logits="all") for piece in pieces]
    runner.free([seq])
    return torch.cat(logits)


def among_others(runner: th.Runner, prompt: list[int], cuts: Sequence[int]) -> Tensor:
    """The same, while other sequences come, decode and go."""
    (seq, *others) = runner.new_sequences(4)
    logits, first = [], 0
    for step, size in enumerate(cuts):
        lengths = [(5 * step + 11 * i) % 29 + 1 for i in range(len(others))]
        pieces = [tokens(length, seed=length) for length in lengths]
        given = [pieces[0], prompt[first : first + size], *pieces[1:]]
        out = runner.extend([others[0], seq, *others[1:]], given, logits="all")
        logits.append(out[lengths[0] :][:size])
        first += size
    runner.free([seq, *others])
    return torch.cat(logits)


@pytest.mark.parametrize("family", REFUSED)
def test_products_of_torch_are_refused(family: str):
    runner = make_runner(family)
    with pytest.raises(th.UnsupportedError, match=f"calls {REFUSED[family]}, whose order of add"):
        in_pieces(runner, tokens(4), [4])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in sorted(BUILDERS.keys() - REFUSED.keys())),
        *((family, torch.bfloat16) for family in IN_BF16),
    ],
    ids=str,
)
def test_any_cut_in_any_company_has_the_same_bits(family: str, dtype: torch.dtype):
    assert_same_bits(make_runner(family, dtype))


def assert_same_bits(runner: th.Runner) -> None:
    prompt = tokens(LENGTH)
    whole = in_pieces(runner, prompt, [LENGTH])
    assert torch.equal(in_pieces(runner, prompt, CUTS), whole)
    assert torch.equal(in_pieces(runner, prompt[:9], [1] * 9), whole[:9])
    assert torch.equal(among_others(runner, prompt, CUTS), whole)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm3"])
def test_on_a_gpu(family: str, dtype: torch.dtype):
    runner = make_runner(family, dtype, "cuda", compile=True)
    assert_same_bits(runner)
    assert list(runner.report().graphs) == ["extend"]


def test_on_a_gpu_all_steps_are_of_one_graph():
    model = Mock(device=torch.device("cuda"), ranks=None)
    check_invariant(model, True, "off")
    named = r"not to be had with compile=False, two_batch_overlap='on'$"
    with pytest.raises(th.UnsupportedError, match=named):
        check_invariant(model, False, "on")


def test_compiled_steps_too():
    """With experts, a shared one among them, whose gate is one number of a token."""
    runner = make_runner("qwen3_next", compile=True)
    assert_same_bits(runner)
    called = {op for ops in runner.report().ops.values() for op in ops}
    assert "linear[cpp_invariant]" in called
    assert "gated_delta_step[cpp]" in called


def test_what_depends_on_the_batch_is_refused_by_name():
    with pytest.raises(th.UnsupportedError, match=r"torch: it has no batch_invariant"):
        make_runner("qwen3", backends=th.Backends(full="torch"))
    with pytest.raises(ValueError, match="needs compile=True or False, got 'background'"):
        make_runner("qwen3", compile="background")
