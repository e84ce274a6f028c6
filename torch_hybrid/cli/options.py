"""Options that several commands share; a command gets each group of them as one value."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click

from torch_hybrid.cli.output import note
from torch_hybrid.cli.ranks import join_ranks, refuse_ranks_apart
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.options.options import help_of, values_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from torch_hybrid.graphs.options.check_options import KvDtype, KvTokens
    from torch_hybrid.graphs.runner import Runner
    from torch_hybrid.graphs.stepping.background import Compile
    from torch_hybrid.models.hybrid_model import HybridModel
    from torch_hybrid.models.ring_2_5 import Ring25
    from torch_hybrid.sampling import Sampling
    from torch_hybrid.serving.speculation import Speculation

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
SEED = click.IntRange(0, 2**64 - 1)
PASSED_ON = ("max_seqs", "max_tokens", "kv_tokens", "kv_dtype")  # a runner's options
DRAFTS = 4  # most tokens of one draft


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options that choose a model and size its runner."""

    model: str
    dtype: str
    weights: str
    device: str
    ranks: bool
    max_seqs: int
    max_tokens: int
    kv_tokens: KvTokens
    kv_dtype: KvDtype
    compile: Literal["on", "off", "background"] | None
    eager: bool
    full: str
    linear: str
    artefact: str | None

    def load(self, *, vision: bool = False, mtp: bool = False) -> HybridModel | Ring25:
        """Load the checkpoint with a progress bar; add its vision tower or MTP head on request."""
        group, device = join_ranks(self.device) if self.ranks else (None, self.device)
        return load_model(
            self.model, self.dtype, device, self.weights, group, vision=vision, mtp=mtp
        )

    def speculation(self, drafter: str | None) -> Speculation | None:
        """Choose how an engine drafts.

        Args:
            drafter: "ngram", "mtp" (the model's own head), the path of a smaller model, or None.
        """
        if drafter is None:
            return None
        from torch_hybrid.serving.speculation import Speculation

        if drafter in ("ngram", "mtp"):
            return Speculation(drafter, num_drafts=DRAFTS)  # type: ignore[arg-type]
        smaller = replace(self, model=drafter, max_seqs=2 * self.max_seqs, artefact=None)
        model = smaller.load()
        return Speculation(smaller.runner(model, max_snapshots=self.max_seqs), num_drafts=DRAFTS)

    def runner(self, model: HybridModel | Ring25, **options: Any) -> Runner:
        """Make a runner of these sizes; it is uncompiled on request, or without a compiler."""
        from torch_hybrid.backends.select import Backends
        from torch_hybrid.graphs.agreement import Agreement
        from torch_hybrid.graphs.runner import Runner

        is_off = self.eager or self.compile == "off"
        compile: Compile = not is_off and (self._has_steps() or can_compile(model.device))
        chosen = self.compile or ("on" if self.ranks else "background")
        if compile and chosen == "background":
            compile = "background"
        return Runner(
            model,
            **{name: getattr(self, name) for name in PASSED_ON},
            check_batch=Agreement().check if self.ranks else None,
            compile=compile,
            backends=Backends(full=self.full, linear=self.linear),
            artefact=self.artefact if compile else None,
            **options,
        )

    def compiled_first(self) -> ModelOptions:
        """Return options that compile before the first step, for a command that inspects graphs."""
        return self if self.compile == "off" else replace(self, compile="on")

    def _has_steps(self) -> bool:
        """Tell whether an artefact may hold compiled steps, which need no compiler."""
        return self.artefact is not None and os.path.exists(self.artefact)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of sampling; None leaves a value to the checkpoint's generation_config."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool

    def of(self, model: HybridModel | Ring25, *, has_texts: bool = True) -> Sampling:
        """Combine the checkpoint's sampling with the options that were given, for one output.

        Args:
            model: the checkpoint's model.
            has_texts: False where outputs are token ids: the checkpoint's stop texts do not apply.

        Raises:
            ValueError: a value is out of its range.
        """
        from torch_hybrid.sampling import Sampling

        sampling = Sampling.of(model, **self._given())
        if sampling.n > 1:
            note(f"generation_config asks for {sampling.n} outputs of a prompt: one is made")
        if has_texts or sampling.stop == self.stop:
            return replace(sampling, n=1)
        note(f"generation_config's stop_strings are not looked for: {list(sampling.stop)}")
        return replace(sampling, n=1, stop=self.stop)

    def check(self) -> None:
        """Raise ValueError if a value is out of its range, before a model is loaded."""
        from torch_hybrid.sampling import Sampling

        Sampling(**self._given())

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}


def _kv_tokens(given: str) -> KvTokens:
    """Parse a number of tokens, or "auto"."""
    if given == "auto":
        return "auto"
    try:
        return int(given)
    except ValueError as error:
        raise click.BadParameter(f"{given!r} is neither a number nor auto") from error


def runner_option(name: str, *, default: Any, **shown: Any) -> Decorator:
    """Offer an option of ``Runner`` under its name, with its help and its allowed values.

    Args:
        name: the name of a field of ``Options`` and of ``ModelOptions``.
        default: the command line's own default, smaller than a server's.
        shown: further arguments of ``click.option``.
    """
    if (values := values_of(name)) is not None:
        shown["type"] = click.Choice([str(value) for value in values])
    return click.option(
        f"--{name.replace('_', '-')}",
        default=default,
        show_default=default is not None,
        help=help_of(name),
        **shown,
    )


def prefix_cache_option(*, default: int) -> Decorator:
    """Offer the number of snapshots that a prefix cache may keep."""
    return click.option(
        "--prefix-cache",
        metavar="STATES",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help="Keep so many states of prompts and answers, with their keys, for prompts that begin "
        "alike; 0 keeps nothing.",
    )


speculate_option = click.option(
    "--speculate",
    metavar="ngram|mtp|PATH",
    help="Draft tokens, and verify several in one step: those that followed the same tokens "
    "before, those of the checkpoint's own MTP head, or those of a smaller model at PATH.",
)


def _grouped(kind: type, name: str, options: tuple[Callable[[Command], Command], ...]) -> Decorator:
    """Make a decorator that gives a command these options as one ``kind``, argument ``name``."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**values: Any) -> Any:
            taken = {field.name: values.pop(field.name) for field in fields(kind)}
            return command(**{name: kind(**taken)}, **values)

        decorated: Command = with_options
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


model_options = _grouped(
    ModelOptions,
    "options",
    (
        click.argument("model"),
        click.option(
            "--dtype",
            default="auto",
            show_default=True,
            help="Format of the weights: bf16, fp16 or fp32.",
        ),
        click.option(
            "--weights",
            type=click.Choice(["auto", "int8", "int4"]),
            default="auto",
            show_default=True,
            help="Format in which weights are kept: as stored, or quantized as they are read.",
        ),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="Device of the model; auto takes CUDA where it is.",
        ),
        click.option(
            "--ranks", is_flag=True, help="Share the model among the processes of torchrun."
        ),
        runner_option("max_seqs", default=16),
        runner_option("max_tokens", default=1024),
        runner_option("kv_tokens", default=16384, type=_kv_tokens, metavar="INTEGER|auto"),
        runner_option("kv_dtype", default="auto"),
        click.option(
            "--compile",
            type=click.Choice(["on", "off", "background"]),
            show_default="background, or on with --ranks",
            help="Compile steps: on does so first; background serves at once, uncompiled, and "
            "switches as steps are compiled.",
        ),
        click.option("--eager", is_flag=True, help="Run without compiling, as --compile off."),
        click.option(
            "--full", default="auto", show_default=True, help="Implementation of full attention."
        ),
        click.option(
            "--linear",
            default="auto",
            show_default=True,
            help="Implementation of linear attention.",
        ),
        runner_option("artefact", default=None, type=click.Path(dir_okay=False)),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server."""

    host: str
    port: int
    served_model_name: str | None
    api_key: str | None
    vision: bool
    max_queue: int
    max_wait: float
    max_body: int  # MiB
    drain: int
    allow_origin: tuple[str, ...]
    log_requests: bool


server_options = _grouped(
    ServerOptions,
    "server",
    (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve."),
        click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True),
        click.option("--served-model-name", help="Name of the model; by default its PATH."),
        click.option(
            "--api-key",
            envvar="TORCH_HYBRID_API_KEY",
            help="Key that clients must send; or the environment's TORCH_HYBRID_API_KEY.",
        ),
        click.option(
            "--vision", is_flag=True, help="Load the vision tower: messages may have images."
        ),
        click.option(
            "--max-queue",
            type=click.IntRange(min=1),
            default=256,
            show_default=True,
            help="Most requests that wait; further ones get status 429.",
        ),
        click.option(
            "--max-wait",
            type=click.FloatRange(min=0, min_open=True),
            default=300.0,
            show_default=True,
            help="Seconds that a request waits to run; then it gets status 503.",
        ),
        click.option(
            "--max-body",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Largest body of a request in MiB; a larger one gets status 413.",
        ),
        click.option(
            "--drain",
            type=click.IntRange(min=1),
            default=60,
            show_default=True,
            help="Seconds that running requests may take after SIGTERM.",
        ),
        click.option(
            "--allow-origin",
            multiple=True,
            help="A site whose pages may call; several can be given.",
        ),
        click.option("--log-requests", is_flag=True, help="Print a line about each request."),
    ),
)


def sampling_options(*, max_new_tokens: int) -> Decorator:
    """Offer the fields of ``SamplingOptions``; the command gets them as ``chosen``."""
    return _grouped(
        SamplingOptions,
        "chosen",
        (
            click.option(
                "--max-new-tokens",
                default=max_new_tokens,
                show_default=True,
                help="Most tokens of an output.",
            ),
            click.option(
                "--temperature",
                type=float,
                help="Temperature of a draw; 0 is greedy. The checkpoint's generation_config has "
                "the default of this option and the next four.",
            ),
            click.option("--top-k", type=int, help="Draw from so many likeliest tokens; 0 is off."),
            click.option("--top-p", type=float, help="Draw from so much of the probability."),
            click.option("--min-p", type=float, help="Least share of the likeliest's probability."),
            click.option(
                "--repetition-penalty", type=float, help="Penalty of tokens that came before."
            ),
            click.option("--seed", type=SEED, help="Number that makes draws repeatable."),
            click.option(
                "--stop", multiple=True, help="A text that ends the output; several can be given."
            ),
            click.option("--ignore-eos", is_flag=True, help="Go on past the end of a sequence."),
        ),
    )


def can_compile(device: torch.device) -> bool:
    """Tell whether steps can be compiled; where they cannot, print what to install."""
    from torch_hybrid.graphs.compiling.toolchain import missing_tools
    from torch_hybrid.ops.native import compiler_missing

    if missing := missing_tools(device):
        note(f"steps run uncompiled: {missing}")
        return False
    if device.type == "cpu" and (reason := compiler_missing()):
        note(f"the C++ kernels are not used: {reason}")
    return True


def load_model(
    path_or_id: str,
    dtype: str = "auto",
    device: str = "cpu",
    weights: str = "auto",
    ranks: dist.ProcessGroup | None = None,
    *,
    vision: bool = False,
    mtp: bool = False,
) -> HybridModel | Ring25:
    """Load a checkpoint, or this rank's shard of it, with a bar while its weights are read."""
    if ranks is None:
        refuse_ranks_apart()
    import torch

    from torch_hybrid.host.malloc import tune_allocator
    from torch_hybrid.models.load import from_pretrained

    tune_allocator()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _quiet_transformers()
    path = os.path.expanduser(path_or_id)
    return from_pretrained(
        path, dtype=dtype, device=device, ranks=ranks, weights=weights, vision=vision, mtp=mtp
    )


def load_tokenizer(path_or_id: str, hint: str = "give prompts as token ids with --ids") -> Any:
    """Load the checkpoint's tokenizer.

    Args:
        path_or_id: a folder, or a hub id.
        hint: the end of the error message: what the user can do without a tokenizer.

    Raises:
        ValueError: the checkpoint has none.
    """
    from transformers import AutoTokenizer

    missing = f"{path_or_id} has no tokenizer that transformers can read; {hint}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.path.expanduser(path_or_id))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(missing) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(missing)  # transformers makes one without files too: it knows no text
    return tokenizer


def load_processor(path_or_id: str) -> Any:
    """Load the checkpoint's image processor.

    Raises:
        ValueError: the checkpoint has none, or a package that it needs is not installed.
    """
    from transformers import AutoProcessor, ProcessorMixin

    missing = f"{path_or_id} has no processor of images that transformers can make"
    try:
        processor = AutoProcessor.from_pretrained(os.path.expanduser(path_or_id))
    except ImportError as error:
        raise ValueError(
            f"images need Pillow and torchvision: pip install 'torch-hybrid[vision]' ({error})"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{missing}: {' '.join(str(error).split())}") from error
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(missing)
    return processor


def compile_ahead(runner: Runner) -> None:
    """Compile every kind of step before the first one, unless that happens in the background."""
    if runner.compile is True:
        runner.warm_up()


def finish_artefact(options: ModelOptions, runner: Runner) -> None:
    """Wait for background compilation if an artefact is wanted: a short command would end first."""
    if options.artefact is None or runner.compile != "background":
        return
    try:
        runner.warm_up()
    except UnsupportedError as error:
        note(f"nothing is written to {options.artefact}: {error}")


def _quiet_transformers() -> None:
    """Silence transformers' progress bars and hints, which would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
