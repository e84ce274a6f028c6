"""Jet-Nemotron: gated delta rules whose values are convolved by filters of each token, attention to
a window, and to all keys; transformers has no class for it."""

from torch_hybrid.models.families.jet_nemotron.family import JetNemotronFamily

__all__ = ["JetNemotronFamily"]
