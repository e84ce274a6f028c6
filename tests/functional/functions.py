"""Recurrences to train with other than the delta rules: functions, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.functional.channels import CHANNELS
from tests.functional.test_linear_attention import FORMS
from tests.functional.test_selective_scan import inputs as scan_inputs
from tests.functional.test_ssd import inputs as ssd_inputs
from torch_hybrid.functional import selective_scan, ssd

# The arguments of sequences of given lengths: tensors, the last of which are states.
FUNCTIONS: dict[str, tuple[Callable[..., tuple[Tensor, Any]], Callable[..., list[Tensor]]]] = {
    "ssd": (ssd, ssd_inputs),
    "selective_scan": (selective_scan, scan_inputs),
    **{name: (each.function, each.inputs) for name, each in (FORMS | CHANNELS).items()},
}
