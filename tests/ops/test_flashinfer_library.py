"""When FlashInfer is taken for callable, and where it stands in the order of choice."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from torch_hybrid.ops.capability import Capability, Implementation
from torch_hybrid.ops.flashinfer import library

NEEDED = {"flashinfer-python": "0.7.2.post1", "nvidia-cutlass-dsl": "4.8.1"}


def why(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> str | None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(library, "triton_missing", lambda: None)
    return library.flashinfer_missing(capabilities=library.HOPPER, cutlass_dsl=True)()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (NEEDED, None),
        ({}, "flashinfer-python is not installed"),
        (
            NEEDED | {"flashinfer-python": "0.6.18"},
            "flashinfer-python 0.6.18 is not in the tested range >=0.7.2,<0.8",
        ),
        (
            NEEDED | {"flashinfer-python": "0.8.0rc1"},
            "flashinfer-python 0.8.0rc1 is not in the tested range >=0.7.2,<0.8",
        ),
        ({"flashinfer-python": "0.7.2"}, "nvidia-cutlass-dsl is not installed"),
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


def test_one_set_decides_the_order(monkeypatch: pytest.MonkeyPatch):
    own = Implementation(capability=Capability(devices=frozenset({"cuda"})), launcher="m:f")
    known = {"cpp": own, "triton": own, "torch": own}
    behind = list(library.with_flashinfer("op", known, own))
    assert behind == ["cpp", "triton", "flashinfer", "torch"]
    monkeypatch.setattr(library, "FIRST", frozenset({"op"}))
    first = list(library.with_flashinfer("op", known, own))
    assert first == ["cpp", "flashinfer", "triton", "torch"]
