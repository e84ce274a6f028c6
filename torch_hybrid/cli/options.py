"""Options that several commands share; a command gets each group of them as one value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
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
    from torch_hybrid.sampling import Sampling
    from torch_hybrid.serving.speculation import Speculation

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
SEED = click.IntRange(0, 2**64 - 1)
PASSED_ON = ("max_seqs", "max_tokens", "kv_tokens", "kv_dtype")  # a runner's options
DRAFTS = 4  # most tokens of one draft


OF_RUNNER = object()  # help of an option that Runner has under the same name


def option(help: str | object | None = None, *, default: Any = None, **shown: Any) -> Any:
    """Declare a field that commands offer as an option of its name.

    Args:
        help: text; or OF_RUNNER, for the help and the allowed values of the field of ``Options``.
        default: the command line's own, which its help shows; for a runner smaller than a server's.
        shown: further arguments of ``click.option``.
    """
    if default is not None:
        shown = {"default": default, "show_default": True, **shown}
    return field(metadata={"help": help, **shown})


def _kv_tokens(given: str) -> KvTokens:
    """Parse a number of tokens, or "auto"."""
    if given == "auto":
        return "auto"
    try:
        return int(given)
    except ValueError as error:
        raise click.BadParameter(f"{given!r} is neither a number nor auto") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options that choose a model and size its runner."""

    model: str
    dtype: str = option("Format of the weights: bf16, fp16 or fp32.", default="auto")
    weights: str = option(
        "Format in which weights are kept: as stored, or quantized as they are read.",
        default="auto",
        type=click.Choice(["auto", "int8", "int4", "mxfp4", "nvfp4"]),
    )
    device: str = option("Device of the model; auto takes CUDA where it is.", default="auto")
    ranks: bool = option("Share the model among the processes of torchrun.", is_flag=True)
    max_seqs: int = option(OF_RUNNER, default=16)
    max_tokens: int = option(OF_RUNNER, default=1024)
    kv_tokens: KvTokens = option(OF_RUNNER, default=16384, type=_kv_tokens, metavar="INTEGER|auto")
    kv_dtype: KvDtype = option(OF_RUNNER, default="auto")
    compile: Literal["on", "off", "background"] | None = option(
        "Compile steps: on does so first; background serves at once, uncompiled, and switches as "
        "steps are compiled.",
        type=click.Choice(["on", "off", "background"]),
        show_default="background, or on with --ranks",
    )
    eager: bool = option("Run without compiling, as --compile off.", is_flag=True)
    full: str = option("Implementation of full attention.", default="auto")
    linear: str = option("Implementation of linear attention.", default="auto")
    artefact: str | None = option(OF_RUNNER, type=click.Path(dir_okay=False))

    def __post_init__(self) -> None:
        if self.eager and self.compile in ("on", "background"):
            raise click.UsageError(f"--eager is --compile off, got --compile {self.compile} too")

    def load(self, *, vision: bool = False, mtp: bool = False) -> HybridModel:
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

    def runner(self, model: HybridModel, **options: Any) -> Runner:
        """Make a runner of these sizes; it is uncompiled on request, or without a compiler."""
        from torch_hybrid.backends.select import Backends
        from torch_hybrid.graphs.agreement import Agreement
        from torch_hybrid.graphs.runner import Runner

        is_off = self._is_off()
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
            artefact=self.artefact if compile or is_off else None,  # off: refused by name
            **options,
        )

    def compiled_first(self) -> ModelOptions:
        """Return options that compile before the first step, for a command that inspects graphs."""
        return self if self._is_off() else replace(self, compile="on")

    def _is_off(self) -> bool:
        """Tell whether steps run without compiling."""
        return self.eager or self.compile == "off"

    def _has_steps(self) -> bool:
        """Tell whether an artefact may hold compiled steps, which need no compiler."""
        return self.artefact is not None and os.path.exists(self.artefact)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of sampling; None leaves a value to the checkpoint's generation_config."""

    max_new_tokens: int = option("Most tokens of an output.", show_default=True)
    temperature: float | None = option(
        "Temperature of a draw; 0 is greedy. The checkpoint's generation_config has the default of "
        "this option and the next four.",
        type=float,
    )
    top_k: int | None = option("Draw from so many likeliest tokens; 0 is off.", type=int)
    top_p: float | None = option("Draw from so much of the probability.", type=float)
    min_p: float | None = option("Least share of the likeliest's probability.", type=float)
    repetition_penalty: float | None = option("Penalty of tokens that came before.", type=float)
    seed: int | None = option("Number that makes draws repeatable.", type=SEED)
    stop: tuple[str, ...] = option(
        "A text that ends the output; several can be given.", multiple=True
    )
    ignore_eos: bool = option("Go on past the end of a sequence.", is_flag=True)

    def of(self, model: HybridModel, *, has_texts: bool = True) -> Sampling:
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
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, ())}


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


def _loras(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=PATH of each adapter."""
    pairs = [text.partition("=") for text in given]
    for (name, _mark, path), text in zip(pairs, given, strict=True):
        if not name or not path:
            raise click.BadParameter(f"{text!r} is not NAME=PATH")
        if not (Path(path) / "adapter_config.json").is_file():
            raise click.BadParameter(
                f"{path} has no adapter_config.json, which peft's save_pretrained writes"
            )
    found = {name: path for name, _mark, path in pairs}
    if len(found) < len(given):
        raise click.BadParameter(f"names must differ, got {[name for name, _, _ in pairs]}")
    return found


lora_option = click.option(
    "--lora",
    "loras",
    metavar="NAME=PATH",
    multiple=True,
    callback=_loras,
    help="An adapter (LoRA) in peft's folder, by a name for requests; several can be given.",
)


def _grouped(kind: type, name: str, **defaults: Any) -> Decorator:
    """Make a decorator that gives a command options as one ``kind``, its argument ``name``."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**values: Any) -> Any:
            taken = {each.name: values.pop(each.name) for each in fields(kind)}
            return command(**{name: kind(**taken)}, **values)

        decorated: Command = with_options
        for decorator in reversed([*_options(kind, defaults)]):
            decorated = decorator(decorated)
        return decorated

    return decorate


def _options(kind: type, defaults: Mapping[str, Any]) -> Iterator[Decorator]:
    """Make click's options of fields; a field that is no option is an argument."""
    for each in fields(kind):
        shown = dict(each.metadata)
        if not shown:
            yield click.argument(each.name)
            continue
        if shown["help"] is OF_RUNNER:
            shown["help"] = help_of(each.name)
            if (values := values_of(each.name)) is not None:
                shown["type"] = click.Choice([str(value) for value in values])
        if each.name in defaults:
            shown["default"] = defaults[each.name]
        yield click.option(f"--{each.name.replace('_', '-')}", **shown)


model_options = _grouped(ModelOptions, "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server."""

    host: str = option("Address to serve.", default="127.0.0.1")
    port: int = option(default=8000, type=click.IntRange(0, 65535))
    served_model_name: str | None = option("Name of the model; by default its PATH.")
    api_key: str | None = option(
        "Key that clients must send; or the environment's TORCH_HYBRID_API_KEY.",
        envvar="TORCH_HYBRID_API_KEY",
    )
    vision: bool = option("Load the vision tower: messages may have images.", is_flag=True)
    max_queue: int = option(
        "Most requests that wait; further ones get status 429.",
        default=256,
        type=click.IntRange(min=1),
    )
    max_wait: float = option(
        "Seconds that a request waits to run; then it gets status 503.",
        default=300.0,
        type=click.FloatRange(min=0, min_open=True),
    )
    max_body: int = option(
        "Largest body of a request in MiB; a larger one gets status 413.",
        default=32,
        type=click.IntRange(min=1),
    )
    drain: int = option(
        "Seconds that running requests may take after SIGTERM.",
        default=60,
        type=click.IntRange(min=1),
    )
    allow_origin: tuple[str, ...] = option(
        "A site whose pages may call; several can be given.", multiple=True
    )
    log_requests: bool = option("Print a line about each request.", is_flag=True)


server_options = _grouped(ServerOptions, "server")


def sampling_options(*, max_new_tokens: int) -> Decorator:
    """Offer the fields of ``SamplingOptions``; the command gets them as ``chosen``."""
    return _grouped(SamplingOptions, "chosen", max_new_tokens=max_new_tokens)


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
) -> HybridModel:
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


def compile_ahead(runner: Runner, *, capture: bool = False) -> None:
    """Compile every kind of step before the first one, unless that happens in the background.

    ``capture`` also captures every size of steps, which pays for a server.
    """
    if runner.compile is True:
        runner.warm_up(capture=capture)


def finish_artefact(options: ModelOptions, runner: Runner) -> None:
    """Wait for background compilation if an artefact is wanted: a short command would end first."""
    if options.artefact is None or runner.compile != "background":
        return
    try:
        runner.warm_up(capture=False)
    except UnsupportedError as error:
        note(f"nothing is written to {options.artefact}: {error}")


def _quiet_transformers() -> None:
    """Silence transformers' progress bars and hints, which would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
