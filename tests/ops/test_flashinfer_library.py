"""When FlashInfer is taken for callable."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_hybrid.backends.select import Backends
from torch_hybrid.backends.step import make_backends
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.flashinfer import library
from torch_hybrid.specs import AttentionSpec, DeltaRuleSpec, LatentSpec, LayerSpec, LayerTable

INSTALL = "pip install torch-hybrid[flashinfer]"
NEEDED = {"flashinfer-python": "0.7.2.post1", "nvidia-cutlass-dsl": "4.8.1"}


def why(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> str | None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(library, "triton_missing", lambda: None)
    monkeypatch.setattr(library, "nvcc_missing", lambda: None)
    return library.flashinfer_missing(capabilities=library.HOPPER, cutlass_dsl=True)()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (NEEDED, None),
        ({}, f"flashinfer-python is not installed: {INSTALL}"),
        (
            NEEDED | {"flashinfer-python": "0.6.18"},
            "flashinfer-python 0.6.18 is not in the tested range >=0.7.2,<0.8",
        ),
        (
            NEEDED | {"flashinfer-python": "0.8.0rc1"},
            "flashinfer-python 0.8.0rc1 is not in the tested range >=0.7.2,<0.8",
        ),
        ({"flashinfer-python": "0.7.2"}, f"nvidia-cutlass-dsl is not installed: {INSTALL}"),
    ],
    ids=["both", "neither", "older", "newer", "without its compiler"],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], reason: str | None
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why(monkeypatch, installed) == reason


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), None),
        ((8, 0), "its kernel is made for sm_90, the device is sm_80"),
        ((12, 0), "its kernel is made for sm_90, the device is sm_120"),
    ],
)
def test_other_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str | None
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert why(monkeypatch, NEEDED) == reason


def test_a_kernel_that_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    said = f"nvcc, which builds it, is not at {nvcc}, and flashinfer-jit-cache is not installed"
    assert library.nvcc_missing() == said
    nvcc.parent.mkdir()
    nvcc.touch()
    assert library.nvcc_missing() is None
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(library, "Path", lambda _: tmp_path / "no toolkit")
    assert library.nvcc_missing() == said.replace(str(nvcc), "/usr/local/cuda/bin/nvcc")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "installed")
    assert library.nvcc_missing() is None


SIZES = PoolSizes(
    num_pages=8, page_size=16, num_slots=2, dtype=torch.bfloat16, device=torch.device("cuda")
)
GQA = AttentionSpec(num_q_heads=16, num_kv_heads=2, head_dim=256, scale=1.0)
MLA = LatentSpec(num_heads=16, latent_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=1.0)
GDN = DeltaRuleSpec(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_width=4)


@pytest.mark.parametrize(
    ("layer", "op", "installed", "line"),
    [
        (GQA, "paged_attention", {}, f"flashinfer-python is not installed: {INSTALL}"),
        (
            GQA,
            "paged_attention",
            NEEDED | {"flashinfer-python": "0.6.18"},
            "flashinfer-python 0.6.18 is not in the tested range >=0.7.2,<0.8",
        ),
        (
            replace(GQA, head_dim=80),
            "paged_attention",
            NEEDED,
            "head_dim 80 is not one of [64, 128, 256]",
        ),
        (
            replace(MLA, v_dim=64),
            "ragged_attention_with_lse",
            NEEDED,
            "v_head_dim 64 is not one of [128]",
        ),
        (
            GDN,
            "extend gated_delta_rule",
            {"flashinfer-python": "0.7.2.post1"},
            f"nvidia-cutlass-dsl is not installed: {INSTALL}",
        ),
        (
            replace(GDN, head_k_dim=64),
            "extend gated_delta_rule",
            NEEDED,
            "head_k_dim 64 is not one of [128]",
        ),
    ],
    ids=["missing", "older", "GQA's heads", "MLA's values", "without its compiler", "GDN's heads"],
)
def test_a_runner_that_names_it_is_told_why_not(
    monkeypatch: pytest.MonkeyPatch, layer: LayerSpec, op: str, installed: dict[str, str], line: str
):
    """Nothing is taken in its place; what was named comes first of the list."""
    why(monkeypatch, installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError) as caught:
        make_backends(LayerTable.from_specs([layer]), SIZES, Backends(ops={op: "flashinfer"}))
    first, second, *_ = str(caught.value).splitlines()
    assert first == f"no implementation of {op.split()[-1]} can serve:"
    assert second.removeprefix("  ").removeprefix("chunk_") == f"flashinfer: {line}"
