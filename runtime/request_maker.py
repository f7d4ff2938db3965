"""Requests from what a caller passes: prompts or conversations, parameters, a tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginewright.plugins.shared.contracts import ModelInfo
from enginewright.plugins.shared.errors import BundleError, RequestError

from . import arguments
from .arguments import Encoded, Params, Prompt, check_type
from .requests.request import Request
from .requests.sampling import SamplingParams
from .scheduler.continuous import ContinuousScheduler
from .text.output_text import OutputText
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .text.chat_template import Message


class RequestMaker:
    """Checks all that a caller passes; raises RequestError or CapacityError before any request runs.

    Args:
        model: with the context that requests may have.
        tokenizer: None where the bundle has none; then prompts are token ids.
        scheduler: says what the KV cache can hold.
    """

    def __init__(self, model: ModelInfo, tokenizer: Tokenizer | None, scheduler: ContinuousScheduler) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._scheduler = scheduler

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises BundleError if there is none."""
        if self._tokenizer is None:
            raise BundleError(
                "the bundle has no tokenizer/tokenizer.json",
                hint="Export the model from a folder with its tokenizer; from Python, pass token ids instead of text.",
            )
        return self._tokenizer

    def of_prompts(
        self, prompts: Any, params: Params, sampling_params: Params, tenant: str
    ) -> tuple[list[Request], bool]:
        """The requests, and whether the prompt was one, and not a list."""
        given, single = arguments.listed(prompts)
        return self._requests(self._encoded(given, single), params, sampling_params, tenant), single

    def of_chats(
        self, messages: Any, params: Params, sampling_params: Params, variables: Mapping[str, Any], tenant: str
    ) -> tuple[list[Request], bool]:
        """The same of conversations; ``variables`` are the chat template's."""
        chats, single = arguments.conversations(messages)
        most, found = self._model.context_length - 1, []
        for i, chat in enumerate(chats):
            name = "messages" if single else f"messages[{i}]"
            text = self.tokenizer.render_chat(chat, **variables)
            ids = arguments.encode_within(self.tokenizer, text, most, name, add_special_tokens=False)
            found.append(Encoded(ids, text, name))
        return self._requests(found, params, sampling_params, tenant), single

    def of_prompt(self, prompt: Prompt, params: Params, tenant: str) -> Request:
        """The request of one prompt."""
        return self._requests(self._encoded([prompt], True), params, None, tenant)[0]

    def of_chat(
        self, messages: Iterable[Message], params: Params, variables: Mapping[str, Any], tenant: str
    ) -> Request:
        """The request of one conversation."""
        variables = arguments.template_variables(None, variables)
        requests, single = self.of_chats(messages, params, None, variables, tenant)
        if not single:
            raise RequestError(
                f"messages: {len(requests)} conversations, and a stream is of one", hint="Pass one, or call chat."
            )
        return requests[0]

    def _encoded(self, prompts: Sequence[Any], single: bool) -> list[Encoded]:
        return arguments.encoded_all(prompts, single, lambda: self.tokenizer, self._model.context_length - 1)

    def _requests(
        self, prompts: Sequence[Encoded], params: Params, sampling_params: Params, tenant: str
    ) -> list[Request]:
        check_type("tenant", tenant, (str,), "a name")
        each = arguments.params_for(len(prompts), params, sampling_params)
        return [self._request(prompt, one, tenant) for prompt, one in zip(prompts, each, strict=True)]

    def _request(self, encoded_prompt: Encoded, params: SamplingParams, tenant: str) -> Request:
        context = self._model.context_length
        prompt = arguments.checked_ids(encoded_prompt, context - 1, context, self._model.vocab_size)
        text = None
        if self._tokenizer is not None:
            text = OutputText(self._tokenizer.detokenizer(prompt), params.stop)
        elif params.stop:
            raise RequestError("stop: strings need a tokenizer, and the bundle has none", hint="Use stop_token_ids.")
        longest = context - len(prompt)
        wanted = params.max_tokens
        if wanted is None:  # the last new token needs no place in the cache
            wanted = max(self._scheduler.most_cached(context - 1) - len(prompt) + 1, 1)
        request = Request(
            prompt,
            params,
            end_token_ids=self._model.eos_token_ids,
            max_tokens=min(wanted, longest),
            prompt_text=encoded_prompt.text,
            text=text,
            tenant=tenant,
        )
        self._scheduler.check(request)
        return request
