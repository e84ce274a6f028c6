"""kv_tokens="auto": what is left, and no more than can be of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.tiny_models import make_hybrid
from torch_hybrid.caches import room
from torch_hybrid.graphs.options import measure_kv_tokens as kv_room
from torch_hybrid.graphs.runner import Runner

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> th.HybridModel:
    return make_hybrid()


def make_runner(model: Any, **options: Any) -> Runner:
    sizes = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": "auto", "page_size": 16}
    return Runner(model, **{**sizes, "compile": False, **options})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is free on a device."""

    def set_free(num_bytes: int) -> None:
        for module in (room, kv_room):
            monkeypatch.setattr(module, "free_bytes", lambda _: num_bytes)

    return set_free


def test_takes_half_of_a_host(model: th.HybridModel, free: Any) -> None:
    free(8 * MIB)
    runner = make_runner(model)
    found = runner.kv_room
    pools = sum(pool.nbytes for pool in runner.cache.pool_tensors())
    assert found.free == 8 * MIB
    assert found.reserve == 4 * MIB
    assert 3.9 * MIB < pools <= 4 * MIB
    assert runner.max_seq_len == found.num_tokens > 64
    bytes_per_token = sum(cost.per_token for cost in runner.cache.costs())
    assert found.num_tokens * bytes_per_token + found.states <= pools


def test_in_8_bits_there_is_room_for_more(model: th.HybridModel, free: Any) -> None:
    free(8 * MIB)
    wide, narrow = make_runner(model), make_runner(model, kv_dtype="fp8")
    assert narrow.max_seq_len > 3 * wide.max_seq_len


def test_takes_no_more_than_sequences_can_use(model: th.HybridModel, free: Any) -> None:
    free(1 << 40)
    assert make_runner(model).max_seq_len == 3 * model.max_positions


def test_the_same_on_all_ranks(model: th.HybridModel, free: Any) -> None:
    class Least:
        size = 2

        def least(self, count: int, device: torch.device) -> int:
            assert count > 7
            return 7

    free(8 * MIB)
    sizes = th.HybridCache(model.table, max_seqs=3, kv_tokens=16, page_size=16).sizes
    found = kv_room.choose_kv_tokens(
        model.table,
        sizes,
        lambda rows: pytest.fail("nothing is measured on a host"),
        most=None,
        prefix_rows=0,
        captures=False,
        ranks=Least(),
    )
    assert found.num_tokens == 7 * 16


def test_counts_the_states_of_snapshots(model: th.HybridModel, free: Any) -> None:
    free(8 * MIB)
    rooms = [make_runner(model, max_snapshots=count).kv_room for count in (0, 4)]
    without, with_four = (room.states for room in rooms if room is not None)
    assert with_four * 4 == without * 8  # three sequences, the null slot, and four snapshots


def test_errors_say_bytes(model: th.HybridModel, free: Any) -> None:
    free(3 * 16384)
    with pytest.raises(th.CapacityError) as refused:
        make_runner(model)
    for wrong in ("most", True):
        expected = f"kv_tokens must be an integer or 'auto', got {wrong!r}"
        with pytest.raises(ValueError, match=expected):
            make_runner(model, kv_tokens=wrong)
    with pytest.raises(th.CapacityError) as too_many:
        make_runner(model, kv_tokens=1 << 20)
    assert str(refused.value) == (
        "no room is left for a page of 16 tokens: 48 KiB free, of which 0 B for steps, 31.5 KiB "
        "for states and 24 KiB in reserve; 517 bytes a token; lower max_seqs, now 3, or max_tokens"
    )
    assert str(too_many.value) == (
        "the pools need 536,911,360 bytes (0.5 GiB), and cpu has 49,152 bytes (0.0 GiB) free: lower"
        " kv_tokens, now 1048576, or max_seqs, now 3 (512 MiB are for tokens, 31.5 KiB for states "
        "of sequences)"
    )


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_leaves_room_for_steps_on_a_gpu(compile: bool) -> None:
    """Takes what is free of the card, so it fails where other processes use it too."""
    model = make_hybrid()
    model.hf_model.to("cuda")
    model.max_positions = None
    # Tokens of so small a model take little more than their places in page tables of short pages.
    runner = make_runner(model, compile=compile, max_seqs=64, max_tokens=2048, page_size=128)
    total = torch.cuda.get_device_properties(0).total_memory
    pools = sum(pool.nbytes for pool in runner.cache.pool_tensors())
    assert pools > 0.8 * runner.kv_room.free
    runner.warm_up()
    seqs = runner.new_sequences(64)
    runner.extend(seqs, [[1] * 32] * 64)
    runner.extend(seqs, [[1]] * 64)
    free, _ = torch.cuda.mem_get_info()
    assert 0 < free < 0.06 * total + (1 << 30)
