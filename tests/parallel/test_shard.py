"""A model that 2 or 4 processes share gives the logits of one process, on every rank."""

from __future__ import annotations

import pytest
import torch

import torch_hybrid as th
from tests.parallel import jobs
from tests.parallel.jobs import HYBRID, CompiledJob, Shared
from tests.parallel.processes import results, run_ranks
from tests.tiny_models import BUILDERS, EACH_KIND, make_hybrid

# Four ranks divide every kind of mixer; what families make of them is divided by two as well.
FAMILIES = {
    2: [*BUILDERS],
    4: [*EACH_KIND, "olmo_hybrid", "nemotron_h", "ring_2_5"],
}
MIXTURES = ["qwen3_next", "deepseek_v3", "granitemoehybrid", "nemotron_h", "ring_2_5"]
# Inductor is given the layer that has every collective, and sizes that only a step knows. Its code
# of a linear layer that is shared: ``examples/overlap_two_processes.py``.
COMPILED = {
    "experts cut": CompiledJob("qwen3_next", "tensor", HYBRID[:1], 2, by_inductor=False),
    "experts whole": CompiledJob("qwen3_next", "all_to_all", HYBRID[1:], 2, by_inductor=True),
    "norms over all heads": CompiledJob("olmo_hybrid", "tensor", HYBRID, 2, by_inductor=False),
}
Runs = list[dict[str, Shared]]  # by rank, by family


def assert_shared(shared: list[Shared]) -> None:
    """What came of one model, by rank."""
    error = shared[0].error
    assert error is not None
    assert error < 2e-5, f"{error:.1e} of the largest logit"
    assert len({one.digest for one in shared}) == 1, "the ranks differ"
    assert {one.counts for one in shared} == {(0, 0, 0)}


def shared_by(num_ranks: int) -> Runs:
    """All families in one go: starting processes takes longer than what they do."""
    return results(run_ranks(jobs.share_all, num_ranks, FAMILIES[num_ranks], False, limit_s=300))


@pytest.fixture(scope="module")
def two() -> Runs:
    return shared_by(2)


@pytest.fixture(scope="module")
def four() -> Runs:
    return shared_by(4)


@pytest.mark.parametrize("family", FAMILIES[2])
def test_logits_of_two_are_those_of_one_process(two: Runs, family: str):
    assert_shared([run[family] for run in two])


@pytest.mark.parametrize("family", FAMILIES[4])
def test_logits_of_four_are_those_of_one_process(four: Runs, family: str):
    assert_shared([run[family] for run in four])


@pytest.mark.parametrize("family", ["olmo_hybrid", "minimax", "nemotron_h"])
def test_pools_shrink_with_the_heads(two: Runs, four: Runs, family: str):
    for runs in (two, four):
        alone, shared = runs[0][family].pool_bytes
        # Two heads of keys and values, or two groups, are held twice by four ranks.
        assert alone / len(runs) <= shared <= alone / 2


def test_the_same_bits_in_any_batch():
    """Of four ranks, whose parts a collective adds up in an order that goes by their size."""
    results(run_ranks(jobs.keep_bits, 4, limit_s=200))


def test_no_sum_over_the_ranks_is_left_to_a_collective():
    """In graphs, which two ranks trace as four do."""
    results(run_ranks(jobs.keep_bits_in_graphs, 2, limit_s=200))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_whole_experts(num_ranks: int):
    ended = run_ranks(jobs.share_all, num_ranks, MIXTURES, False, "all_to_all", limit_s=200)
    for family in MIXTURES:
        assert_shared([run[family] for run in results(ended)])


def test_adapters():
    """A rank adds its rows of a layer's adapter, or the products of its columns before the sum."""
    pytest.importorskip("peft", reason="peft is not installed")
    families = ["qwen3_5", "kimi_linear", "zamba", "falcon_h1", "qwen3_next"]
    for errors in results(run_ranks(jobs.adapt_all, 2, families, limit_s=300)):
        assert max(errors) < 1e-4, errors


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_states_are_cut_block_by_block(num_ranks: int):
    """A rank's convolution state is its heads of q, of k and of v, not a stretch of [q | k | v]."""
    by_rank = results(run_ranks(jobs.states, num_ranks))
    num_layers = len(by_rank[0]) // 2
    for rank, found in enumerate(by_rank):
        for alone, shared in zip(found[:num_layers], found[num_layers:], strict=True):
            (conv, state, spec), (own_conv, own_state, own_spec) = alone, shared
            first_k = rank * spec.num_k_heads // num_ranks
            first_v = rank * own_spec.num_v_heads
            blocks = conv.split([spec.k_channels, spec.k_channels, spec.v_channels], dim=-1)
            firsts = [first_k * spec.head_k_dim] * 2 + [first_v * spec.head_v_dim]
            widths = [own_spec.k_channels] * 2 + [own_spec.v_channels]
            expected = [b.narrow(-1, f, w) for b, f, w in zip(blocks, firsts, widths, strict=True)]
            assert conv.any()
            torch.testing.assert_close(own_conv, torch.cat(expected, -1), rtol=1e-4, atol=1e-5)
            heads = state.narrow(1, first_v, own_spec.num_v_heads)
            torch.testing.assert_close(own_state, heads, rtol=1e-4, atol=1e-5)


def test_vocabulary_is_cut_where_the_ranks_divide_it():
    cases = {(200, False): 100, (200, True): 100, (201, True): 201}
    for found in results(run_ranks(jobs.vocabularies, 2, list(cases))):
        assert found == [{rows} for rows in cases.values()]


@pytest.mark.parametrize("family", ["bamba", "qwen3"])
def test_bfloat16_rounds_as_one_process_does(family: str):
    for alone, shared in results(run_ranks(jobs.rounding, 2, family)):
        assert 0 < shared < 1.5 * alone


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Shared]]:
    """All in one go: the first compile of a process takes twice as long as the others."""
    jobs_of_all = list(COMPILED.values())
    ended = run_ranks(jobs.share_compiled, 2, jobs_of_all, limit_s=590, timeout_s=400)
    return dict(zip(COMPILED, zip(*results(ended), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(compiled: dict[str, list[Shared]], name: str):
    assert_shared(compiled[name])


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        ("qwen3", 3, "the number of ranks must divide num_q_heads, got 3 ranks and 4"),
        ("qwen3_next_dense", 8, "must divide num_v_heads, got 8 ranks and 4"),
        ("kimi_linear", 2, "must divide num_heads, got 2 ranks and 3"),
        ("deepseek_v3", 3, "must divide num_heads, got 3 ranks and 4"),
        ("bamba", 3, "must divide num_heads, got 3 ranks and 8"),
    ],
)
def test_refuses_heads_that_ranks_do_not_divide(family: str, num_ranks: int, message: str):
    model = th.adapt(jobs.make_model(family))
    with pytest.raises(th.UnsupportedError, match=message):
        model.table.divided(num_ranks)


def test_refuses_key_heads_that_neither_divide_nor_are_divided():
    spec = th.AttentionSpec(num_q_heads=12, num_kv_heads=4, head_dim=8, scale=1.0)
    with pytest.raises(th.UnsupportedError, match="got 6 ranks and 4"):
        spec.divided(6)


def test_refuses_before_torch_distributed_is_there():
    with pytest.raises(ValueError, match="must be initialised"):
        th.shard(make_hybrid())


def test_refuses_unknown_experts():
    with pytest.raises(ValueError, match="'tensor' or 'all_to_all', got 'some'"):
        th.shard(make_hybrid(), experts="some")


def test_refusals_inside_a_group():
    results(run_ranks(jobs.refusals, 2))
