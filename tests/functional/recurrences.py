"""All recurrences to train with, by name, and the forms of them that have one of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tests.functional.channels import CONVOLUTION, RG_LRU, WKV
from tests.functional.recurrence import Recurrence
from tests.functional.rules import RULES
from tests.functional.scans import LIGHTNING, MLSTM, SCAN, SSD

RECURRENCES: dict[str, Recurrence] = {
    **{name: replace(rule, options={"qk_l2norm": True}) for name, rule in RULES.items()},
    "ssd": SSD,
    "lightning": LIGHTNING,
    "mlstm": MLSTM,
    "selective_scan": SCAN,
    "rg_lru": RG_LRU,
    "wkv": WKV,
    "causal_conv1d": CONVOLUTION,
}
FROM_NOTHING = {
    "rg_lru from nothing": replace(RG_LRU, has_states=False),
    "wkv from nothing": replace(WKV, has_states=False),
}
FORMS: dict[str, Recurrence] = {
    **RECURRENCES,
    **FROM_NOTHING,
    **{f"{name} of rows as they are": rule for name, rule in RULES.items()},
    "selective_scan of one group": replace(SCAN, groups=1, has_states=False),
    **{
        f"conv of {width} {activation}": replace(
            CONVOLUTION, width=width, options={"activation": activation}
        )
        for width, activation in product((2, 4, 7), (None, "silu"))
        if (width, activation) != (4, "silu")
    },
}
