"""Requests from what a caller passes: prompts or conversations, parameters, and whose they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from enginewright.plugins.shared.contracts import ModelInfo
from enginewright.plugins.shared.errors import BundleError, RequestError

from . import arguments
from .arguments import Encoded, Params, Prompt, check_int, check_type
from .executors.base import Executor
from .requests.beam_search import BeamSearch
from .requests.outputs import RequestOutput
from .requests.request import HiddenStates, Request
from .requests.request_class import NO_TARGETS, RequestClass
from .requests.sampling import SamplingParams
from .scheduler.continuous import ContinuousScheduler
from .scheduler.options import check_priority
from .text.output_text import OutputText
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .text.chat_template import Message


@dataclass(frozen=True)
class Terms:
    """Whose requests these are, and how they are served; see ``LLM.generate``."""

    tenant: str = ""
    priority: int | None = None
    request_class: str | None = None


@dataclass(frozen=True)
class Asked:
    """What a prompt became.

    Attributes:
        requests: one for each answer; one for all of a beam search's.
        params: what the caller gave; a request's may have logprobs that its result doesn't show.
    """

    requests: tuple[Request, ...]
    params: SamplingParams

    def result(self) -> RequestOutput:
        """Of requests that have ended."""
        outputs = [request.to_output() for request in self.requests]
        if self.params.best_of is not None:
            outputs.sort(key=lambda one: -(one.cumulative_logprob or 0.0) / max(len(one.token_ids), 1))
            outputs = outputs[: self.params.n]
            if self.params.logprobs is None:
                outputs = [replace(one, logprobs=None) for one in outputs]
        if len(outputs) == 1:
            return outputs[0]
        failed = next((one for one in outputs if one.error is not None), None)
        best = replace(outputs[0], others=tuple(outputs[1:]))
        return best if failed is None else replace(best, error=failed.error)


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
        self, prompts: Any, params: Params, sampling_params: Params, terms: Terms, raise_errors: bool | None
    ) -> tuple[list[Asked], bool]:
        """The requests, and whether the error of one is raised; see ``arguments.raises``."""
        given, single = arguments.listed(prompts)
        requests = self._requests(self._encoded(given, single), params, sampling_params, terms)
        return requests, arguments.raises(raise_errors, single)

    def of_chats(
        self,
        messages: Any,
        params: Params,
        sampling_params: Params,
        variables: Mapping[str, Any],
        terms: Terms,
        raise_errors: bool | None,
    ) -> tuple[list[Asked], bool]:
        """The same of conversations; ``variables`` are the chat template's."""
        chats, single = arguments.conversations(messages)
        most, found = self._model.context_length - 1, []
        for i, chat in enumerate(chats):
            name = "messages" if single else f"messages[{i}]"
            text = self.tokenizer.render_chat(chat, **variables)
            ids = arguments.encode_within(self.tokenizer, text, most, name, add_special_tokens=False)
            found.append(Encoded(ids, text, name))
        return self._requests(found, params, sampling_params, terms), arguments.raises(raise_errors, single)

    def of_scored(self, prompt: Encoded, **wanted: Any) -> Asked:
        """A request that wants something of its prompt alone: its logits, if nothing is said. It may be as long as the
        context."""
        context = self._model.context_length
        ids = arguments.checked_ids(prompt, context, context, self._model.vocab_size)
        if not wanted:
            wanted = {"logits": np.empty((len(ids), self._model.vocab_size), np.float32)}
        request = Request(ids, SamplingParams(), max_tokens=0, **wanted)
        return Asked((request,), request.params)

    def of_hidden(self, prompt: Prompt, layers: Sequence[int], executor: Executor) -> Asked:
        """One that wants hidden states. Raises RequestError."""
        if not (there := executor.caps.hidden):
            raise RequestError(
                f"hidden_states: target {executor.describe()['target']!r} gives none",
                hint='Open the bundle with target="cpu", if it has that.',
            )
        if isinstance(layers, (str, int)) or not len(layers):
            raise RequestError(f"layers: {layers!r} isn't a list of numbers", hint="Pass one such as [0, -1].")
        count = max(sum(len(group.layers) for group in self._scheduler.groups.values()), *there) + 1
        for layer in layers:
            check_int("layers", layer, -count, count - 1)
            if layer % count not in there:
                raise RequestError(
                    f"layers: hidden state {layer} isn't a value of this program: norm and rounding are one step",
                    hint=f"It has {', '.join(map(str, there))}.",
                )
        wanted = HiddenStates(tuple(layer % count for layer in layers))
        return self.of_scored(self._encoded([prompt], True)[0], hidden=wanted)

    def of_prompt(self, prompt: Prompt, params: Params, terms: Terms) -> Asked:
        """The same of one prompt."""
        return self._requests(self._encoded([prompt], True), params, None, terms)[0]

    def of_chat(self, messages: Iterable[Message], params: Params, variables: Mapping[str, Any], terms: Terms) -> Asked:
        """The same of one conversation."""
        variables = arguments.template_variables(None, variables)
        requests, single = self.of_chats(messages, params, None, variables, terms, None)
        if not single:
            raise RequestError(
                f"messages: {len(requests)} conversations, and a stream is of one", hint="Pass one, or call chat."
            )
        return requests[0]

    def _encoded(self, prompts: Sequence[Any], single: bool) -> list[Encoded]:
        return arguments.encoded_all(prompts, single, lambda: self.tokenizer, self._model.context_length - 1)

    def _requests(
        self, prompts: Sequence[Encoded], params: Params, sampling_params: Params, terms: Terms
    ) -> list[Asked]:
        of_class = self._class_of(terms)
        each = arguments.params_for(len(prompts), params, sampling_params)
        return [self._request(prompt, one, terms, of_class) for prompt, one in zip(prompts, each, strict=True)]

    def _class_of(self, terms: Terms) -> RequestClass:
        check_type("tenant", terms.tenant, (str,), "a name")
        check_type("request_class", terms.request_class, (str, type(None)), "a name, or None")
        if terms.priority is not None:
            check_priority("priority", terms.priority)
        scheduling = self._scheduler.config.scheduling
        if scheduling is not None:
            return scheduling.class_named(terms.request_class)
        for name, value in (("request_class", terms.request_class), ("priority", terms.priority)):
            if value:
                raise RequestError(
                    f"{name}: {value!r}, and this LLM serves first come, first served",
                    hint='Open the bundle with LLM(path, scheduling="priority"), or with classes.',
                )
        return NO_TARGETS

    def _request(self, encoded_prompt: Encoded, params: SamplingParams, terms: Terms, of_class: RequestClass) -> Asked:
        context = self._model.context_length
        prompt = arguments.checked_ids(encoded_prompt, context - 1, context, self._model.vocab_size)
        if self._tokenizer is None and (params.stop or any(isinstance(word, str) for word in params.bad_words)):
            name = "stop" if params.stop else "bad_words"
            hint = "Use stop_token_ids." if params.stop else "Pass lists of token ids."
            raise RequestError(f"{name}: strings need a tokenizer, and the bundle has none", hint=hint)
        bad_words = self._bad_words(params.bad_words)
        self._check_tokens(params, bad_words)
        wanted = params.max_tokens
        if wanted is None:  # the last new token needs no place in the cache
            wanted = max(self._scheduler.most_cached(context - 1, params.num_beams) - len(prompt) + 1, 1)
        drawn = params
        if params.best_of is not None and params.logprobs is None:
            drawn = replace(params, logprobs=0)
        text = partial(self._text, prompt, params.stop)
        each = partial(
            Request,
            prompt,
            drawn,
            end_token_ids=self._model.eos_token_ids,
            max_tokens=min(wanted, context - len(prompt)),
            prompt_text=encoded_prompt.text,
            tenant=terms.tenant,
            priority=terms.priority,
            request_class=of_class,
        )
        if params.num_beams > 1:
            requests = [self._search(each(), each, text)]
        else:
            requests = [each(text=text(), bad_words=bad_words, sample=i) for i in range(params.answers)]
        self._scheduler.check(requests[0])
        return Asked(tuple(requests), params)

    def _text(self, prompt: Sequence[int], stop: Sequence[str]) -> OutputText | None:
        return None if self._tokenizer is None else OutputText(self._tokenizer.detokenizer(prompt), stop)

    def _search(self, plain: Request, each: Callable[..., Request], text: Callable[[], OutputText | None]) -> Request:
        """The request of a beam search; ``plain`` is it without."""
        size = self._model.vocab_size
        search = BeamSearch(plain.params, plain.end_tokens, plain.max_tokens, size, text)
        if search.candidates == size:
            raise RequestError(f"num_beams: {plain.params.num_beams} are too many for a vocabulary of {size}")
        root = each(search=search)
        search.members.append(root)
        return root

    def _bad_words(self, words: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        """Their tokens: of a text as it stands at the beginning of a text, and behind a space."""
        found: list[Sequence[int]] = []
        for word in words:
            if not isinstance(word, str):
                found.append(word)
                continue
            bare = word.lstrip() or word
            for spelling in (bare, f" {bare}"):
                ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _check_tokens(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        """That all are in the vocabulary, and that the first new token can be one."""
        size = self._model.vocab_size
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": [token for word in bad_words for token in word],
        }
        for name, tokens in named.items():
            wrong = next((token for token in tokens if token >= size), None)
            if wrong is not None:
                raise RequestError(f"{name}: token {wrong} is outside the vocabulary of {size}")
        if params.allowed_token_ids:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._model.eos_token_ids))
            banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
            banned |= {word[0] for word in bad_words if len(word) == 1} | (ends if params.min_tokens else set())
            if banned.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids: logit_bias, bad_words or min_tokens ban each of them", hint="Allow more tokens."
                )
