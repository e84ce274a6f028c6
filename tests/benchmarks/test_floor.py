"""What floors count."""

from __future__ import annotations

from benchmarks.floor import Routing
from benchmarks.models import make_model
from torch_hybrid import adapt
from torch_hybrid.layers.fused_experts import FusedExperts


def test_experts_that_every_token_takes():
    model = adapt(make_model("inkling", quick=True))
    config = model.hf_model.config
    experts = next(module for module in model.modules() if isinstance(module, FusedExperts))
    routing, num_tokens = Routing.of(model, experts), 300
    assert routing.num_routed == config.n_routed_experts
    assert routing.per_token == config.num_experts_per_tok + config.n_shared_experts
    tokens = [routing.tokens_of(i, num_tokens) for i in range(routing.num_experts)]
    assert tokens[-config.n_shared_experts :] == [num_tokens] * config.n_shared_experts
    assert sum(tokens) == num_tokens * routing.per_token
