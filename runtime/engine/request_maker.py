"""Makes requests from the arguments of ``LLM``'s methods: prompts or conversations, sampling parameters, and
options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from ..requests.request_options import RequestArguments, RequestOptions
from ..requests.sampling import SamplingParams
from ..shared.errors import RequestError
from ..tasks import arguments
from ..tasks.arguments import Encoded, Params, Prompt
from ..tasks.context import TaskContext
from ..tasks.generate import Generate, PreparedPrompt
from .chat_answers import ChatAnswers

_OF_PARAMS = frozenset(field.name for field in fields(SamplingParams))


class Options(msgspec.Struct, frozen=True):
    """The arguments that all methods of ``LLM`` with prompts have in common; ``LLM.generate`` describes them."""

    request: RequestArguments
    params: Params = None
    sampling_params: Params = None
    raise_errors: bool | None = None


def of_prompts(context: TaskContext, prompts: Any, options: Options) -> tuple[list[PreparedPrompt], bool]:
    """Returns the prepared prompts, and True if a request's own error is to be raised. Raises RequestError."""
    items, single = arguments.listed(prompts)
    names = ["prompt"] if single else [f"prompts[{i}]" for i in range(len(items))]
    encoded = [context.encoded(prompt, name) for prompt, name in zip(items, names, strict=True)]
    return _prepared(context, encoded, options), arguments.raises(options.raise_errors, single)


def of_prompt(context: TaskContext, prompt: Prompt, options: Options) -> PreparedPrompt:
    """Returns the prepared request of one prompt. Raises RequestError."""
    return _prepared(context, [context.encoded(prompt)], options)[0]


def of_chats(
    context: TaskContext, messages: Any, options: Options, variables: Mapping[str, Any]
) -> tuple[list[PreparedPrompt], bool]:
    """Returns the prepared requests of conversations. ``variables`` go to the chat template; the rest is as in
    ``of_prompts``.
    """
    Generate.check_model(context)
    chats, single = arguments.conversations(messages)
    variables = dict(variables)
    answers = ChatAnswers.taken_from(variables)
    most, encoded = context.model.context_length - 1, []
    for i, chat in enumerate(chats):
        name = "messages" if single else f"messages[{i}]"
        text = context.tokenizer.guarded_chat(chat, of_params=_OF_PARAMS, **variables)
        ids = arguments.encode_within(context.tokenizer.encode_guarded, text, most, name)
        encoded.append(Encoded(ids, context.tokenizer.unguarded(text), name))
    return _prepared(context, encoded, options, answers), arguments.raises(options.raise_errors, single)


def of_chat(context: TaskContext, messages: Any, options: Options, variables: Mapping[str, Any]) -> PreparedPrompt:
    """Returns the prepared request of one conversation. Raises RequestError if ``messages`` has several."""
    prepared, single = of_chats(context, messages, options, arguments.template_variables(None, variables))
    if not single:
        raise RequestError(
            f"messages: {len(prepared)} conversations, and a stream is of one", hint="Pass one, or call chat."
        )
    return prepared[0]


def _prepared(
    context: TaskContext, prompts: Sequence[Encoded], options: Options, answers: ChatAnswers | None = None
) -> list[PreparedPrompt]:
    each = arguments.params_for(len(prompts), options.params, options.sampling_params)
    request_options = RequestOptions.for_prompts(options.request, len(prompts))
    if answers is None:
        rows = zip(prompts, each, request_options, strict=True)
        return [Generate(prompt, params).prepare(context, one_options) for prompt, params, one_options in rows]
    tokenizer = context.tokenizer
    each = [answers.held(one, tokenizer, prompt.ids) for one, prompt in zip(each, prompts, strict=True)]
    rows = zip(prompts, each, request_options, strict=True)
    return [
        replace(Generate(prompt, one).prepare(context, one_options), reader=answers.reader(tokenizer, prompt.ids))
        for prompt, one, one_options in rows
    ]
