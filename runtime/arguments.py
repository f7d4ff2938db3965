"""What a caller may pass: prompts, conversations, parameters, options. Anything else is an error that names it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginewright.plugins.shared.errors import RequestError

from .requests.sampling import SamplingParams
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .text.chat_template import Message

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or as in vLLM ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

Params = SamplingParams | Iterable[SamplingParams | None] | None
"""For all prompts, or one for each; None is the default."""

_PROMPTS = "Pass text, a list of token ids, or a list of either."
_UNORDERED = (bytes, bytearray, memoryview, set, frozenset)
_CHARACTERS_A_TOKEN = 10
"""Of which a text's beginning is tokenized first: most texts have 2 to 5."""


@dataclass(frozen=True)
class Encoded:
    """A prompt's token ids, and its text where it was one. ``name`` says which it is among several, for errors."""

    ids: Sequence[Any]
    text: str | None = None
    name: str = "prompt"


def listed(prompts: Any) -> tuple[list[Any], bool]:
    """A list of prompts from one prompt or several, and whether it was one. Raises RequestError naming ``prompts``."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    items = _items("prompts", prompts, _PROMPTS)
    if items and hasattr(items[0], "__index__") and getattr(items[0], "ndim", 0) == 0:
        return [items], True
    return items, False


def conversations(messages: Any) -> tuple[list[Sequence[Message]], bool]:
    """A list of conversations from one or several, and whether it was one. Raises RequestError naming ``messages``."""
    hint = 'Pass a list of messages, [{"role": "user", "content": "..."}], or a list of such lists.'
    if isinstance(messages, (str, Mapping)):
        raise RequestError(f"messages: {_short(messages)} isn't a list of messages", hint=hint)
    items = _items("messages", messages, hint)
    if not items or isinstance(items[0], Mapping):
        return [items], True
    for i, chat in enumerate(items):
        if isinstance(chat, (str, Mapping)) or not isinstance(chat, Iterable):
            raise RequestError(f"messages[{i}]: {_short(chat)} isn't a list of messages", hint=hint)
    return [list(chat) for chat in items], False


def raises(raise_errors: bool | None, single: bool) -> bool:
    """Whether the error of a request is raised; None: of one prompt that isn't in a list. Raises RequestError."""
    check_type("raise_errors", raise_errors, (bool, type(None)), "True, False or None")
    return single if raise_errors is None else raise_errors


def template_variables(kwargs: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``chat_template_kwargs``, and those that were passed by name. Raises RequestError."""
    check_type("chat_template_kwargs", kwargs, (Mapping, type(None)), "a dictionary")
    for name in kwargs or {}:
        check_type("chat_template_kwargs", name, (str,), "a dictionary whose keys are names")
    found = {**(kwargs or {}), **variables}
    check_type("chat_template", found.get("chat_template"), (str, type(None)), "a template's name or its text")
    for name in ("add_generation_prompt", "continue_final_message"):
        check_type(name, found.get(name), (bool, type(None)), "True or False")
    return found


def params_for(
    count: int,
    params: Params,
    sampling_params: Params,
) -> list[SamplingParams]:
    """Parameters of each of ``count`` prompts, from what was passed under either name."""
    name = "params" if sampling_params is None else "sampling_params"
    if params is not None and sampling_params is not None:
        raise RequestError("params, sampling_params: these are two names of one argument", hint="Pass one of them.")
    given = params if sampling_params is None else sampling_params
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    hint = "Pass SamplingParams(max_tokens=...), or a list with one for each prompt."
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name}: {_short(given)} isn't a SamplingParams", hint=hint)
    several = [SamplingParams() if one is None else one for one in _items(name, given, hint)]
    for i, one in enumerate(several):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"{name}[{i}]: {_short(one)} isn't a SamplingParams", hint=hint)
    if len(several) != count:
        raise RequestError(
            f"{name}: {len(several)} of them for {count} prompts", hint="Pass one, or one for each prompt."
        )
    return several


def encoded(prompt: Any, name: str, tokenizer: Callable[[], Tokenizer], most: int) -> Encoded:
    """The token ids of a prompt; see ``Prompt``. ``tokenizer`` is asked for where there is text, and may raise."""
    if isinstance(prompt, Mapping):
        ids, text = _of_mapping(prompt, name)
        if ids is not None:
            return Encoded(token_ids(ids, name), text, name)
        prompt = text
    if isinstance(prompt, str):
        return Encoded(encode_within(tokenizer(), prompt, most, name) if prompt else [], prompt, name)
    return Encoded(token_ids(prompt, name), None, name)


def encoded_all(prompts: Sequence[Any], single: bool, tokenizer: Callable[[], Tokenizer], most: int) -> list[Encoded]:
    """``encoded`` of each, named "prompt" where it is the only one and "prompts[i]" where it stands in a list."""
    names = ["prompt"] if single else [f"prompts[{i}]" for i in range(len(prompts))]
    return [encoded(prompt, name, tokenizer, most) for prompt, name in zip(prompts, names, strict=True)]


def encode_within(
    tokenizer: Tokenizer, text: str, most: int, name: str = "prompt", *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text that should have ``most`` tokens.

    To tokenize megabytes takes seconds, so that of a long text a beginning is tokenized first, and more as long as it
    may fit. Where a beginning alone has twice as many tokens as there is room for, the text is refused: what follows
    changes how its last word is split, and no more.

    Raises RequestError for that, and what ``Tokenizer.encode`` raises.
    """
    count = _CHARACTERS_A_TOKEN * (most + 128)
    while count < len(text):
        tokens = len(tokenizer.encode(text[:count], add_special_tokens=False))
        if tokens > 2 * most:
            raise RequestError(
                f"{name}: the first {count:,} of its {len(text):,} characters have {tokens:,} tokens; there is room "
                f"for {most:,}",
                hint="Shorten the prompt.",
            )
        count *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def checked_ids(prompt: Encoded, most: int, context: int, vocab_size: int) -> list[int]:
    """The prompt's ids as plain integers. Raises RequestError naming the prompt, and the id that is wrong."""
    ids, name = list(prompt.ids), prompt.name
    for place, i in enumerate(ids):
        if type(i) is int:
            continue
        if isinstance(i, (bool, np.bool_)) or not hasattr(i, "__index__") or getattr(i, "ndim", 0) > 0:
            raise RequestError(
                f"{name}: {_short(i)} at place {place} isn't a token id", hint="Pass text or a list of integers."
            )
        ids[place] = operator.index(i)
    if not ids:
        raise RequestError(f"{name}: it is empty", hint="Pass at least one token.")
    if len(ids) > most:
        raise RequestError(
            f"{name}: it has {len(ids)} tokens; the context of {context} tokens has room for {most}",
            hint="Shorten the prompt.",
        )
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{name}: token {wrong} is outside the vocabulary of {vocab_size}",
            hint="Use the tokenizer of this bundle.",
        )
    return ids


def check_type(name: str, value: object, types: tuple[type, ...], expected: str) -> None:
    """Raises RequestError naming the argument; True and False aren't integers."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise RequestError(f"{name}: {value!r} is of type {type(value).__name__}", hint=f"It must be {expected}.")


def check_int(name: str, value: object, least: int, most: int) -> None:
    """Raises RequestError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name}: {value!r} is out of range", hint=f"It must be an integer from {least} to {most}.")


def _of_mapping(prompt: Mapping[str, Any], name: str) -> tuple[Any, str | None]:
    """Its ids, and its text; one of them may be None."""
    unknown = [key for key, value in prompt.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    hint = 'Pass {"prompt": text} or {"prompt_token_ids": ids}.'
    if unknown:
        raise RequestError(f"{name}: there is no key {unknown[0]!r}", hint=hint)
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{name}: its text is {_short(text)}", hint=hint)
    if ids is None and text is None:
        raise RequestError(f"{name}: it has neither text nor token ids", hint=hint)
    return ids, text


def token_ids(prompt: Any, name: str) -> list[Any]:
    """What is in a list of ids, or whatever else has an order; see ``checked_ids``."""
    if isinstance(prompt, (str, Mapping)):
        raise RequestError(f"{name}: its token ids are {_short(prompt)}", hint=_PROMPTS)
    return _items(name, prompt, _PROMPTS)


def _items(name: str, value: Any, hint: str) -> list[Any]:
    """What is in a list, an array, a generator or whatever has an order."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # numpy's, torch's and Python's arrays
        value = value.tolist()
    if isinstance(value, _UNORDERED) or not isinstance(value, Iterable):
        raise RequestError(f"{name}: {_short(value)} is of type {type(value).__name__}", hint=hint)
    return list(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
