"""Experts and linear layers are chosen by the runner, by name or by what can serve them now.

That compiled steps have what was chosen is looked for in ``tests/models/test_compiled.py``.
"""

from __future__ import annotations

import threading

import pytest
from torch.profiler import profile

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.tiny_models import make_hybrid
from torch_hybrid.backends.mode import MODES
from torch_hybrid.backends.select import Choice
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.explain import sections as explain
from torch_hybrid.graphs.passes import DEFAULT_PASSES
from torch_hybrid.graphs.passes.own_linears import LARGE
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.graphs.stepping.model_choices import choosers_of, passes_for

SIZES = {"max_seqs": 2, "max_tokens": 64, "kv_tokens": 128}


def model_with_experts() -> th.HybridModel:
    return make_hybrid("qwen3_next", num_experts=4, num_experts_per_tok=2)


def runner_of(model: th.HybridModel, **names: str) -> Runner:
    return Runner(model, **SIZES, compile=False, backends=th.Backends(**names))


def impls_called(runner: Runner) -> set[str]:
    """By whom experts are computed while a runner takes a step."""
    called = set()
    hooks = [
        experts.register_forward_hook(lambda module, *_: called.add(module.choice.impl))
        for experts in choosers_of(runner.model)
    ]
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [[1, 2, 3]])
    runner.free([seq])
    for hook in hooks:
        hook.remove()
    return called


def rows_of(runner: Runner) -> dict[str, tuple[str, str]]:
    rows = explain.implementations(runner).rows
    return {op: (step, impl.partition("\n")[0]) for step, op, impl, _ in rows if step == "every"}


@pytest.mark.parametrize("products", ["cpp", "torch"])
def test_large_linear_layers_of_uncompiled_steps_are_those_of_the_runner(products: str):
    """The op reads weights of a few rows twice as fast as torch; compiled steps have it as well."""
    runner = runner_of(make_hybrid(intermediate_size=LARGE // 32), products=products)
    assert rows_of(runner) == {"linear": ("every", products)}
    [seq] = runner.new_sequences(1)
    with profile() as profiled:
        runner.extend([seq], [[1, 2, 3]])
    called = {event.name for event in profiled.events() or ()}
    assert ("torch_hybrid::linear" in called) == (products == "cpp")
    assert ("aten::linear" in called) == (products == "torch")


def test_small_linear_layers_of_uncompiled_steps_are_torchs():
    """A call by Python takes longer than they do."""
    assert rows_of(runner_of(make_hybrid())) == {}


def test_experts_are_those_of_the_runner_that_steps():
    model = model_with_experts()
    first, second = runner_of(model, experts="torch"), runner_of(model)
    for _ in range(2):
        assert impls_called(first) == {"torch"}
        assert impls_called(second) == {"cpp"}
    assert rows_of(first) == {"fused_experts": ("every", "torch")}
    assert rows_of(second) == {"fused_experts": ("every", "cpp")}


def test_runners_of_two_threads_have_their_own_experts():
    model = model_with_experts()
    runners = {name: runner_of(model, experts=name) for name in ("torch", "cpp")}
    called: dict[str, set[str]] = {name: set() for name in runners}
    hooks = [
        experts.register_forward_hook(
            lambda module, *_: called[threading.current_thread().name].add(module.choice.impl)
        )
        for experts in choosers_of(model)
    ]

    def serve(runner: Runner) -> None:
        seqs = runner.new_sequences(2)
        for _ in range(10):
            runner.extend(seqs, [[1], [2, 3]])

    threads = [
        threading.Thread(target=serve, args=[runner], name=name) for name, runner in runners.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert called == {"torch": {"torch"}, "cpp": {"cpp"}}
    for hook in hooks:
        hook.remove()


def test_weights_that_changed_their_dtype_after_adapt_are_served():
    model = model_with_experts()
    expected = {experts.choice.impl for experts in choosers_of(model)}
    assert expected == {"cpp"}
    model.half()
    assert impls_called(runner_of(model)) == {"torch"}


def test_a_name_that_cannot_serve_is_an_error():
    model = model_with_experts()
    with pytest.raises(ValueError, match="fused_experts has no implementation 'c'"):
        runner_of(model, experts="c")
    with pytest.raises(UnsupportedError, match="no implementation of fused_experts can serve"):
        runner_of(model, experts="triton")
    with pytest.raises(UnsupportedError, match=r"cpp: dtype torch.float16 is not in"):
        Runner(model.half(), **SIZES, backends=th.Backends(products="cpp"))


def test_linear_layers_are_merged_where_it_pays():
    """On a CPU in all steps, on a GPU in those of few rows, and nowhere if torch computes them."""

    def merging(impl: str) -> set[str]:
        modes = passes_for([Choice(op="linear", impl=impl)], DEFAULT_PASSES, MODES)
        return {
            mode.name for mode, own in modes.items() if "merge_linears" in {p.name for p in own}
        }

    assert merging("cpp") == {"decode", "extend"}
    assert merging("triton") == {"decode"}
    assert merging("torch") == set()
    assert passes_for([], (), MODES) == dict.fromkeys(MODES, ())


def test_no_product_is_left_to_torch_where_rows_are_computed_by_themselves():
    """Those of a few rows are written out before others are refused, on a GPU too."""
    choices = [Choice(op="linear", impl="triton_invariant")]
    of_modes = passes_for(choices, DEFAULT_PASSES, MODES, batch_invariant=True)
    for passes in of_modes.values():
        names = [each.name for each in passes]
        assert names[:3] == ["merge_linears", "narrow_products", "row_products"]
        assert names[-1] == "row_sums"
        assert len(set(names)) == len(names) == len(DEFAULT_PASSES) + 2
    alone = passes_for(choices, (), MODES, batch_invariant=True)[MODES[0]]
    assert [each.name for each in alone] == [*names[1:3], "row_sums"]


@needs_cuda
def test_decode_steps_on_a_gpu_merge_linear_layers():
    runner = Runner(model_with_experts().cuda(), **SIZES)
    runner.warm_up()
    ops = runner.report().ops
    assert ops["decode"]["linear[triton]"]
    assert "linear[triton]" not in ops["extend"]
