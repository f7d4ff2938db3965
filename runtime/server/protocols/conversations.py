"""The prompts of conversations: the texts that a chat template renders, with the token ids of finished turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from ...requests.sampling import SamplingParams
from ...shared.errors import RequestError
from ...tasks import arguments
from ...text.tokenizer import Tokenizer
from ..engines.engine_client import Model
from ..http.fields import B
from ..http.front import Front
from .answers import Given
from .bodies import ChatBody, TokenizeBody, checked_kwargs
from .tools import ToolChoice, call_forms, checked_messages, tool_choice


def chat_prompt(
    front: Front, model: Model, body: ChatBody | TokenizeBody, tools: ToolChoice, tenant: str, splice: bool
) -> tuple[Given, int]:
    """Renders and tokenizes a conversation. It runs on a thread.

    Returns the prompt, and the number of its tokens that come from a finished turn.

    Args:
        front: the front end.
        model: the model.
        body: the conversation, and its variables of the template.
        tools: the tools that the template shows.
        tenant: name of the tenant whose finished turns are used, with the body's salt.
        splice: False encodes the whole text, without finished turns.

    Raises RequestError if the template refuses the messages, and ContextError for too many tokens.
    """
    tokenizer = tokenizer_of(model)
    assert body.messages is not None
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
        **_variables(tokenizer, body, tools),
    }
    text = _rendered(tokenizer, body.messages, options)
    most = model.model.context_length - 1
    encode = partial(arguments.encode_within, tokenizer.encode_guarded, most=most, name="messages")
    ids, spliced = front.turns(model).encode(tenant, text, encode) if splice else (encode(text), 0)
    return Given(tokenizer.unguarded(text), ids, text), spliced


async def counted(
    front: Front,
    request: Request,
    kind: type[B],
    chat: Callable[[B], ChatBody],
    before: Callable[[B], None] = lambda _: None,
) -> int:
    """Returns the number of prompt tokens that a body would have. Nothing is generated.

    Args:
        front: the front end.
        request: the request, whose body is read.
        kind: the class of its body.
        chat: converts the body to one of chat completions; it runs on a thread.
        before: called with the body first, on the event loop.

    Raises the errors of ``Front.body`` and ``chat_prompt``.
    """
    body, _, charge = await front.body(request, kind)
    with charge:
        before(body)

        def count() -> int:
            chat_body = chat(body)
            tools = tool_choice(chat_body.tools, chat_body.tool_choice, chat_body.parallel_tool_calls)
            return len(chat_prompt(front, front.model(chat_body.model), chat_body, tools, "", splice=False)[0].ids)

        charge.tokens = await front.in_thread(charge.tenant.name, count, charge.size)
        return charge.tokens


def _variables(tokenizer: Tokenizer, body: ChatBody | TokenizeBody, tools: ToolChoice) -> dict[str, Any]:
    """Returns the template's variables besides the messages."""
    effort = body.effort() if isinstance(body, ChatBody) else None
    variables = {} if effort is None else effort_variables(effort[1], template_reads(tokenizer, tools))
    variables |= checked_kwargs(body.chat_template_kwargs, tuple(tokenizer.special_names))
    return variables if tools.shown is None else variables | {"tools": tools.shown}


Turn = tuple[ChatBody, ToolChoice, dict[str, Any]]
"""The messages of a conversation, its tools, and the assistant's message that ends it."""


def remember(
    front: Front, model: Model, tenant: str, given: Given, text: str, ids: Sequence[int], turn: Turn | None = None
) -> None:
    """Caches the text and the tokens of a finished turn, for the conversation that continues it.

    Args:
        tenant: name of the tenant that can use it, with the body's salt.
        given: the prompt.
        text: text of the answer, as the client gets it.
        ids: tokens of the answer. A turn that doesn't end with an end token isn't cached.
        turn: the conversation and its last message, if the template may render the message differently from ``text``.
            The template then renders it, which takes time: call this on a thread. None caches ``text``.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or not ids or ids[-1] not in model.model.eos_token_ids or given.guarded is None:
        return
    end = tokenizer.guarded(tokenizer.spelled(ids[-1]))
    if turn is None:
        front.turns(model).add(tenant, given.guarded + text + end, [*given.ids, *ids])
        return
    body, tools, message = turn
    if body.continue_final_message:
        return
    options = {"add_generation_prompt": False, **_variables(tokenizer, body, tools)}
    try:
        whole = _rendered(tokenizer, [*body.messages, message], options)
    except RequestError:
        return  # the template doesn't take such a turn back
    at = whole.rfind(end, len(given.guarded))
    reasoning = message.get("reasoning_content") or ""
    # Reasoning that the template leaves out isn't to come back by the tokens.
    if at >= 0 and whole.startswith(given.guarded) and reasoning in tokenizer.unguarded(whole[len(given.guarded) :]):
        front.turns(model).add(tenant, whole[: at + len(end)], [*given.ids, *ids])


def template_reads(tokenizer: Tokenizer, tools: ToolChoice) -> frozenset[str]:
    """Returns the names of the variables that a conversation's template reads. ``tools`` choose the template."""
    name = "tool_use" if tools.shown is not None and "tool_use" in tokenizer.chat_templates else "default"
    return tokenizer.chat_template(name).reads if name in tokenizer.chat_templates else frozenset()


_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"


def reasoning_switches(tokenizer: Tokenizer | None) -> list[str]:
    """Returns the template's variables that switch the reasoning, sorted; none if it always or never reasons."""
    reads = frozenset() if tokenizer is None else template_reads(tokenizer, tool_choice(None))
    return sorted(reads & {*_SWITCHES, _EFFORT})


def effort_variables(effort: str, reads: frozenset[str]) -> dict[str, Any]:
    """Returns values for the variables in ``reads`` that control a template's reasoning.

    A switch is True unless the effort is "none". ``reasoning_effort`` is the effort, or is omitted if the effort is
    "on".
    """
    switches: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in reads}
    return switches | ({_EFFORT: effort} if _EFFORT in reads and effort != "on" else {})


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """Returns the text of a conversation, as ``Tokenizer.guarded_chat`` makes it.

    Templates take earlier calls of tools in different forms. The forms are tried in order, until the template accepts
    one. If it accepts none, raises the RequestError of the first.
    """
    refused: RequestError | None = None
    for form in call_forms(checked_messages(messages)):
        try:
            return tokenizer.guarded_chat(form, of_params=_OF_PARAMS, **options)
        except RequestError as e:
            refused = refused or e
    assert refused is not None
    raise refused


_OF_PARAMS = frozenset(SamplingParams.__dataclass_fields__)


def tokenizer_of(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise RequestError(f"model: {model.name} has no tokenizer", hint="Send token ids to /v1/completions.")
    return model.tokenizer
