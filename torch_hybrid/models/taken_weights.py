"""A check of modules of which only the weights are taken: their class and weights must say all."""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError

# Packages of the modules of a transformers model; fla has norms that transformers takes on GPUs.
_KNOWN = (
    *("torch.nn.modules.", "transformers.models.", "transformers.activations", "fla."),
    *(
        f"torch_hybrid.models.families.{family}.classes."
        for family in ("jet_nemotron", "kimi_k3", "ring_2_5")
    ),
)


def check_weights_say_all(name: str, module: nn.Module) -> None:
    """Refuse a module of which a part computes something else than its class and weights say.

    Such a part is a subclass, a quantized or otherwise wrapped layer, or a layer with hooks.

    Raises:
        UnsupportedError: there is such a part; the error names it.
    """
    for path, part in module.named_modules(prefix=name):
        if (what := _what_else(part) or _other_weight(part)) is not None:
            raise UnsupportedError(
                f"{path} {what}: its weights are taken into a layer of ours, and that would be "
                "lost. Merge or remove it before the model is adapted"
            )


def weights_say_all(module: nn.Module) -> bool:
    """Tell whether a module computes what its class and weights say; weights may be unread."""
    return all(_what_else(part) is None for part in module.modules())


def _what_else(part: nn.Module) -> str | None:
    cls = type(part)
    if not f"{cls.__module__}.".startswith(_KNOWN):
        return f"is a {cls.__module__}.{cls.__qualname__}"
    if isinstance(part, nn.Linear | nn.Conv1d):
        if cls not in (nn.Linear, nn.Conv1d):
            return (
                f"is a {cls.__module__}.{cls.__qualname__} and no plain {cls.__mro__[1].__name__}"
            )
        if "forward" in vars(part):
            return "has another forward than its class"
    if part._forward_hooks or part._forward_pre_hooks:
        return "has forward hooks"
    return None


def _other_weight(part: nn.Module) -> str | None:
    for key, weight in part.named_parameters(recurse=False):
        if type(weight) not in (nn.Parameter, Tensor):
            return f"has a {key} of type {type(weight).__name__}"
    return None
