"""``Generate``: new tokens after a prompt, as one or several samples, or by a beam search."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ..requests.outputs import Logprobs, RequestOutput, plain_logprobs
from ..requests.repeats import Breakers
from ..requests.request import BeamSearch, Generation
from ..requests.request_options import RequestOptions
from ..requests.sampling import SamplingParams, seed_of
from ..requests.structured import Grammar, Grammars, StructuredOutputsParams
from ..shared.errors import RequestError, shown
from ..text.output_text import OutputText
from ..text.sequence_breakers import SequenceBreakers
from .arguments import check_type
from .base import Prepared, Task
from .context import TaskContext

if TYPE_CHECKING:
    from ..text.chat_format import Message

_KEPT_WORDS = 16
"""The number of lists of bad words, and of sequence breakers, whose tokens are cached.

Callers often pass the same list with each request.
"""
_NEEDS_TEXT = (
    ("stop", "Use stop_token_ids."),
    ("bad_words", "Pass lists of token ids."),
    ("dry_sequence_breakers", "Pass dry_sequence_breakers=[]."),
)
"""Option with texts -> the hint for a bundle without a tokenizer."""


class Finished(msgspec.Struct, array_like=True):
    """One answer. If pieces were sent before, ``text``, ``token_ids`` and ``logprobs`` omit what the pieces had."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    score: float | None = None


class Generated(msgspec.Struct, array_like=True):
    """The result of a generation in the form that crosses the socket."""

    answers: tuple[Finished, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True)
class PreparedPrompt(Prepared[RequestOutput]):
    """The requests for the answers to one prompt.

    Attributes:
        requests: one for each answer; a single one for a beam search.
        params: the caller's parameters. A request's own may have logprobs that the result doesn't show.
        reader: parses an answer of a conversation; None for a plain prompt.
    """

    requests: Sequence[Generation]
    params: SamplingParams
    reader: Callable[[Sequence[int]], Message] | None = None

    def result(self) -> RequestOutput:
        """Returns the results of its requests, which have ended, as one."""
        outputs = [request.to_output() for request in self.requests]
        if self.reader is not None:
            outputs = [replace(one, reader=self.reader) for one in outputs]
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

    @property
    def streams(self) -> bool:
        """True if pieces are part of the result; False if the answers are only known at the end, as in a beam
        search.
        """
        return self.params.best_of is None and self.params.num_beams == 1

    def sent(self, whole: bool) -> Generated:
        """Returns the answers; unless ``whole``, without the parts that pieces have sent before."""
        result = self.result()
        answers = tuple(
            Finished(
                one.text if whole else "",
                one.token_ids if whole else (),
                one.finish_reason,
                one.stop_reason,
                plain_logprobs(one.logprobs) if whole else None,
                one.score,
            )
            for one in (result, *result.others)
        )
        scored: tuple[Logprobs | None, ...] | None = None
        if result.prompt_logprobs is not None:
            scored = tuple(e if e is None else (e.token_id, e.logprob, e.top) for e in result.prompt_logprobs)
        return Generated(answers, scored)


class Generate(Task[RequestOutput], frozen=True, tag="generate"):
    """A task for new tokens after a prompt.

    Attributes:
        prompt: text or token ids.
        params: the SamplingParams, which were checked when they were made.
    """

    params: Any = SamplingParams()

    result_type: ClassVar[Any] = Generated

    def __post_init__(self) -> None:
        """Restores parameters that came through a socket; they were checked by the sender."""
        if isinstance(self.params, dict):
            msgspec.structs.force_setattr(self, "params", SamplingParams.restored(self.params))

    @property
    def slow(self) -> bool:
        """True if the answer has a form, whose grammar must be compiled."""
        return self.params.structured_outputs is not None

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "prompt") -> PreparedPrompt:
        """Checks the task, and makes a request for each answer. Raises RequestError, CapacityError."""
        check_type("params", self.params, (SamplingParams,), "SamplingParams(max_tokens=...)")
        self.check_model(context)
        return context.shared(_Maker).prepared(self, options, name)


class _Maker:
    """Makes the requests of generations, and caches grammars, banned words and sequence breakers for later ones."""

    def __init__(self, context: TaskContext) -> None:
        self._context, self._model, self._scheduler = context, context.model, context.scheduler
        self._grammars: Grammars | None = None
        self._making = threading.Lock()
        self._words: dict[Sequence[str | Sequence[int]], list[Sequence[int]]] = {}  # bad_words -> their tokens
        self._finder: SequenceBreakers | None = None
        self._breakers: dict[Sequence[str], Breakers] = {}

    def prepared(self, task: Generate, options: RequestOptions, name: str) -> PreparedPrompt:
        """Returns the requests of a task. ``name`` is its prompt's name in errors."""
        encoded, params = self._context.encoded(task.prompt, name), task.params
        common = self._context.common(options)
        common["prompt_text"] = encoded.text
        context, size = self._model.context_length, self._model.vocab_size
        prompt = self._context.checked_ids(encoded, context - 1)
        self._check_texts(params)
        bad_words = self._bad_words(params.bad_words)
        breakers = self._breakers_of(params)
        self._check_tokens(params, bad_words)
        most_new = params.max_tokens
        if most_new is None:  # the last new token needs no place in the cache
            most_new = max(self._scheduler.most_cached(context - 1, params.num_beams) - len(prompt) + 1, 1)
        text = partial(self._text, prompt, params)
        form = None if params.structured_outputs is None else self._grammar(params, options.tenant)
        each = partial(
            Generation,
            prompt,
            self._drawn(params, prompt),
            end_token_ids=[token for token in self._model.eos_token_ids if token < size],
            max_tokens=min(most_new, context - len(prompt)),
            **common,
        )
        if params.num_beams > 1:
            requests = [each(grammar=form)]
            BeamSearch.begin(requests[0], size, text)
        else:
            forms = [None if form is None else form.copy() for _ in range(params.answers)]
            requests = [
                each(text=text(), bad_words=bad_words, grammar=forms[i], breakers=breakers, sample=i)
                for i in range(params.answers)
            ]
        self._scheduler.check(requests[0])
        return PreparedPrompt(tuple(requests), params)

    def _drawn(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """Returns the parameters with which the scheduler draws an answer's tokens."""
        size, changes = self._model.vocab_size, dict[str, Any]()
        if any(token >= size for token in params.stop_token_ids):  # they never come
            changes["stop_token_ids"] = tuple(token for token in params.stop_token_ids if token < size)
        if params.best_of is not None and params.logprobs is None:
            changes["logprobs"] = 0
        if params.seed is None and self._context.seed:
            changes["seed"] = seed_of(prompt, self._context.seed)
        return params.updated(**changes) if changes else params

    def _check_texts(self, params: SamplingParams) -> None:
        """Raises RequestError for texts that need a tokenizer if the bundle has none."""
        if self._context.has_tokenizer:
            return
        for name, hint in _NEEDS_TEXT:
            used = name != "dry_sequence_breakers" or params.dry_multiplier != 0
            if used and any(isinstance(text, str) for text in getattr(params, name)):
                raise RequestError(f"{name}: strings need a tokenizer, and the bundle has none", hint=hint)

    def _grammar(self, params: SamplingParams, tenant: str) -> Grammar:
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        with self._making:
            if self._grammars is None:
                model = self._model
                self._grammars = Grammars(
                    self._context.tokenizer.to_json(),
                    model.vocab_size,
                    model.eos_token_ids,
                    counters=self._scheduler.counters,
                )
        return self._grammars.grammar(params.structured_outputs, tenant)

    def close(self) -> None:
        """Closes the compiler of grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def _text(self, prompt: Sequence[int], params: SamplingParams) -> OutputText | None:
        if not self._context.has_tokenizer or not params.detokenize:
            return None
        detokenizer = self._context.tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        return OutputText(detokenizer, params.stop, keep_stop=params.include_stop_str_in_output)

    def _bad_words(self, words: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        """Returns the tokens of banned words; for a text, its tokens at the beginning of a text and after a space."""
        if all(isinstance(word, tuple) for word in words):
            return [word for word in words if isinstance(word, tuple)]
        if (known := self._words.get(words)) is not None:
            return known
        spelled: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                spelled[tuple(word)] = None
                continue
            bare = word.lstrip() or word
            for spelling in (bare, f" {bare}"):
                if ids := self._context.tokenizer.encode(spelling, add_special_tokens=False):
                    spelled[tuple(ids)] = None
        if len(self._words) >= _KEPT_WORDS:
            self._words = {}  # another one: other threads may look into this one
        tokens: list[Sequence[int]] = list(spelled)
        self._words[words] = tokens
        return tokens

    def _breakers_of(self, params: SamplingParams) -> Breakers:
        """Returns the tokens of ``params.dry_sequence_breakers``; none if DRY is off."""
        texts = params.dry_sequence_breakers
        if params.dry_multiplier == 0 or not texts:
            return {}
        if (known := self._breakers.get(texts)) is not None:
            return known
        with self._making:
            if self._finder is None:
                self._finder = SequenceBreakers(self._context.tokenizer, self._model.vocab_size)
            breakers = self._finder.find(texts)
        if len(self._breakers) >= _KEPT_WORDS:
            self._breakers = {}  # another one: other threads may look into this one
        self._breakers[texts] = breakers
        return breakers

    def _check_tokens(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        """Raises RequestError for a token outside the vocabulary, or if no first token is allowed."""
        size = self._model.vocab_size
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": [token for word in bad_words for token in word],
        }
        for name, tokens in named.items():
            wrong = next((token for token in tokens if token >= size), None)
            if wrong is not None:
                raise RequestError(f"{name}: token {shown(wrong)} is outside the vocabulary of {size}")
        if params.allowed_token_ids:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._model.eos_token_ids))
            banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
            banned |= {word[0] for word in bad_words if len(word) == 1} | (ends if params.min_tokens else set())
            if banned.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids: logit_bias, bad_words or min_tokens ban each of them", hint="Allow more tokens."
                )
