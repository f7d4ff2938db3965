"""Requests from what a caller passes: prompts or conversations, parameters, and whose they are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..executors.base import Executor
from ..requests.outputs import RequestOutput
from ..requests.repeats import Breakers
from ..requests.request import BeamSearch, Generation, HiddenStates, Scoring
from ..requests.request_class import NO_TARGETS, RequestClass
from ..requests.sampling import SamplingParams, seed_of
from ..requests.structured import Grammar, Grammars, StructuredOutputsParams
from ..scheduler.continuous import ContinuousScheduler
from ..scheduler.options import check_priority
from ..shared.contracts import ModelInfo
from ..shared.errors import BundleError, RequestError, shown
from ..shared.step_schema import HIDDEN, layers_of
from ..text.output_text import OutputText
from ..text.sequence_breakers import SequenceBreakers
from ..text.tokenizer import Tokenizer
from . import arguments
from .arguments import Encoded, Params, Prompt, check_int, checked_name
from .chat_answers import ChatAnswers

if TYPE_CHECKING:
    from ..text.chat_format import Message as ChatMessage
    from ..text.chat_template import Message

_KEPT_WORDS = 16
"""Lists of bad words, and of sequence breakers, whose tokens are kept: callers pass the same with each request."""
_NEEDS_TEXT = (
    ("stop", "Use stop_token_ids."),
    ("bad_words", "Pass lists of token ids."),
    ("dry_sequence_breakers", "Pass dry_sequence_breakers=[]."),
)
"""Options that name texts, and what to do in a bundle without a tokenizer."""
_OF_PARAMS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Options:
    """What a caller says of prompts, whichever method is called; see ``LLM.generate``."""

    tenant: str = ""
    priority: int | Sequence[int] | None = None
    request_class: str | None = None
    params: Params = None
    sampling_params: Params = None
    raise_errors: bool | None = None

    def __post_init__(self) -> None:
        """Raises RequestError naming the argument."""
        object.__setattr__(self, "tenant", checked_name("tenant", self.tenant))
        if self.request_class is not None:
            object.__setattr__(self, "request_class", checked_name("request_class", self.request_class))
        if isinstance(self.priority, (list, tuple)):
            object.__setattr__(self, "priority", tuple(map(_checked_priority, self.priority)))
        elif self.priority is not None:
            object.__setattr__(self, "priority", _checked_priority(self.priority))

    def each(self, count: int) -> list[Options]:
        """Gives each of ``count`` requests its own. Raises RequestError where there are more or fewer priorities."""
        if not isinstance(self.priority, tuple):
            return [self] * count
        if len(self.priority) != count:
            raise RequestError(
                f"priority: {len(self.priority)} of them for {count} prompts", hint="Pass one, or one for each prompt."
            )
        return [replace(self, priority=one) for one in self.priority]


def _checked_priority(value: Any) -> int:
    check_priority("priority", value)
    return int.__int__(value)


@dataclass(frozen=True)
class PreparedPrompt:
    """What a prompt became.

    Attributes:
        requests: one for each answer; one for all of a beam search's.
        params: what the caller gave; a request's may have logprobs that its result doesn't show.
        reader: takes a conversation's answer apart.
    """

    requests: tuple[Generation, ...]
    params: SamplingParams
    reader: Callable[[Sequence[int]], ChatMessage] | None = None

    def result(self) -> RequestOutput:
        """Joins the results of its requests, which have ended."""
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


class RequestMaker:
    """Checks all that a caller passes; raises RequestError or CapacityError before any request runs.

    Args:
        model: with the context that requests may have.
        tokenizer: None where the bundle has none; then prompts are token ids.
        scheduler: says what the KV cache can hold.
        seed: goes into the seeds of requests that name none; see ``seed_of``.
    """

    def __init__(
        self, model: ModelInfo, tokenizer: Tokenizer | None, scheduler: ContinuousScheduler, seed: int = 0
    ) -> None:
        self._model = model
        self._seed = seed
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._grammars: Grammars | None = None
        self._making = threading.Lock()
        self._words: dict[Sequence[str | Sequence[int]], list[Sequence[int]]] = {}  # bad_words -> their tokens
        self._finder: SequenceBreakers | None = None
        self._breakers: dict[Sequence[str], Breakers] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises BundleError if there is none."""
        if self._tokenizer is None:
            raise BundleError(
                "the bundle has no tokenizer/tokenizer.json",
                hint="Export the model from a folder with its tokenizer; from Python, pass token ids instead of text.",
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def of_prompts(self, prompts: Any, options: Options) -> tuple[list[PreparedPrompt], bool]:
        """The requests, and whether the error of one is raised; see ``arguments.raises``."""
        given, single = arguments.listed(prompts)
        requests = self._requests(self._encoded(given, single), options)
        return requests, arguments.raises(options.raise_errors, single)

    def of_chats(
        self, messages: Any, options: Options, variables: Mapping[str, Any]
    ) -> tuple[list[PreparedPrompt], bool]:
        """Does the same for conversations; ``variables`` are the chat template's."""
        chats, single = arguments.conversations(messages)
        variables = dict(variables)
        answers = ChatAnswers.taken_from(variables)
        most, found = self._model.context_length - 1, []
        for i, chat in enumerate(chats):
            name = "messages" if single else f"messages[{i}]"
            text = self.tokenizer.guarded_chat(chat, of_params=_OF_PARAMS, **variables)
            ids = arguments.encode_within(self.tokenizer.encode_guarded, text, most, name)
            found.append(Encoded(ids, self.tokenizer.unguarded(text), name))
        return self._requests(found, options, answers), arguments.raises(options.raise_errors, single)

    def scoring(self, ids: Sequence[int]) -> Scoring:
        """Makes a request that wants its prompt's logits."""
        prompt = self._whole(Encoded(arguments.token_ids(ids, "ids"), name="ids"))
        return Scoring(prompt, np.empty((len(prompt), self._model.vocab_size), np.float32))

    def hidden_states(self, prompt: Prompt, layers: Sequence[int], executor: Executor) -> HiddenStates:
        """Makes one that wants hidden states. Raises RequestError."""
        if not (there := layers_of(HIDDEN, executor.caps.outputs)):
            raise RequestError(
                f"hidden_states: target {executor.describe()['target']!r} gives none",
                hint='Open its target "cpu", "cuda" or "tvm"; libraries of tvm give them if they were exported anew.',
            )
        layers = arguments.numbers("layers", layers, "Pass a list such as [0, -1].")
        count = max(sum(len(group.layers) for group in self._scheduler.groups.values()), *there) + 1
        for layer in layers:
            check_int("layers", layer, -count, count - 1)
            if layer % count not in there:
                raise RequestError(
                    f"layers: hidden state {layer} isn't a value of this program: norm and rounding are one step",
                    hint=f"It has {', '.join(map(str, there))}.",
                )
        return HiddenStates(self._whole(self._encoded([prompt], True)[0]), [layer % count for layer in layers])

    def _whole(self, prompt: Encoded) -> list[int]:
        """The ids of a prompt without an answer, which may be as long as the context."""
        context = self._model.context_length
        return arguments.checked_ids(prompt, context, context, self._model.vocab_size)

    def of_prompt(self, prompt: Prompt, options: Options) -> PreparedPrompt:
        """Makes the requests of one prompt."""
        return self._requests(self._encoded([prompt], True), options)[0]

    def of_chat(self, messages: Iterable[Message], options: Options, variables: Mapping[str, Any]) -> PreparedPrompt:
        """Makes the requests of one conversation."""
        requests, single = self.of_chats(messages, options, arguments.template_variables(None, variables))
        if not single:
            raise RequestError(
                f"messages: {len(requests)} conversations, and a stream is of one", hint="Pass one, or call chat."
            )
        return requests[0]

    def _encoded(self, prompts: Sequence[Any], single: bool) -> list[Encoded]:
        return arguments.encoded_all(prompts, single, lambda: self.tokenizer, self._model.context_length - 1)

    def _requests(
        self, prompts: Sequence[Encoded], options: Options, answers: ChatAnswers | None = None
    ) -> list[PreparedPrompt]:
        each = arguments.params_for(len(prompts), options.params, options.sampling_params)
        asked = [(one, self._class_of(one)) for one in options.each(len(prompts))]
        if answers is not None:
            each = [answers.held(one, self.tokenizer, prompt.ids) for one, prompt in zip(each, prompts, strict=True)]
        rows = zip(prompts, each, asked, strict=True)
        made = [self._request(prompt, one, *whose) for prompt, one, whose in rows]
        if answers is None:
            return made
        return [
            replace(one, reader=answers.reader(self.tokenizer, prompt.ids))
            for one, prompt in zip(made, prompts, strict=True)
        ]

    def _class_of(self, options: Options) -> RequestClass:
        scheduling = self._scheduler.config.scheduling
        if scheduling is not None:
            return scheduling.class_named(options.request_class)
        for name, value in (("request_class", options.request_class), ("priority", options.priority)):
            if value:
                raise RequestError(
                    f"{name}: {shown(value)}, and this LLM serves first come, first served",
                    hint='Open the bundle with LLM(path, scheduling="priority"), or with classes.',
                )
        return NO_TARGETS

    def _request(
        self, given: Encoded, params: SamplingParams, whose: Options, of_class: RequestClass
    ) -> PreparedPrompt:
        assert not isinstance(whose.priority, Sequence)  # see Options.each
        context = self._model.context_length
        prompt = arguments.checked_ids(given, context - 1, context, self._model.vocab_size)
        if self._tokenizer is None:
            for name, hint in _NEEDS_TEXT:
                if name == "dry_sequence_breakers" and params.dry_multiplier == 0:
                    continue
                if any(isinstance(text, str) for text in getattr(params, name)):
                    raise RequestError(f"{name}: strings need a tokenizer, and the bundle has none", hint=hint)
        bad_words = self._bad_words(params.bad_words)
        breakers = self._breakers_of(params)
        self._check_tokens(params, bad_words)
        wanted = params.max_tokens
        if wanted is None:  # the last new token needs no place in the cache
            wanted = max(self._scheduler.most_cached(context - 1, params.num_beams) - len(prompt) + 1, 1)
        size, drawn = self._model.vocab_size, params
        if any(token >= size for token in params.stop_token_ids):  # they never come
            drawn = replace(drawn, stop_token_ids=tuple(token for token in params.stop_token_ids if token < size))
        if params.best_of is not None and params.logprobs is None:
            drawn = replace(drawn, logprobs=0)
        if params.seed is None and self._seed:
            drawn = replace(drawn, seed=seed_of(prompt, self._seed))
        text = partial(self._text, prompt, params)
        form = None if params.structured_outputs is None else self._grammar(params, whose.tenant)
        each = partial(
            Generation,
            prompt,
            drawn,
            end_token_ids=[token for token in self._model.eos_token_ids if token < size],
            max_tokens=min(wanted, context - len(prompt)),
            prompt_text=given.text,
            tenant=whose.tenant,
            priority=whose.priority,
            request_class=of_class,
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

    def _grammar(self, params: SamplingParams, tenant: str) -> Grammar:
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        with self._making:
            if self._grammars is None:
                model = self._model
                self._grammars = Grammars(
                    self.tokenizer.to_json(),
                    model.vocab_size,
                    model.eos_token_ids,
                    errors=self._scheduler.helper_errors,
                )
        return self._grammars.grammar(params.structured_outputs, tenant)

    def close(self) -> None:
        """Ends what compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def _text(self, prompt: Sequence[int], params: SamplingParams) -> OutputText | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        detokenizer = self._tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        return OutputText(detokenizer, params.stop, keep_stop=params.include_stop_str_in_output)

    def _bad_words(self, words: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        """Finds their tokens: a text's as it stands at the beginning of a text, and behind a space."""
        if all(isinstance(word, tuple) for word in words):
            return [word for word in words if isinstance(word, tuple)]
        if (known := self._words.get(words)) is not None:
            return known
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            bare = word.lstrip() or word
            for spelling in (bare, f" {bare}"):
                if ids := self.tokenizer.encode(spelling, add_special_tokens=False):
                    found[tuple(ids)] = None
        if len(self._words) >= _KEPT_WORDS:
            self._words = {}  # another one: other threads may look into this one
        tokens: list[Sequence[int]] = list(found)
        self._words[words] = tokens
        return tokens

    def _breakers_of(self, params: SamplingParams) -> Breakers:
        """Finds the tokens of ``params.dry_sequence_breakers``; none without DRY."""
        texts = params.dry_sequence_breakers
        if params.dry_multiplier == 0 or not texts:
            return {}
        if (known := self._breakers.get(texts)) is not None:
            return known
        with self._making:
            if self._finder is None:
                self._finder = SequenceBreakers(self.tokenizer, self._model.vocab_size)
            breakers = self._finder.find(texts)
        if len(self._breakers) >= _KEPT_WORDS:
            self._breakers = {}  # another one: other threads may look into this one
        self._breakers[texts] = breakers
        return breakers

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
                raise RequestError(f"{name}: token {shown(wrong)} is outside the vocabulary of {size}")
        if params.allowed_token_ids:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._model.eos_token_ids))
            banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
            banned |= {word[0] for word in bad_words if len(word) == 1} | (ends if params.min_tokens else set())
            if banned.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids: logit_bias, bad_words or min_tokens ban each of them", hint="Allow more tokens."
                )
