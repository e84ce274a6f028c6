"""First weight of a model: it tells whether compiled and captured steps still read the model's own.

Such steps hold the weights by their memory, and would go on with what the model has no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.stepping.model_choices import modules_of


@dataclass(frozen=True, slots=True)
class FirstWeight:
    """A model's first weight, which stands for all: what converts a model converts each."""

    holder: nn.Module
    name: str
    weight: Tensor
    address: int

    @classmethod
    def of(cls, model: Model) -> FirstWeight | None:
        """Find it; None if the model has none."""
        for module in modules_of(model):
            for name, weight in module._parameters.items():
                if weight is not None:
                    return cls(module, name, weight, weight.data_ptr())
        return None

    def check(self) -> None:
        """Raise ValueError unless the model has it where it was."""
        found = self.holder._parameters[self.name]
        if found is not self.weight or found.data_ptr() != self.address:
            raise ValueError(
                "the model was converted, or given other weights, since its runner was made: "
                "change weights by runner.update_weights, and convert a model before"
            )
