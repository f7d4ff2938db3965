"""Decodes bodies of requests, within limits. Every field of a body is in one of three tables of its class.

Honoured: the fields of the class, with their types. Refused: fields that would change the result in a way that the
server doesn't support, unless their value has no effect. Harmless: fields that don't change the result; the answer's
header ``x-enginewright-ignored`` lists them. Any other field is refused, or with ``--unknown-fields ignore`` treated as
harmless. A null field counts as missing, and an integer may be written as a float.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

import msgspec

from ...requests.vllm_names import Only
from ...shared.errors import RequestError, field_first, meant, shown
from ...tasks.context import GENERATE, Kind
from .limits import LARGEST, Bound, Sizes, bound_of, split, value_of

B = TypeVar("B", bound="Fields")

HINTS = frozenset(
    {
        # Caches, slots and speed, which the server sees to itself
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "data_parallel_rank"),
        *("session_params", "stream_interval", "draft_model", "t_max_predict_ms", "t_max_prompt_ms"),
        # The context and the machine, which are the bundle's and the server's
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "context_length", "keep_alive", "ttl"),
        # Parts of samplers that do nothing alone
        *("repeat_last_n", "penalty_last_n", "penalize_nl", "mirostat_tau", "mirostat_eta", "dynatemp_exponent"),
        *("min_keep", "samplers"),
        # Further parts of an answer
        *("timings_per_token", "return_progress", "post_sampling_probs", "reasoning_format", "separate_reasoning"),
        *("stream_reasoning", "parse_tool_calls", "tool_stream", "usage", "verbose"),
        # The caller, and the conversation
        *("session_id", "chat_id", "conversation_id", "thread_id", "message_id", "id", "rid", "trace", "trace_id"),
        *("tags", "title", "features", "variables", "background_tasks", "model_item", "tool_ids", "filter_ids"),
        # Gateways: other models and providers, of which there are none
        *("provider", "models", "route", "transforms", "fallbacks", "drop_params", "timeout", "num_retries"),
    }
)
"""Harmless fields that clients of other servers send. Every endpoint accepts them, and no answer depends on them."""


class Fields(msgspec.Struct, kw_only=True):
    """A body. Its fields are in one of three tables: honoured (the class's own), refused, and harmless.

    ``of_kinds`` has the kinds of bundles that the body is for. ``bounds`` has limits of fields that replace those of
    ``BOUNDS``.
    """

    of_kinds: ClassVar[tuple[Kind, ...]] = (GENERATE,)
    bounds: ClassVar[Mapping[str, Bound]] = {}

    refused: ClassVar[Mapping[str, Only]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[Mapping[str, str]] = {}
    needed: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def bound(cls, name: str) -> Bound:
        """Returns the limits of the body's field ``name``: those of this class, or else those of ``BOUNDS``."""
        return cls.bounds.get(name) or bound_of(name)


def decoded(
    data: bytes,
    kind: type[B],
    sizes: Callable[[Any], Sizes] = lambda name: LARGEST,
    ignore_unknown: bool = False,
) -> tuple[B, list[str]]:
    """Returns a body, and the names of its harmless fields, whose values aren't decoded.

    Args:
        data: the body as JSON.
        kind: the class with the fields and the three tables.
        sizes: returns the sizes of the model that a body names.
        ignore_unknown: True if fields that are in no table count as harmless.

    Raises RequestError naming the field.
    """
    fields = split(data)
    model = value_of("model", fields["model"], LARGEST) if "model" in fields else None
    known, values, ignored = sizes(model), dict[str, Any](), list[str]()
    names: dict[str, str] = {}  # field -> its name in the body
    for name, raw in fields.items():
        if bytes(raw) == b"null" and name not in kind.needed:
            continue
        if name in kind.__struct_fields__ or name in kind.renamed:
            field = kind.renamed.get(name, name)
            value = _honoured(kind, field, name, value_of(field, raw, known, kind.bound(field)))
            if field in names and value != values[field]:
                raise RequestError(f"{name}: {names[field]} says something else", hint="Pass one of them.")
            values[field], names[field] = value, name
        elif name in kind.refused:
            _check_refused(kind.refused[name], name, raw, known)
        elif name in kind.harmless or name in HINTS or ignore_unknown:
            ignored.append(name)
        else:
            raise _unknown(kind, name)
    try:
        return msgspec.convert(values, kind, strict=True), ignored
    except (msgspec.ValidationError, RecursionError) as e:
        field, colon, rest = field_first(str(e), "the body").partition(":")
        raise RequestError(names.get(field, field) + colon + rest) from e


def _honoured(kind: type[Fields], field: str, name: str, value: Any) -> Any:
    """Converts the value of a field: whole floats to integers, and an object to one without its null parts.

    Args:
        kind: the class of the body.
        field: the name of the field in the class.
        name: its name in the body.
        value: the decoded value.

    Raises RequestError for an object with an unknown part.
    """
    if field in _whole_fields(kind):
        return whole(value)
    if isinstance(value, dict) and (parts := _parts(kind, field)):
        check_parts(name, value, parts)
        return {part: one for part, one in value.items() if one is not None}
    return value


def _check_refused(rule: Only, name: str, raw: msgspec.Raw, sizes: Sizes) -> None:
    """Raises RequestError for a refused field, unless its value has no effect."""
    value = value_of(name, raw, sizes) if len(bytes(raw)) <= _LONGEST_TAKEN else ...
    if not rule.takes(value) and not (isinstance(value, (list, dict)) and value in rule.values):
        raise RequestError(f"{name}: {rule.why}", hint=rule.hint)


def _unknown(kind: type[Fields], name: str) -> RequestError:
    """Returns the error for a field that is in no table. Its hint names the field with the most similar name."""
    rest = "it out; with --unknown-fields ignore, the server leaves such fields out itself."
    near = meant(name, (*kind.__struct_fields__, *kind.renamed))
    hint = f"{near}Otherwise leave {rest}" if near else f"Leave {rest}"
    return RequestError(f"{shown(name)}: there is no such field", hint=hint)


def check_parts(place: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises RequestError if an object of a body has a field that isn't ``known``, unless the field is null.

    Args:
        place: the object's place in the body, such as ``messages[2]``.
    """
    known = tuple(known)
    for name, part in value.items():
        if name not in known and part is not None:
            hint = f"{meant(name, known)}It has {', '.join(known)}."
            raise RequestError(f"{place}: there is no {shown(name)}", hint=hint)


@cache
def _parts(kind: type[Fields], field: str) -> tuple[str, ...]:
    """Returns the names of an object's parts, if the type of ``field`` is a struct; otherwise ()."""
    types = {one.name: get_args(one.type) or (one.type,) for one in msgspec.structs.fields(kind)}[field]
    return next(
        (one.__struct_fields__ for one in types if isinstance(one, type) and issubclass(one, msgspec.Struct)), ()
    )


@cache
def _whole_fields(kind: type[Fields]) -> frozenset[str]:
    """Returns the fields of a body that are integers, or lists of them, and never other numbers."""
    types = {field.name: repr(field.type) for field in msgspec.structs.fields(kind)}
    return frozenset(
        name for name, text in types.items() if re.search(r"\b(int|Any)\b", text) and not re.search(r"\bfloat\b", text)
    )


def whole(value: Any) -> Any:
    """Returns a value in which floats such as 8.0 are integers, also in lists: many languages have only floats."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, list):
        return [whole(one) if isinstance(one, (float, list)) else one for one in value]
    return value


_EXACT = 2**53
"""The limit below which a float can represent every integer."""
_LONGEST_TAKEN = 1024
"""The most bytes of a refused field that is decoded, to check if its value has no effect."""
