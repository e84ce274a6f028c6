"""A runner's options, each written once: its default, text, values and place in an artefact.

``Runner``'s signature and docstring, the checks of single values, the facts of an artefact and the
command line's options follow from the fields here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
)

if TYPE_CHECKING:  # nothing here imports torch: the command line shows its help without
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from torch_hybrid.backends.select import Backends
    from torch_hybrid.batch import Batch
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.graphs.capturing.capture_policy import CudaGraphs
    from torch_hybrid.graphs.options.check_options import KvDtype, KvTokens
    from torch_hybrid.graphs.passes import Pass
    from torch_hybrid.graphs.step import Model
    from torch_hybrid.graphs.stepping.background import Compile
    from torch_hybrid.graphs.two_batch import OverlapPolicy

P = ParamSpec("P")
Owner = TypeVar("Owner")


def option(
    default: Any, text: str, *, in_artefact: bool, values: tuple[object, ...] | None = None
) -> Any:
    """Declare a field of ``Options``.

    Args:
        default: its default value.
        text: its entry in ``Runner``'s docstring; the first sentence is the help of the command
            line.
        in_artefact: whether compiled steps hold for one value of it alone.
        values: its allowed values; None if another function checks them.
    """
    facts = {"text": " ".join(text.split()), "in_artefact": in_artefact, "values": values}
    return field(default=default, metadata=facts, kw_only=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of ``Runner``."""

    model: Model
    max_seqs: int = option(64, "Sequences that can be held at once.", in_artefact=True)
    max_tokens: int = option(
        2048,
        "Most new tokens in one step; longer prompts come in chunks.",
        in_artefact=False,
    )
    kv_tokens: KvTokens = option(
        65536,
        """Tokens that all sequences together can hold, or "auto" for as many as there is room for.
        On a GPU that is what is free after the weights, less the memory of the largest steps (run
        once, uncompiled, to measure it; twice that where steps are captured), less 3 % of the GPU's
        memory (512 MiB at least). On a host it is half of what is free, shared by the ranks. It is
        never more than ``max_seqs`` sequences can use. ``explain`` shows the bytes, ``kv_room`` has
        them.""",
        in_artefact=True,
    )
    page_size: int = option(16, "Tokens in a page of the KV pool.", in_artefact=True)
    max_snapshots: int = option(
        0,
        """States that can be kept for other sequences to start from (``snapshot``,
        ``Engine(prefix_cache=...)``), each as large as those of a sequence. Snapshots of a model
        without states need none.""",
        in_artefact=True,
    )
    kv_dtype: KvDtype = option(
        "auto",
        """Format of kept keys, values and latents: "auto" is the model's, "fp8" (e4m3) takes half
        of the memory of 16-bit floats. Each number is rounded as it is written.""",
        in_artefact=True,
        values=("auto", "fp8"),
    )
    kv_scales: Mapping[int, Tensor] | None = option(
        None,
        """Dequantization scales of kv_dtype="fp8", by layer id: of keys and values [2, key heads of
        this rank], of latents [1]. ``th.kv_scales`` measures them. By default they are 1, which
        holds values up to 448.""",
        in_artefact=False,
    )
    compile: Compile = option(
        True,
        """Compile the steps; without, the same code runs eagerly. "background" runs steps eagerly
        until they are compiled beside them, and switches between two steps (``report().switches``
        says when). ``warm_up`` waits for all of them. On Linux a fork of this process compiles for
        a CPU; elsewhere a thread of it does, which slows eager steps. If compiling fails, a warning
        says why and steps stay eager. Before anything is built or compiled, the logger
        "torch_hybrid" says so on stderr.""",
        in_artefact=False,
        values=(True, False, "background"),
    )
    cuda_graphs: CudaGraphs = option(
        "auto",
        """Captures of compiled steps: "auto" captures each bucket in a CUDA graph, on a CUDA
        device, where all of its ops can be captured. ``report()`` has what was captured and what
        was not, with the reason. "on" refuses what cannot be captured; on a CPU it pads and
        refreshes as if steps were captured, to try an engine without a GPU. "off" captures
        nothing.""",
        in_artefact=False,
        values=("auto", "on", "off"),
    )
    two_batch_overlap: Literal["off", "on", "auto"] | OverlapPolicy = option(
        "off",
        """Steps that run as two interleaved halves: "on" is every step, "off" none. "auto", for a
        model that several ranks share, runs messages beside products for about a second, on all
        ranks together. It cuts prefills of the sizes at which halves paid (``report().overlap``,
        ``overlap_trials``). An ``OverlapPolicy`` says which steps.""",
        in_artefact=False,
    )
    backends: Backends | None = option(None, "Implementations to take, by name.", in_artefact=False)
    prefill: bool = option(
        True,
        """Serve prompts. With False, every step appends one token to each of its sequences, and
        nothing is chosen, allocated or compiled for others.""",
        in_artefact=False,
    )
    max_drafts: int = option(
        0,
        """Draft tokens of a sequence that ``verify`` may take at once. Each has memory beside every
        state, which ``explain`` counts. With 0 there is no such step.""",
        in_artefact=True,
    )
    takes_embeds: bool | None = option(
        None,
        """Take rows in the place of tokens' own embeddings (``extend``). None: where the model has
        a tower that makes such rows (``from_pretrained(vision=True)``).""",
        in_artefact=True,
    )
    max_adapters: int = option(
        0,
        """Adapters (LoRA) that can be resident at once, for sequences of their own
        (``load_adapter``). With 0 there are no such steps.""",
        in_artefact=True,
    )
    max_lora_rank: int = option(
        16, "Largest rank of an adapter's factors, up to 256.", in_artefact=True
    )
    saved_modules: bool = option(
        False,
        """Take adapters that bring an output head, or norms, in the place of the model's (peft's
        ``modules_to_save``). Each of ``max_adapters`` then has the memory of a head.""",
        in_artefact=True,
    )
    expert_adapters: bool = option(
        False,
        """Take adapters of experts and their routers. Each of ``max_adapters`` then has the memory
        of factors of ``max_lora_rank`` for every matrix of every expert.""",
        in_artefact=True,
    )
    batch_invariant: bool = option(
        False,
        """Give logits after a token the same bits whatever else is in the batch, however the tokens
        before it came: in one step or in many, from a snapshot, drafted or not, whole or in halves.
        Implementations that cannot say so of themselves are refused. On a GPU, steps of a runner
        with ``max_drafts`` are of one graph, and in no halves.""",
        in_artefact=True,
    )
    check_batch: Callable[[Batch], None] | None = option(
        None,
        """Check of the batch of each step, called on the host before the step runs; what it raises
        stops the step. ``Agreement(...).check``, where several ranks share the model.""",
        in_artefact=False,
    )
    passes: Sequence[Pass] | None = option(
        None,
        """Graph passes over each traced step, in order; None: ``graphs.passes.DEFAULT_PASSES``. See
        ``graphs.passes``, which has those to leave out and to look at too.""",
        in_artefact=False,
    )
    artefact: str | os.PathLike[str] | None = option(
        None,
        """A file of compiled steps to start from, written where it is not there yet. Steps are
        taken where they were made for the same model, sizes, versions and machine; otherwise a
        warning names what differs, and the file is written anew. It is written as soon as a step
        is compiled, and has more with each. It is run as code: take none that you do not trust.
        None: one that ``~/.cache/torch_hybrid`` keeps for these facts and finds again.""",
        in_artefact=False,
    )

    def __post_init__(self) -> None:
        for each in _OPTIONS:
            values, given = each.metadata["values"], getattr(self, each.name)
            if values is not None and given not in values:
                *others, last = map(repr, values)
                raise ValueError(
                    f"{each.name} must be {', '.join(others)} or {last}, got {given!r}"
                )
            is_int = isinstance(given, SupportsIndex) and not isinstance(given, bool)
            if (each.type == "int" and not is_int) or (
                each.type == "bool" and not isinstance(given, bool)
            ):
                raise TypeError(f"{each.name} must be of type {each.type}, got {given!r}")


_OPTIONS = tuple(each for each in fields(Options) if each.default is not MISSING)


def artefact_facts(options: Options) -> dict[str, object]:
    """Collect the options on which compiled steps depend, as they were given."""
    return {
        each.name: getattr(options, each.name) for each in _OPTIONS if each.metadata["in_artefact"]
    }


def help_of(name: str) -> str:
    """Cut an option's first sentence out of its text, for the command line."""
    text: str = next(each.metadata["text"] for each in _OPTIONS if each.name == name)
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def values_of(name: str) -> tuple[object, ...] | None:
    """Look up an option's allowed values; None if it has no list of them."""
    values: tuple[object, ...] | None = next(
        each.metadata["values"] for each in _OPTIONS if each.name == name
    )
    return values


def takes_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], None]], Callable[Concatenate[Owner, P], None]]:
    """Let an ``__init__`` that takes ``Options`` be called with their fields, and show them.

    The owner's class docstring has ``{options}`` in its Args, which ``with_option_texts`` fills.
    """

    def decorate(init: Callable[[Owner, Options], None]) -> Callable[Concatenate[Owner, P], None]:
        @wraps(init)
        def __init__(self: Owner, /, *args: P.args, **given: P.kwargs) -> None:
            init(self, options(*args, **given))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = inspect.signature(options).parameters.values()
        __init__.__signature__ = inspect.Signature([own, *taken])  # type: ignore[attr-defined]
        del __init__.__wrapped__  # type: ignore[attr-defined]
        options.__init__.__qualname__ = init.__qualname__  # type: ignore[misc]  # Python's errors
        return __init__

    return decorate


def with_option_texts(owner: type[Owner]) -> type[Owner]:
    """Write the text of each option in the place of ``{options}`` in a class's docstring."""
    assert owner.__doc__ is not None
    entries = [_entry(each.name, each.metadata["text"]) for each in _OPTIONS]
    owner.__doc__ = owner.__doc__.replace("        {options}", "\n".join(entries))
    return owner


def _entry(name: str, text: str) -> str:
    """Wrap an option's text as an entry of Args."""
    return textwrap.fill(f"{name}: {text}", 100, initial_indent=" " * 8, subsequent_indent=" " * 12)


class TrialRunner(Protocol):
    """The part of a runner's interface that a measurement of its steps uses."""

    max_seqs: int
    max_tokens: int
    prefill: bool

    def new_sequences(self, count: int) -> list[HeldSequence]: ...

    def free(self, seqs: list[HeldSequence]) -> None: ...

    def extend(self, seqs: list[HeldSequence], tokens: list[list[int]]) -> Tensor: ...


# Takes a model and some of ``Runner``'s options.
MakeTrial: TypeAlias = "Callable[..., TrialRunner]"
