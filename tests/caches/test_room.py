"""Pools that do not fit are refused with figures, before anything is allocated."""

import mmap

import pytest
import torch

import torch_hybrid.caches.room as room
from tests.caches.test_hybrid import make_cache
from tests.devices import needs_cuda
from torch_hybrid.errors import CapacityError


@pytest.mark.parametrize("sizes", [{"kv_tokens": 99_999_999_999}, {"max_seqs": 10**11}])
def test_pools_that_do_not_fit_say_what_they_need_and_what_there_is(sizes):
    with pytest.raises(CapacityError, match=r"the pools need [\d,]+ bytes .* bytes .* free: lower"):
        make_cache(**sizes)


def test_the_bytes_asked_for_are_those_that_the_pools_take(monkeypatch):
    pools = sum(pool.nbytes for pool in make_cache().pool_tensors())
    monkeypatch.setattr(room, "free_bytes", lambda device: pools)
    make_cache()
    monkeypatch.setattr(room, "free_bytes", lambda device: pools - 1)
    with pytest.raises(CapacityError, match=f"the pools need {pools:,} bytes .* {pools - 1:,} byt"):
        make_cache()
    with pytest.raises(CapacityError, match="lower kv_tokens, now 28, or max_seqs, now 4"):
        make_cache()


def test_free_bytes_of_a_host_are_what_can_be_allocated():
    free = room.free_bytes(torch.device("cpu"))
    if free is None:
        pytest.skip("the system does not say how much memory is free")
    assert free > 1 << 24
    mmap.mmap(-1, free // 2).close()


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2500\ninactive_file 400\n")
    monkeypatch.setattr(room, "_CGROUP", tmp_path)
    assert room.free_bytes(torch.device("cpu")) == 2400
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free_bytes(torch.device("cpu")) != 2400
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("7000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("8000")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 500")
    assert room.free_bytes(torch.device("cpu")) == 0


@needs_cuda
def test_pools_that_do_not_fit_a_gpu_are_refused():
    free = room.free_bytes(torch.device("cuda"))
    with pytest.raises(CapacityError, match="cuda has"):
        make_cache(kv_tokens=10 * free, device="cuda")
