"""Checkpoints with a head that predicts further tokens, by the names of the hub; and the head
itself in plain PyTorch, around a decoder layer of transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny_models import make_model


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a family's head is: its layers' types, and their names and those of what is around them
    in a checkpoint of two layers."""

    options: dict[str, Any]  # of a model that has the head's layers after its own
    layers: tuple[str, ...]
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    copies: tuple[str, ...] = ()  # of what the model has, which nobody needs
    config: dict[str, Any] = field(default_factory=dict)


TYPES = ["linear_attention", "full_attention", "full_attention"]
QWEN = Layout(
    options={"num_hidden_layers": 3, "layer_types": TYPES},
    layers=("mtp.layers.0",),
    fc="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)


def _next_layer(norm: str, **options: Any) -> Layout:
    return Layout(
        options={"num_hidden_layers": 3, **options},
        layers=("model.layers.2",),
        fc="model.layers.2.eh_proj",
        embedding_norm="model.layers.2.enorm",
        hidden_norm="model.layers.2.hnorm",
        norm=f"model.layers.2.{norm}",
        copies=("model.layers.2.embed_tokens", "model.layers.2.shared_head.head"),
    )


LAYOUTS = {
    "qwen3_next": QWEN,
    "qwen3_next_dense": QWEN,
    "qwen3_5": QWEN,
    "deepseek_v3": _next_layer("shared_head.norm"),
    "bailing_hybrid": _next_layer("final_layernorm", layer_types=TYPES),
    "nemotron_h": Layout(
        options={"layer_types": [*TYPES[:2], "full_attention", "moe"]},
        layers=("mtp.layers.0", "mtp.layers.1"),
        fc="mtp.layers.0.eh_proj",
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        norm="mtp.layers.1.final_layernorm",
        config={
            "num_nextn_predict_layers": 1,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
    ),
}


class Oracle:
    """The model as transformers runs it, and its head."""

    def __init__(self, model: Any, num_head: int) -> None:
        base = model.base_model
        self.model, self.base = model, base
        self.layers = base.layers[len(base.layers) - num_head :]
        base.layers = base.layers[: len(base.layers) - num_head]
        dim = model.config.hidden_size
        rng = torch.Generator().manual_seed(1)
        self.fc = torch.randn(dim, 2 * dim, generator=rng) * (2 * dim) ** -0.5
        norm = base.norm if hasattr(base, "norm") else base.norm_f
        self.norms: dict[str, nn.Module] = {}
        for name in ("embedding_norm", "hidden_norm", "norm"):
            own = copy.deepcopy(norm)
            own.weight.data.copy_(norm.weight + 0.2 * torch.randn(dim, generator=rng))
            self.norms[name] = own.requires_grad_(False)

    @torch.no_grad()
    def drafts(self, history: Sequence[int], count: int) -> list[int]:
        """What the head makes of a history whose last token the model has not run."""
        tokens = torch.tensor([history])
        hidden = torch.zeros(1, 1, self.fc.shape[0])
        if len(history) > 1:
            run = self.base(tokens[:, :-1], use_cache=False).last_hidden_state
            hidden = torch.cat([hidden, run], 1)
        inputs = self._joined(tokens, hidden)
        drafts: list[int] = []
        while True:
            last = self.norms["norm"](self._run(inputs)[:, -1:])
            drafts.append(int(self.model.lm_head(last).argmax(-1)))
            if len(drafts) == count:
                return drafts
            inputs = torch.cat([inputs, self._joined(torch.tensor([drafts[-1:]]), last)], 1)

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.norms["embedding_norm"](self.model.get_input_embeddings()(tokens))
        return torch.cat([embedded, self.norms["hidden_norm"](hidden)], -1) @ self.fc.T

    def _run(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        rotary = getattr(self.base, "rotary_emb", None)
        rotations = None if rotary is None else rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotations, position_ids=positions, attention_mask=None)
        return x


def make_checkpoint(family: str, folder: Path, **options: Any) -> Oracle:
    """Write a random checkpoint of two layers and a head."""
    layout = LAYOUTS[family]
    model = make_model(family, **{**layout.options, **options})
    model.save_pretrained(folder)
    num_head = len(layout.layers)
    oracle = Oracle(model, num_head)
    file = folder / "model.safetensors"
    weights = load_file(file)
    prefix = "backbone" if any(name.startswith("backbone.") for name in weights) else "model"
    for number, name in enumerate(layout.layers, start=2):
        old = f"{prefix}.layers.{number}."
        for own in [own for own in weights if own.startswith(old)]:
            weights[f"{name}.{own.removeprefix(old)}"] = weights.pop(own)
    weights[f"{layout.fc}.weight"] = oracle.fc
    for part, norm in oracle.norms.items():
        weights[f"{getattr(layout, part)}.weight"] = norm.weight.data
    for name in layout.copies:
        weights[f"{name}.weight"] = model.lm_head.weight.data.clone()
    save_file(weights, file, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:2]
    config["num_hidden_layers"] = 2
    path.write_text(json.dumps(config | layout.config))
    return oracle
