"""Modules of one's own of every kind of mixer: few graphs for any batches, and the same results."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

import torch_hybrid as th
from tests.layers.fuzz import BUCKETS, Round
from tests.layers.own_modules import BLOCKS, VOCAB, Loop, OwnModule
from torch_hybrid.backends.free_sizes import free_sizes
from torch_hybrid.backends.step import _BACKENDS
from torch_hybrid.batch import pad_to

# Sizes that are equal to one another, to widths of heads and of the model, 1, and none of these.
BATCHES = ((5,), (7, 3), (1,), (16,), (1, 1), (2, 2, 2, 2), (32, 1), (0, 17), (60, 9, 31))
GROUPS = [[*BLOCKS][start : start + 5] for start in range(0, len(BLOCKS), 5)]


def serve(loop: Loop, call: Any, lengths: Sequence[int]) -> list[Tensor]:
    """Return the logits of a step of so many tokens of each sequence, and of one of decode."""
    rng = random.Random(sum(lengths))
    seqs, logits = loop.cache.allocate(len(lengths)), []
    for step in range(2):
        tokens = [[rng.randrange(VOCAB) for _ in range(1 if step else n)] for n in lengths]
        logits.append(loop.run(call, seqs, tokens))
    loop.cache.free(seqs)
    return logits


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """A count of the graphs since the test began."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()


def test_every_kind_of_layer_has_a_block() -> None:
    kinds = {spec.kind for build in BLOCKS.values() for spec in build().specs}
    assert kinds == set(_BACKENDS) - {
        "previous_hidden"
    }  # of heads that draft, which a Runner calls


@pytest.mark.parametrize("name", BLOCKS)
def test_any_batches_share_a_few_graphs(name: str, graphs: Callable[[], int]):
    """Two where steps are padded, of decode and extend; one more to decode one token alone."""
    module = OwnModule([name])
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    expected = [serve(Loop(module), module, lengths) for lengths in BATCHES]
    for buckets, most in ((BUCKETS, 2), (None, 3)):
        loop = Loop(module, buckets)
        for lengths, logits in zip(BATCHES, expected, strict=True):
            torch.testing.assert_close(serve(loop, compiled, lengths), logits)
        assert graphs() <= most


def test_mla_that_is_expanded_needs_no_more(graphs: Callable[[], int]):
    module = OwnModule(["latent_attention", "gated_delta_rule"])
    loop = Loop(module, BUCKETS, prefix=th.PrefixPolicy(absorbed="never"))
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for lengths in BATCHES:
        serve(loop, compiled, lengths)
    assert graphs() == 2


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_sizes_that_dynamo_finds_out_itself(names: list[str], graphs: Callable[[], int]):
    """``dynamic=None``, within its limit of recompiles."""
    module = OwnModule(names)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    loop, plain = Loop(module), Loop(module)
    for lengths in BATCHES:
        expected = serve(plain, module, lengths)
        torch.testing.assert_close(serve(loop, compiled, lengths), expected)
    assert graphs() <= 4


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
@pytest.mark.parametrize("lengths", [(5, 7, 3), (1, 1, 1, 1, 1)], ids=["extend", "decode"])
def test_export_with_all_sizes_free(names: list[str], lengths: tuple[int, ...]):
    module = OwnModule(names)

    def arguments(lengths: Sequence[int]) -> tuple[Tensor, Tensor, th.Step]:
        loop = Loop(module, BUCKETS, prefix=th.PrefixPolicy(absorbed="always"))
        seqs = loop.cache.allocate(len(lengths))
        loop.cache.reserve(seqs, [20] * len(lengths))
        loop.cache.commit(seqs, [20] * len(lengths))
        return loop.arguments(seqs, [[2] * n for n in lengths])

    example, shapes = arguments(lengths), ShapesCollection()
    for tensor in pytree.tree_leaves(example):
        shapes[tensor] = dict.fromkeys(range(tensor.ndim), Dim.AUTO)
    with torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes=shapes).module()
        for others in ((9, 2), (60,), (1, 30, 4, 4)) if max(lengths) > 1 else ((1,), (1,) * 9):
            given = arguments(others)
            expected = module(*copy.deepcopy(given))
            torch.testing.assert_close(exported(*given), expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_modules_over_random_batches(seed: int):
    """``python -m tests.layers.fuzz`` runs it for longer."""
    assert Round(seed).run(12) > 0


def test_marks_are_those_of_dynamo():
    ours, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    free_sizes(ours)
    torch._dynamo.maybe_mark_dynamic(theirs, [0, 1])
    assert vars(ours) == vars(theirs)


def planned(mode: th.Mode, lengths: Sequence[int], modes: Sequence[th.Mode]) -> tuple[Any, Any]:
    """Plans of a batch that is given as it is, and of one that was padded by hand."""
    module = OwnModule(["gated_delta_rule", "paged_attention"])
    cache = th.HybridCache(module.table, max_seqs=4, kv_tokens=256, page_size=64)
    backends = th.make_backends(module.table, cache.sizes, None, modes)
    batch = cache.make_batch(cache.allocate(len(lengths)), [[3] * n for n in lengths])
    padded = pad_to(batch, num_seqs=max(2, batch.num_seqs), num_tokens=batch.num_tokens)
    return tuple(th.plan_all(backends, each, mode) for each in (batch, padded))


@pytest.mark.parametrize("lengths", [(1,), (5,), (0, 1), (4, 2)])
def test_no_size_of_a_plan_is_below_two(lengths: tuple[int, ...]):
    plans, padded = planned(th.Mode.EXTEND, lengths, [th.Mode.DECODE, th.Mode.EXTEND])
    tensors, others = pytree.tree_leaves(plans), pytree.tree_leaves(padded)
    assert all(map(torch.equal, tensors, others))
    sizes = {size for tensor in tensors for size in tensor.shape}
    assert min(sizes - {sum(lengths)}) >= 2
    assert plans["paged_attention"].page_table.shape == (2, 2)


@pytest.mark.parametrize(
    ("lengths", "modes", "op"),
    [
        ((1, 1), [th.Mode.DECODE, th.Mode.EXTEND], "gated_delta_step"),
        ((0, 1), [th.Mode.DECODE, th.Mode.EXTEND], "gated_delta_step"),
        ((1, 2), [th.Mode.DECODE, th.Mode.EXTEND], "gated_delta_rule"),
        ((1, 1), [th.Mode.EXTEND], "gated_delta_rule"),
    ],
)
def test_one_token_each_is_decoded(lengths: tuple[int, ...], modes: list[th.Mode], op: str):
    plans, _ = planned(th.Mode.EXTEND, lengths, modes)
    assert plans["gated_delta_rule"].statics.impls[0][0] == op
