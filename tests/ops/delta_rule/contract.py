"""What the delta rules are held to beyond other recurrences."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.ops.recurrent_contract import Expected, Form, RecurrentContract


class DeltaRuleContract(RecurrentContract):
    """The contract of a recurrence with ``beta`` and ``qk_l2norm``."""

    def test_negative_eigenvalues_and_plain_keys(self, form: Form):
        inputs = self.family.mixed()
        unit_k = torch.nn.functional.normalize(inputs.k, dim=-1)
        inputs = replace(inputs, k=unit_k, beta=2 * inputs.beta, qk_l2norm=False, scale=0.3)
        Expected.of(self.family.reference, inputs).check_form(form)
