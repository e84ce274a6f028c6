"""The way in: a model of transformers becomes one that trains packed sequences in one graph."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from torch_hybrid.errors import UnsupportedError

M = TypeVar("M", bound=nn.Module)
# Formats that adapters train over, as a model's quantization_config names them. Layers of
# bitsandbytes dequantize in their own backward.
QUANT_METHODS = ("fp8", "torchao", "bitsandbytes")


def make_trainable(
    model: M,
    *,
    mtp: str | Path | None = None,
    mtp_loss_weight: float = 0.1,
    batch_invariant: bool | Mapping[str, Any] = False,
) -> M:
    """Exchange the classes of a transformers model's mixers for ones that train packed sequences.

    Parameters keep their names, shapes and flags, so ``state_dict``, ``save_pretrained``, PEFT and
    optimizers made before go on working. Calls take ``packing=`` besides all that collators of
    transformers send. With ``labels=`` a training step makes no whole logits. ``generate`` and
    other calls with a cache run as transformers has them. A second call changes nothing. On a CPU,
    steps are shorter after ``torch_hybrid.host.malloc.tune_allocator()``.

    TRL's trainers compute losses by a head of their own; where that leaves something out, as of
    RecurrentGemma, xLSTM, Inkling and MTP heads, they are refused. A reference that they load
    beside the model runs as transformers has it.

    A choice has no gradient, so indexers that pick blocks (Qwen4-Exp, GLM-5.3) never train, as in
    transformers: ``DistributedDataParallel`` is told ``static_graph=True``, or with images in some
    batches alone ``find_unused_parameters=True``.

    With ``mtp``, the checkpoint's head that predicts further tokens becomes the model's ``mtp`` and
    trains too. Of calls with ``labels=`` in training, ``outputs.mtp_loss`` is its cross entropy, of
    which ``outputs.loss`` has ``mtp_loss_weight``. ``save_pretrained`` writes it where
    ``from_pretrained(path, mtp=True)`` finds it. Adapters made after this call train and save what
    they target in it; ``modules_to_save=["mtp"]`` has PEFT train all of it.

    With ``batch_invariant``, logits have the bits of ``Runner(batch_invariant=True)`` on these
    weights, as do :func:`token_logprobs` of them: a runner of the model's own computes them in each
    call, beside the model, whose gradients are computed for them. Its weights are the model's, and
    those that a server joins a second time. For a quantized base it reads the checkpoint again, and
    serves the adapter beside that. Calls with a cache are as without.

    Ring-2.5, which transformers has no class for, is a
    ``torch_hybrid.models.families.ring_2_5.classes.BailingMoeV2_5ForCausalLM``.

    Args:
        model: a model of transformers, or of PEFT around one; changed in place.
        mtp: folder or hub id of the checkpoint whose head trains, as a rule that of ``model``. Of
            several heads it is the first, and the others are not saved.
        mtp_loss_weight: factor on the head's loss, kept as ``model.mtp_loss_weight``.
        batch_invariant: True, or options of that runner. Those that decide bits must be the
            server's: ``compile=False``, say, if it does not compile. Of a base that torchao
            quantized, ``weights`` is as in ``from_pretrained``.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` is neither; or the checkpoint has no head, or one of another model.
        UnsupportedError: the model has no mixer that is trained here, or the forward of one of its
            modules was replaced; or its weights are quantized and no frozen base under PEFT. Such a
            base is in block-FP8, or in a format of torchao or bitsandbytes. Or ``mtp`` is given for
            a model of PEFT, one with images, or one whose heads are not known here; or
            ``batch_invariant`` is for one that has no output head of its own.
    """
    from transformers import PreTrainedConfig

    from torch_hybrid.ops.native.matrix_product import is_faster
    from torch_hybrid.training.causal_lm import CausalLM, causal_lm_of, refuse_losses_of_trl
    from torch_hybrid.training.decoder import (
        ATTENTION,
        COLLECTED,
        hand_down_packing,
        has_attention,
        install_capturing_hooks,
        register_attention,
    )
    from torch_hybrid.training.experts import experts_class
    from torch_hybrid.training.frozen_layers import (
        FrozenFP8Linear,
        frozen_class,
        refuse_to_merge,
    )
    from torch_hybrid.training.linear import OWN_DTYPES, OwnLinear
    from torch_hybrid.training.linear_cross_entropy import LossHead, is_plain
    from torch_hybrid.training.mixers import TWINS, Twin

    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        came = type(model).__name__
        raise ValueError(f"model must be one of transformers or PEFT in memory, got {came}")
    if mtp is not None:
        from torch_hybrid.training.mtp import make_trainable_with_head

        return _served(make_trainable_with_head(model, mtp, mtp_loss_weight), batch_invariant)
    modules: list[Any] = list(model.modules())
    twins: dict[str, Any] = dict(TWINS)
    if any(isinstance(module, Twin) for module in modules):
        return _served(model, batch_invariant)
    decoders = [each for each in modules if TWINS.keys() & set(_layer_parts(each))]
    if not decoders:
        raise UnsupportedError(
            f"{type(model).__name__} has no mixer that is trained; these are {sorted(TWINS)}"
        )
    _check_weights(model)
    found = ((module, frozen_class(module)) for module in modules)
    frozen: dict[Any, Any] = {module: ours for module, ours in found if ours is not None}
    first = next(model.parameters())
    # Autocast rounds float32 to the other.
    is_ours = first.device.type == "cpu" and first.dtype in OWN_DTYPES
    has_own_products = is_ours and any(map(is_faster, OWN_DTYPES))
    kinds: dict[Any, Any] = {}
    for module in modules:
        children = dict(module.named_children())
        theirs: Any = type(module)
        ours: Any
        if (twin := twins.get(theirs.__name__)) is not None:
            kinds[module] = in_front(twin, theirs)
        elif (experts := experts_class(module)) is not None:
            ours = experts
            kinds[module] = in_front(ours, theirs)
        elif module in frozen:
            kinds[module] = in_front(frozen[module], theirs)
        elif frozen.get(children.get("base_layer")) is FrozenFP8Linear:
            module.merge = refuse_to_merge
        elif (head := children.get(causal_lm_of(children).head_name)) is not None:
            ours = causal_lm_of(children)
            kinds[module] = in_front(ours, theirs)
            # Others are of PEFT, whose adapters add to logits.
            if is_plain(head) and head not in frozen:
                kinds[head] = LossHead
        elif type(module) is nn.Linear and has_own_products:
            kinds.setdefault(module, OwnLinear)
    _check_forwards(kinds)
    for module, kind in kinds.items():
        exchange(module, kind)
        if isinstance(module, CausalLM):
            module.register_forward_pre_hook(refuse_losses_of_trl, with_kwargs=True)
    register_attention()
    for decoder in decoders:
        if has_attention(decoder):
            decoder.set_attn_implementation(ATTENTION)
        decoder.register_forward_pre_hook(hand_down_packing, with_kwargs=True)
        config = decoder.config.to_dict()
        if any(map(config.get, COLLECTED)):
            install_capturing_hooks(decoder)
    return _served(model, batch_invariant)


def _served(model: M, batch_invariant: bool | Mapping[str, Any]) -> M:
    """Have a model compute logits by a server, if it is to."""
    if batch_invariant is False:
        return model
    from torch_hybrid.training.causal_lm import CausalLM
    from torch_hybrid.training.served_logits import ServedLogits

    found = [each for each in model.modules() if isinstance(each, CausalLM)]
    if len(found) != 1:
        raise UnsupportedError(
            "batch_invariant is for a causal language model whose own head makes logits, got "
            f"{type(model).__name__}"
        )
    found[0].server = ServedLogits({} if batch_invariant is True else batch_invariant)
    found[0].server.serve(found[0])
    return model


def undo_make_trainable(model: nn.Module) -> None:
    """Give modules their own classes and attention back, in place; of other models, do nothing."""
    if "torch_hybrid.training.mixers" not in sys.modules:  # then no model was made trainable
        return
    from torch_hybrid.training.causal_lm import CausalLM, refuse_losses_of_trl
    from torch_hybrid.training.decoder import hand_down_packing, has_attention
    from torch_hybrid.training.experts import Experts
    from torch_hybrid.training.frozen_layers import FROZEN
    from torch_hybrid.training.linear import OwnLinear
    from torch_hybrid.training.linear_cross_entropy import LossHead
    from torch_hybrid.training.mixers import Twin

    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, (Twin, CausalLM, LossHead, OwnLinear, Experts, *FROZEN)):
            exchange(module, type(module).__bases__[-1])
            vars(module).pop("server", None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook in (hand_down_packing, refuse_losses_of_trl):
                del module._forward_pre_hooks[number]
                del module._forward_pre_hooks_with_kwargs[number]
            if hook is hand_down_packing and has_attention(module):
                module.set_attn_implementation("sdpa")


def exchange(module: Any, kind: Any) -> None:
    """Give a module another class, whose forward a hook of accelerate runs, if it has one."""
    module.__class__ = kind
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(kind.forward, module)


def _check_forwards(modules: Iterable[nn.Module]) -> None:
    """Raise UnsupportedError for a module whose forward was replaced: no class changes that."""
    for module in modules:
        if "forward" in vars(module) and "_old_forward" not in vars(module):
            raise UnsupportedError(
                f"the forward of {type(module).__name__} was replaced, as a Trainer's accelerator "
                "does: call make_trainable first"
            )


def _layer_parts(module: nn.Module) -> Iterator[str]:
    """Name the classes of the parts of a decoder's layers; of other modules, none."""
    children = dict(module.named_children())
    layers = children.get("layers", children.get("blocks"))
    for layer in layers.children() if layers is not None else ():
        yield from (type(part).__name__ for part in layer.modules())


@cache
def in_front(ours: Any, theirs: Any) -> Any:
    """Make a class under the name of ``theirs`` whose forward is that of ``ours``.

    Trainers read the arguments of a model from the signature of its forward. Modules are pickled
    as ``ours`` and ``theirs``, since the class has no name of its own. What the class makes anew,
    as in ``type(model).from_pretrained``, is of ``theirs``: its parts are.
    """

    @wraps(theirs.__init__)
    def init(self: Any, *args: Any, **options: Any) -> None:
        self.__class__ = theirs
        theirs.__init__(self, *args, **options)

    @wraps(theirs.forward)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return ours.forward(self, *args, **options)

    def reduce(self: Any) -> tuple[Any, ...]:
        # Without a compiled call, which is of this module and none of a copy.
        return _new_in_front, (ours, theirs), self.__getstate__()

    return type(
        theirs.__name__,
        (ours, theirs),
        {
            "__module__": theirs.__module__,
            "__init__": init,
            "forward": forward,
            "__reduce__": reduce,
        },
    )


def _new_in_front(ours: Any, theirs: Any) -> Any:
    """Make an empty module to unpickle into."""
    both = in_front(ours, theirs)
    return both.__new__(both)


def _check_weights(model: Any) -> None:
    """Raise UnsupportedError for quantized weights that are no base under PEFT."""
    quantized = model.config.to_dict().get("quantization_config")
    if quantized is None:
        return
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise UnsupportedError(
            "quantized weights train as the frozen base of an adapter alone: "
            "call get_peft_model first, and make_trainable on what it returns"
        )
    method = str.__str__(quantized["quant_method"])
    if method not in QUANT_METHODS:
        raise UnsupportedError(
            f"adapters train over weights of quant_method {' or '.join(QUANT_METHODS)}, "
            f"got {method!r}: load the weights in bfloat16, with a TorchAoConfig for INT8 or INT4"
        )
