"""Checks callers' arguments: prompts, conversations, parameters, options. Errors name the argument."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..requests.sampling import SamplingParams
from ..requests.vllm_names import one_of
from ..shared.errors import ContextError, RequestError, shown
from ..text.text_batch import first_characters
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..text.chat_template import Message

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A prompt: a text, token ids, or as in vLLM ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

Params = SamplingParams | Iterable[SamplingParams | None] | None
"""Sampling parameters for all prompts, or one for each; None for the default."""

_PROMPTS = "Pass text, a list of token ids, or a list of either."
MOST_PATH, MOST_PATH_PART = 4095, 255
"""The most bytes of a path, and of each part between slashes, on Linux."""
_UNORDERED = (bytes, bytearray, memoryview, set, frozenset)


class Encoded(msgspec.Struct, frozen=True):
    """A prompt's token ids, and its text if the caller passed text. ``name`` identifies the prompt in errors."""

    ids: Sequence[Any]
    text: str | None = None
    name: str = "prompt"


def listed(prompts: Any, name: str = "prompts") -> tuple[list[Any], bool]:
    """Returns a list of prompts, and True if the caller passed a single one. Raises RequestError naming the argument
    ``name``.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    items = _items(name, prompts, _PROMPTS)
    if items and hasattr(items[0], "__index__") and getattr(items[0], "ndim", 0) == 0:
        return [items], True
    return items, False


def conversations(messages: Any) -> tuple[list[Sequence[Message]], bool]:
    """Returns a list of conversations, and True if the caller passed a single one. Raises RequestError naming
    ``messages``.
    """
    hint = 'Pass a list of messages, [{"role": "user", "content": "..."}], or a list of such lists.'
    if isinstance(messages, (str, Mapping)):
        raise RequestError(f"messages: {shown(messages)} isn't a list of messages", hint=hint)
    items = _items("messages", messages, hint)
    if not items or isinstance(items[0], Mapping):
        return [items], True
    for i, chat in enumerate(items):
        if isinstance(chat, (str, Mapping)) or not isinstance(chat, Iterable):
            raise RequestError(f"messages[{i}]: {shown(chat)} isn't a list of messages", hint=hint)
    return [list(chat) for chat in items], False


def raises(raise_errors: bool | None, single: bool) -> bool:
    """Returns True if the error of a single request is raised. Raises RequestError for a wrong type.

    Args:
        raise_errors: the caller's argument; None raises errors only for a single prompt.
        single: True if the caller passed a single prompt.
    """
    check_type("raise_errors", raise_errors, (bool, type(None)), "True, False or None")
    return single if raise_errors is None else raise_errors


def template_variables(kwargs: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Merges vLLM's ``chat_template_kwargs`` with variables that were passed by name. Raises RequestError."""
    check_type("chat_template_kwargs", kwargs, (Mapping, type(None)), "a dictionary")
    for name in kwargs or {}:
        check_type("chat_template_kwargs", name, (str,), "a dictionary whose keys are names")
    both = {**(kwargs or {}), **variables}
    check_type("chat_template", both.get("chat_template"), (str, type(None)), "a template's name or its text")
    for name in ("add_generation_prompt", "continue_final_message"):
        check_type(name, both.get(name), (bool, type(None)), "True or False")
    return both


def params_for(
    count: int,
    params: Params,
    sampling_params: Params,
) -> list[SamplingParams]:
    """Returns one SamplingParams for each of ``count`` prompts.

    The caller's ``params`` and ``sampling_params`` are two names of one argument: None, one for all prompts, or a list.
    Raises RequestError if both are passed, or for wrong types or lengths.
    """
    name = "params" if sampling_params is None else "sampling_params"
    either = one_of(params=params, sampling_params=sampling_params)
    if either is None or isinstance(either, SamplingParams):
        return [either or SamplingParams()] * count
    hint = "Pass SamplingParams(max_tokens=...), or a list with one for each prompt."
    if isinstance(either, (str, Mapping)) or not isinstance(either, Iterable):
        raise RequestError(f"{name}: {shown(either)} isn't a SamplingParams", hint=hint)
    several = [SamplingParams() if one is None else one for one in _items(name, either, hint)]
    for i, one in enumerate(several):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"{name}[{i}]: {shown(one)} isn't a SamplingParams", hint=hint)
    if len(several) != count:
        raise RequestError(
            f"{name}: {len(several)} of them for {count} prompts", hint="Pass one, or one for each prompt."
        )
    return several


def encoded(prompt: Any, name: str, tokenizer: Callable[[], Tokenizer], most: int) -> Encoded:
    """Converts a prompt to token ids. ``tokenizer`` returns the tokenizer, and is called only for text.

    Args:
        prompt: see ``Prompt``.
        name: the prompt's name in errors.
        tokenizer: returns the tokenizer; may raise.
        most: the most tokens of the prompt.
    """
    if isinstance(prompt, Mapping):
        ids, text = _of_mapping(prompt, name)
        if ids is not None:
            return Encoded(token_ids(ids, name), text, name)
        prompt = text
    if isinstance(prompt, str):
        prompt = str.__str__(prompt)  # no class of the caller's own
        return Encoded(encode_within(tokenizer().encode, prompt, most, name) if prompt else [], prompt, name)
    return Encoded(token_ids(prompt, name), None, name)


def encode_within(encode: Callable[[str], list[int]], text: str, most: int, name: str = "prompt") -> list[int]:
    """Tokenizes a text that should have at most ``most`` tokens.

    Raises RequestError for a text whose beginning has twice as many (``first_characters``), and the errors of
    ``Tokenizer.encode``.
    """
    beginning, tokens = first_characters(text, most, lambda part: len(encode(part)))
    if tokens:
        raise ContextError(
            f"{name}: the first {len(beginning):,} of its {len(text):,} characters have {tokens:,} tokens; there is "
            f"room for {most:,}",
            hint="Shorten the prompt.",
            context=most + 1,
            tokens=tokens,
            exact=False,
        )
    return encode(text)


def checked_ids(prompt: Encoded, most: int, context: int, vocab_size: int) -> list[int]:
    """Returns the prompt's ids as ints. Raises RequestError naming the prompt and the invalid id, or for too
    many ids.
    """
    ids, name = list(prompt.ids), prompt.name
    for place, i in enumerate(ids) if {*map(type, ids)} != {int} else ():
        if type(i) is int:
            continue
        try:
            if isinstance(i, (bool, np.bool_)) or getattr(i, "ndim", 0) > 0:
                raise TypeError
            ids[place] = int.__int__(operator.index(i))
        except TypeError:
            hint = "Pass text or a list of integers."
            raise RequestError(f"{name}: {shown(i)} at place {place} isn't a token id", hint=hint) from None
    if not ids:
        raise RequestError(f"{name}: it is empty", hint="Pass a text, or at least one token.")
    if len(ids) > most:
        raise ContextError(
            f"{name}: it has {len(ids)} tokens; the context of {context} tokens has room for {most}",
            hint="Shorten the prompt.",
            context=context,
            tokens=len(ids),
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"{name}: token {shown(wrong)} is outside the vocabulary of {vocab_size}",
            hint="Use the tokenizer of this bundle.",
        )
    return ids


def check_type(name: str, value: object, types: tuple[type, ...], expected: str) -> None:
    """Raises RequestError naming the argument ``name`` if its value has none of ``types``.

    A bool isn't accepted as an int.

    ``expected``: a description of the right types, for the hint.
    """
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise RequestError(f"{name}: {shown(value)} is of type {type(value).__name__}", hint=f"It must be {expected}.")


def check_int(name: str, value: object, least: int, most: int) -> int:
    """Returns an integer as an int. Raises RequestError naming the argument if it isn't one or is out of range."""
    plain = int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if plain is None or not least <= plain <= most:
        hint = f"It must be an integer from {least} to {most}."
        raise RequestError(f"{name}: {shown(value)} is out of range", hint=hint)
    return plain


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Raises RequestError naming the argument if no file system could have this path."""
    check_type(name, value, (str, os.PathLike), "a path")
    hint = "Pass the path of a file or a folder."
    try:
        encoded_path = os.fsencode(value)
    except (TypeError, ValueError) as e:  # surrogates, or what an object calls its path
        raise RequestError(f"{name}: {shown(value)} isn't a path", hint=hint) from e
    if not encoded_path or b"\0" in encoded_path:
        raise RequestError(f"{name}: {shown(value)} isn't a path", hint=hint)
    longest = max(map(len, encoded_path.split(b"/")))
    if longest > MOST_PATH_PART or len(encoded_path) > MOST_PATH:
        raise RequestError(
            f"{name}: {shown(value)} is too long, with {len(encoded_path)} bytes and {longest} in one part",
            hint=f"A path has {MOST_PATH} bytes at most, and each part {MOST_PATH_PART}.",
        )


def _of_mapping(prompt: Mapping[str, Any], name: str) -> tuple[Any, str | None]:
    """Returns the ids and the text of a prompt that is a mapping; one of them may be None."""
    unknown = [key for key, value in prompt.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    hint = 'Pass {"prompt": text} or {"prompt_token_ids": ids}.'
    if unknown:
        raise RequestError(f"{name}: there is no key {shown(unknown[0])}", hint=hint)
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{name}: its text is {shown(text)}", hint=hint)
    if ids is None and text is None:
        raise RequestError(f"{name}: it has neither text nor token ids", hint=hint)
    return ids, text


def token_ids(prompt: Any, name: str) -> list[Any]:
    """Returns the items of a prompt of token ids, unchecked: the caller then passes them to ``checked_ids``.

    Args:
        prompt: the ids: a list, an array, a generator or another ordered iterable.
        name: the prompt's name in errors.

    Raises RequestError naming the prompt if it is a text, a mapping, bytes, a set, or no iterable at all.
    """
    if isinstance(prompt, (str, Mapping)):
        raise RequestError(f"{name}: its token ids are {shown(prompt)}", hint=_PROMPTS)
    return _items(name, prompt, _PROMPTS)


def numbers(name: str, value: Any, hint: str) -> list[Any]:
    """Returns the items of a list that isn't empty. Raises RequestError naming the argument ``name``, with ``hint``."""
    items = [] if isinstance(value, (str, Mapping)) else _items(name, value, hint)
    if not items:
        raise RequestError(f"{name}: {shown(value)} isn't a list of numbers", hint=hint)
    return items


def _items(name: str, value: Any, hint: str) -> list[Any]:
    """Returns the items of a list, an array, a generator or another ordered iterable. Raises RequestError."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # numpy's, torch's and Python's arrays
        value = value.tolist()
    if isinstance(value, _UNORDERED) or not isinstance(value, Iterable):
        raise RequestError(f"{name}: {shown(value)} is of type {type(value).__name__}", hint=hint)
    return list(value)
