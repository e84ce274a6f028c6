"""Steps through torch.export: sizes free, saved and loaded, equal to the module that was traced.

The package of AOTInductor is made, and run by a process without a compiler, in
``examples/export_decode_step.py``.
"""

from __future__ import annotations

import copy
import io
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

import torch_hybrid as th
from tests.layers.test_layers import TABLE, TwoLayers
from tests.tiny_models import BUILDERS, make_hybrid, make_model
from torch_hybrid.backends.mode import MODES
from torch_hybrid.models.families import architecture_of

MODES = list(MODES)


def test_every_pytree_of_ours_has_a_serialized_name():
    # transformers registers subclasses of its outputs itself, by names of its own.
    nodes = [cls for cls in pytree.SUPPORTED_NODES if cls.__module__.startswith("torch_hybrid")]
    ours = [cls for cls in nodes if not issubclass(cls, ModelOutput)]
    assert len(ours) >= 10
    names = {cls: pytree.SUPPORTED_SERIALIZED_TYPES[cls].serialized_type_name for cls in ours}
    assert names == {cls: f"torch_hybrid.{cls.__name__}" for cls in ours}


def planned(table: th.LayerTable, mode: th.Mode, lens: list[int], **options: Any) -> Any:
    """A batch of sequences that hold 40 tokens before, and the step of it."""
    cache = th.HybridCache(table, max_seqs=8, kv_tokens=512, page_size=16)
    for tensor in filter(torch.is_floating_point, cache.pool_tensors()):
        tensor.normal_(generator=torch.Generator().manual_seed(1), std=0.1)
    seqs = cache.allocate(len(lens))
    cache.reserve(seqs, [40] * len(lens))
    cache.commit(seqs, [40] * len(lens))
    batch = cache.make_batch(seqs, [list(range(n)) for n in lens])
    backends = th.make_backends(table, cache.sizes, th.Backends(**options))
    plans = th.plan_all(backends, batch, mode)
    return batch, th.Step(plans=plans, caches=cache.pools, table=table)


@pytest.mark.parametrize("family", BUILDERS)
def test_the_structure_of_a_step_survives_as_text(family: str):
    table = architecture_of(make_model(family).config).table
    prefixes = [th.PrefixPolicy(absorbed=absorbed) for absorbed in ("always", "never")]
    for mode in MODES:
        for prefix in prefixes:
            step = planned(table, mode, [1, 1], prefix=prefix)
            leaves, structure = pytree.tree_flatten(step)
            loaded = pytree.treespec_loads(pytree.treespec_dumps(structure))
            assert loaded == structure
            assert pytree.tree_unflatten(leaves, loaded)[1].table == table


def export(module: nn.Module, arguments: tuple[Any, ...]) -> ExportedProgram:
    shapes = ShapesCollection()
    for tensor in pytree.tree_leaves(arguments):
        shapes[tensor] = dict.fromkeys(range(tensor.ndim), Dim.AUTO)
    with torch.no_grad():
        return torch.export.export(module, arguments, dynamic_shapes=shapes)


def saved_and_loaded(exported: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


@torch.no_grad()
def assert_alike(exported: ExportedProgram, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Outputs, and pools after the step."""
    others = copy.deepcopy(arguments)
    torch.testing.assert_close(exported.module()(*others), module(*arguments))
    for ours, theirs in zip(*map(pytree.tree_leaves, (others, arguments)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_ones_own(mode: th.Mode, caplog: pytest.LogCaptureFixture):
    module = TwoLayers().eval()

    def arguments(lens: list[int]) -> tuple[Tensor, th.Step]:
        return torch.randn(sum(lens), 32), planned(TABLE, mode, lens)[1]

    decode = mode is th.Mode.DECODE
    exported = export(module, arguments([1] * 5 if decode else [5, 7, 3]))
    assert any(size == math.inf for size in map(upper, exported.range_constraints.values()))
    with caplog.at_level(logging.WARNING):
        loaded = saved_and_loaded(exported)
    assert "weights_only" not in caplog.text
    for lens in ([1] * 3, [1] * 7) if decode else ([9, 2], [1, 1, 30, 4, 4]):
        assert_alike(loaded, module, arguments(lens))


def upper(sizes: Any) -> float:
    return math.inf if sizes.upper > 2**60 else float(sizes.upper)


class WholeStep(nn.Module):
    """From tokens to logits."""

    def __init__(self, model: th.HybridModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: th.Batch, step: th.Step) -> Tensor:
        return self.model.logits(self.model(batch.tokens, batch.positions, step))


@pytest.mark.parametrize("family", ["qwen3_next_dense", "kimi_linear"])
def test_a_whole_decode_step_of_a_model(family: str):
    options = {"first_k_dense_replace": 2} if family == "kimi_linear" else {}
    model = make_hybrid(family, **options)
    exported = export(WholeStep(model), planned(model.table, th.Mode.DECODE, [1] * 5))
    arguments = planned(model.table, th.Mode.DECODE, [1] * 3)
    assert_alike(saved_and_loaded(exported), WholeStep(model), arguments)
