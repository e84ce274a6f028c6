"""A mutation that cannot be done in place is found and named; a clean step has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.contract import pool_clones
from torch_hybrid.graphs.compiling.clone_check import PoolClone, find_pool_clones

ROWS, WIDTH = 512, 16
LIBRARY = torch.library.Library("torch_hybrid_clone_check_test", "FRAGMENT")
LIBRARY.define("store(Tensor(a!) pool, Tensor x, Tensor rows) -> Tensor")
LIBRARY.define("store_two(Tensor(a!) k, Tensor(b!) v, Tensor x, Tensor rows) -> Tensor")


def _store(pool: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    pool[rows] = x
    return x * 2


def _store_two(k: Tensor, v: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    k[rows], v[rows] = x, -x
    return x * 2


LIBRARY.impl("store", _store, "CompositeExplicitAutograd")
LIBRARY.impl("store_two", _store_two, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_hybrid_clone_check_test::store", lambda pool, x, rows: torch.empty_like(x), lib=LIBRARY
)
torch.library.register_fake(
    "torch_hybrid_clone_check_test::store_two",
    lambda k, v, x, rows: torch.empty_like(x),
    lib=LIBRARY,
)
ops = torch.ops.torch_hybrid_clone_check_test


def make_x() -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH), torch.tensor([3, 1, 7, 5])


def test_one_pool_for_each_call_is_not_cloned():
    def step(x: Tensor, rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ops.store(second, ops.store(first, x.sin(), rows).cos(), rows) + 1

    pools = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    assert pool_clones(step, [*make_x(), *pools], pools) == []


def test_two_mutated_views_of_one_storage_are_cloned():
    """K and V as two views made outside the graph: the hazard that one packed pool avoids."""

    def step(x: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.store_two(k, v, x.sin(), rows) + 1

    both = torch.zeros(2, ROWS, WIDTH)
    clones = pool_clones(step, [*make_x(), both[0], both[1]], [both, both[0]])
    assert clones
    assert {clone.op for clone in clones} == {"torch_hybrid_clone_check_test.store_two"}


def test_an_old_value_needed_after_the_mutation_is_a_clone():
    def step(x: Tensor, rows: Tensor, pool: Tensor) -> Tensor:
        before = pool.clone()
        ops.store(pool, x, rows)
        return before

    pool = torch.zeros(ROWS, WIDTH)
    [clone] = pool_clones(step, [*make_x(), pool], [pool])
    assert clone.num_elements == ROWS * WIDTH


CODE = """
    buf0 = empty_strided_cpu((512, 16), (16, 1), torch.float32)
    cpp_fused_clone_0(arg0_1, buf0)
    torch.ops.torch_hybrid.paged_attention.default(arg1_1, buf0)
    buf1 = empty_strided_cpu((s0, 16), (16, 1), torch.float32)
    buf2 = empty_strided_cuda((8, 16), (16, 1), torch.float32)
    buf10 = empty_strided_cpu((8192, ), (1, ), torch.float32)
    cpp_fused_add_1(buf1, buf10)
"""


def test_reading_code():
    clones = find_pool_clones(CODE, {512 * 16})
    assert clones == [
        PoolClone(buffer="buf0", num_elements=8192, op="torch_hybrid.paged_attention"),
        PoolClone(buffer="buf10", num_elements=8192, op="a fused kernel"),
    ]
    assert str(clones[0]) == "buf0 (8192 elements) made for torch_hybrid.paged_attention"
    assert find_pool_clones(CODE, {7}) == []


@pytest.mark.parametrize("buffer", ["buf1", "buf10"])
def test_a_name_that_begins_another_is_not_taken_for_it(buffer: str):
    code = f"{buffer} = empty_strided_cpu((4, 2), (2, 1), torch.float32)\n"
    code += "torch.ops.other.op.default(buf100)\n" + f"torch.ops.right.op.default({buffer})\n"
    assert find_pool_clones(code, {8})[0].op == "right.op"
