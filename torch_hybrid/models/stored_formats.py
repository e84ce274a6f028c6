"""The stored formats of quantized checkpoints, by their configs, and refusals of all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.files import Checkpoint
from torch_hybrid.models.checkpoint.packed_tensors import Scheme, with_packed_integers
from torch_hybrid.models.quantized import refuse_method
from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.formats.integers import MXFP4, NVFP4

# Maps a checkpoint to the same one with one tensor for each weight.
AsWeights = Callable[[Checkpoint], Checkpoint]
_Fields = Mapping[str, Any]


def as_weights(model_type: str, quantization: _Fields) -> AsWeights:
    """Choose the function that makes weights of stored tensors, by the ``quantization_config``.

    Raises:
        UnsupportedError: the method, or a field of it, is not known here.
    """
    match quantization.get("quant_method"):
        case "fp8":
            _check_block_fp8(model_type, quantization)
            return Checkpoint.with_block_scales
        case "compressed-tensors":
            scheme = _compressed_tensors(model_type, quantization)
        case "gptq":
            scheme = _gptq(model_type, quantization)
        case "awq":
            scheme = _awq(model_type, quantization)
        case _:
            refuse_method(model_type, quantization)
    return partial(with_packed_integers, scheme=scheme)


def _check_block_fp8(model_type: str, fields: _Fields) -> None:
    """Check that weights have blocks of 128 x 128, and activations are quantized dynamically."""
    check = partial(_check, model_type, fields)
    check("weight_block_size", [BLOCK, BLOCK])
    check("activation_scheme", "dynamic")
    check("fmt", "e4m3", default="e4m3")


def _check(
    model_type: str,
    fields: _Fields,
    name: str,
    *allowed: Any,
    default: Any = None,
    inside: str = "",
    why: str = "",
) -> Any:
    """Return the value of a config field; raise UnsupportedError unless it is allowed."""
    given = fields.get(name, default)
    if given in allowed:
        return given
    expected = " or ".join(map(repr, allowed))
    raise UnsupportedError(
        f"{model_type}: config field quantization_config.{inside}{name} must be {expected}, got "
        f"{given!r}{why}"
    )


def _check_known(
    model_type: str, fields: _Fields, known: Collection[str], *, inside: str = ""
) -> None:
    """Raise UnsupportedError for config fields that are not known here."""
    if unknown := sorted(fields.keys() - set(known)):
        names = ", ".join(f"quantization_config.{inside}{name}" for name in unknown)
        raise UnsupportedError(f"{model_type}: config fields that are not known here: {names}")


# ---- compressed-tensors ----------------------------------------------------------------------

_CT_SAYS = {"config_groups", "format", "ignore", "quant_method", "quantization_status"}
_CT_SAYS |= {"kv_cache_scheme", "sparsity_config", "transform_config"}
_CT_SAYS |= {"global_compression_ratio", "version"}  # nothing about weights
_CT_GROUP_SAYS = {"format", "input_activations", "output_activations", "targets", "weights"}
_CT_WEIGHTS_SAY = {"actorder", "block_structure", "dynamic", "group_size", "num_bits", "strategy"}
_CT_WEIGHTS_SAY |= {"symmetric", "type", "scale_dtype", "zp_dtype"}
_CT_WEIGHTS_SAY |= {"observer", "observer_kwargs"}  # settings of the quantization itself
# Strategies and blocks of 4-bit floats by format.
_CT_FP4 = {
    "mxfp4-pack-quantized": ("group", MXFP4),
    "nvfp4-pack-quantized": ("tensor_group", NVFP4),
}


def _compressed_tensors(model_type: str, fields: _Fields) -> Scheme:
    check = partial(_check, model_type)
    _check_known(model_type, fields, _CT_SAYS)
    format_ = check(fields, "format", "pack-quantized", "int-quantized", *_CT_FP4)
    check(fields, "quantization_status", "compressed", None)
    check(fields, "kv_cache_scheme", None)
    check(fields, "transform_config", None, {})
    sparsity = fields.get("sparsity_config") or {}
    check(sparsity, "format", "dense", None, inside="sparsity_config.")
    schemes = {
        _compressed_group(model_type, f"config_groups.{name}.", group, format_)
        for name, group in fields.get("config_groups", {}).items()
    }
    if len(schemes) != 1:
        raise UnsupportedError(
            f"{model_type}: config field quantization_config.config_groups must have groups that "
            f"are stored alike, got {len(schemes)} ways"
        )
    return schemes.pop()


def _compressed_group(model_type: str, inside: str, group: _Fields, format_: str) -> Scheme:
    check = partial(_check, model_type)
    _check_known(model_type, group, _CT_GROUP_SAYS, inside=inside)
    check(group, "format", format_, None, inside=inside)
    for name in ("input_activations", "output_activations"):
        check(group, name, None, inside=inside, why=": what weights meet is not rounded here")
    weights, inside = group.get("weights") or {}, f"{inside}weights."
    _check_known(model_type, weights, _CT_WEIGHTS_SAY, inside=inside)
    check = partial(check, weights, inside=inside)
    check("type", "float" if format_ in _CT_FP4 else "int")
    check("dynamic", False, None)
    check("block_structure", None)
    why = ": columns in another order than their groups (act-order) are not served"
    check("actorder", None, False, "static", "weight", why=why)
    if format_ in _CT_FP4:
        strategy, block = _CT_FP4[format_]
        check("num_bits", 4)
        check("strategy", strategy)
        check("group_size", block)
        check("symmetric", True, default=True)
        return Scheme(layout="fp4", group=block)
    bits = check("num_bits", *((4, 8) if format_ == "pack-quantized" else (8,)))
    if bits == 8:
        check("strategy", "channel")
        check("symmetric", True)
        return Scheme(layout="rows", bits=8, words=format_ == "pack-quantized")
    by_groups = check("strategy", "group", "channel") == "group"
    size: Any = weights.get("group_size") if by_groups else -1
    is_symmetric = check("symmetric", True, False, default=True)
    if size != -1:
        check("group_size", 32, 64, 128)
    return Scheme(layout="rows", group=size, has_zeros=not is_symmetric)


# ---- GPTQ ------------------------------------------------------------------------------------

_GPTQ_SAYS = {"bits", "checkpoint_format", "desc_act", "dynamic", "group_size", "pack_dtype"}
_GPTQ_SAYS |= {"quant_method", "sym", "format", "is_marlin_format"}
# Settings of the quantization itself, and of other runtimes.
_GPTQ_SAYS |= {"act_group_aware", "backend", "batch_size", "block_name_to_quantize"}
_GPTQ_SAYS |= {"cache_block_outputs", "cache_examples_on_gpu", "damp_auto_increment"}
_GPTQ_SAYS |= {"damp_percent", "dataset", "disable_exllama", "exllama_config", "lm_head"}
_GPTQ_SAYS |= {"max_input_length", "meta", "model_file_base_name", "model_name_or_path"}
_GPTQ_SAYS |= {"model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize"}
_GPTQ_SAYS |= {"mse", "offload_to_disk", "pad_token_id", "parallel_packing", "quantizer"}
_GPTQ_SAYS |= {"static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"}


def _gptq(model_type: str, fields: _Fields) -> Scheme:
    check = partial(_check, model_type, fields)
    _check_known(model_type, fields, _GPTQ_SAYS)
    check("bits", 4)
    why = ": columns in another order than their groups (act-order) are not served"
    check("desc_act", False, why=why)
    check("is_marlin_format", False, None)
    check("pack_dtype", "int32", None)
    size = check("group_size", 32, 64, 128, -1)
    if changed := [name for name in fields.get("dynamic") or {} if not name.startswith("-:")]:
        raise UnsupportedError(
            f"{model_type}: config field quantization_config.dynamic must only leave modules out "
            f"('-:'), got {changed}"
        )
    written = fields.get("checkpoint_format", fields.get("format"))
    check("checkpoint_format", "gptq", "gptq_v2", default=written or "gptq")
    layout = "columns" if written == "gptq_v2" else "columns_v1"
    is_symmetric = check("sym", True, False, default=True)
    return Scheme(layout=layout, group=size, has_zeros=not is_symmetric)


# ---- AWQ -------------------------------------------------------------------------------------

_AWQ_SAYS = {"bits", "group_size", "modules_to_not_convert", "quant_method", "version"}
_AWQ_SAYS |= {"zero_point", "format", "sym", "desc_act", "lm_head", "pack_dtype"}
# Settings of other runtimes.
_AWQ_SAYS |= {"backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"}
_AWQ_SAYS |= {"checkpoint_format", "meta"}


def _awq(model_type: str, fields: _Fields) -> Scheme:
    check = partial(_check, model_type, fields)
    _check_known(model_type, fields, _AWQ_SAYS)
    check("bits", 4)
    check("version", "gemm", "GEMM", default="gemm")
    check("zero_point", True, default=True)
    check("desc_act", False, None)
    size = check("group_size", 32, 64, 128, -1)
    return Scheme(layout="awq", group=size, has_zeros=True)
