"""Matches a model's parameters with a source's tensors by name, shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from enginewright.passes.ir.weights import Cast, Source, WeightExpr
from enginewright.runtime.shared.errors import SourceError

_READABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Buffers that older versions of transformers saved; models compute them themselves.
_ONCE_SAVED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias|position_ids|token_type_ids)$"
)


def bind_weights(model: PreTrainedModel, tensors: Mapping[str, WeightExpr], *, source: str) -> dict[str, WeightExpr]:
    """Returns an expression in the model's dtype for each parameter and saved buffer of ``model``.

    Args:
        model: from ``build_model``.
        tensors: the source's tensors by the model's names, with or without the prefix of its base model.
        source: the file or folder, for messages.

    Raises:
        SourceError: a tensor is missing, has another shape or a dtype that can't be read, or isn't in the model; or two
            tensors differ that are one in the model.
    """
    state = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    keys = {name: key for name in state if (key := _key_of(name, tensors, model.base_model_prefix)) is not None}
    _refuse_strangers(model, set(tensors) - set(keys.values()), source)
    _refuse_untied(parameters, keys, tensors, source)
    by_identity = {id(parameters[name]): key for name, key in reversed(keys.items()) if name in parameters}

    bound: dict[str, WeightExpr] = {}
    for name, value in state.items():
        key = keys.get(name)
        if key is None and name in parameters:
            key = by_identity.get(id(parameters[name]))  # tied to one that is there
            if key is None:
                raise SourceError(
                    f"{source}: tensor {name} is missing (the model needs it with shape {tuple(value.shape)})",
                    hint="The checkpoint is incomplete, or its configuration is of another model.",
                )
        if key is None:
            continue  # a buffer that the model computes itself
        expr = tensors[key]
        if expr.shape != tuple(value.shape):
            raise SourceError(
                f"{_file_of(expr, source)}: tensor {key} has shape {expr.shape}, but the model's {name} "
                f"has {tuple(value.shape)}",
                hint="The checkpoint and its configuration don't belong together.",
            )
        if expr.dtype == value.dtype:
            bound[name] = expr
        elif value.dtype.is_floating_point and expr.dtype in _READABLE:
            bound[name] = Cast(expr, value.dtype)
        else:
            raise SourceError(
                f"{source}: tensor {key} is {expr.dtype}, which can't be read as {value.dtype}",
                hint="Export from a checkpoint in float32, float16 or bfloat16.",
            )
    return bound


def _file_of(expr: WeightExpr, source: str) -> str:
    """Returns the file that has a tensor, as ``source`` may have several."""
    return expr.origin if isinstance(expr, Source) and expr.origin else source


def _key_of(name: str, tensors: Mapping[str, WeightExpr], prefix: str) -> str | None:
    """Returns the key under which ``tensors`` has a parameter: its name, or the name without ``prefix``; None if
    neither is there.
    """
    short = name.removeprefix(f"{prefix}.") if prefix else name
    return next((key for key in (name, short) if key in tensors), None)


def _refuse_untied(
    parameters: Mapping[str, torch.nn.Parameter],
    found: Mapping[str, str],
    tensors: Mapping[str, WeightExpr],
    source: str,
) -> None:
    """Raises SourceError for different tensors that the model ties, so that it would silently use only one of them."""
    first: dict[int, str] = {}
    for name, key in found.items():
        if name not in parameters:
            continue
        other = first.setdefault(id(parameters[name]), key)
        if other != key and not torch.equal(tensors[other].evaluate().float(), tensors[key].evaluate().float()):
            raise SourceError(
                f"{source}: tensors {other} and {key} differ, but the configuration ties them (tie_word_embeddings)",
                hint="Set tie_word_embeddings to false in the model's configuration.",
            )


def _refuse_strangers(model: PreTrainedModel, names: set[str], source: str) -> None:
    """Raises SourceError for a tensor that the model would silently ignore."""
    # A saved output table of a model whose tables are tied is a copy.
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    allowed = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in sorted(names):
        if name in tied or _ONCE_SAVED.search(name) or any(re.search(p, name) for p in allowed):
            continue
        number, kind = _layer_kind(model, name)
        raise SourceError(
            f"{source}: tensor {name} has no place in the model that the configuration describes"
            + (f", whose layer {number} is {kind!r} (layer_types)" if kind else ""),
            hint=("layer_types in config.json may be of another model, or the" if kind else "The")
            + " checkpoint may be quantized or adapted in a way that Enginewright can't read.",
        )


def _layer_kind(model: PreTrainedModel, name: str) -> tuple[int, str]:
    """Returns (layer, kind) for a tensor that the model doesn't have, for the error message.

    The kind is that of the layer in the configuration. It is "" if the layer has the tensor's module, or the
    configuration has no kinds.
    """
    modules = dict(model.named_modules())
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    number = next((int(part) for part in name.split(".") if part.isdigit()), len(kinds))
    parent = name.rpartition(".")[0]
    known = parent in modules or f"{model.base_model_prefix}.{parent}" in modules
    return number, "" if known or number >= len(kinds) else str(kinds[number])
