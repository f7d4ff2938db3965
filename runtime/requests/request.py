"""Requests: their tokens, their blocks in the KV cache, and when they end.

There are two kinds: a ``Generation`` produces new tokens, a ``PromptRequest`` computes outputs for the tokens of a
prompt. A ``BeamSearch`` decides over several generations. Tasks (``runtime.tasks``) make requests.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypedDict, Unpack

import msgspec

from enginewright.runtime.text.output_text import OutputText

from ..shared.contracts import DRAFT_ROWS, FloatArray, StepOutput
from ..shared.errors import EnginewrightError, RequestError
from ..shared.step_schema import of_request
from .block_keys import Item, Namespace, items_of
from .block_tables import BlockTables
from .logit_rules import LogitRules
from .outputs import FinishReason, RequestMetrics, RequestOutput, StreamPiece, TokenLogprobs
from .repeats import Breakers
from .request_class import NO_TARGETS, RequestClass
from .request_options import RequestOptions
from .sampling import SamplingParams, sample_seed, seed_of
from .structured import Grammar

_numbers = itertools.count()


class FailedRequestError(Exception):
    """An error that ends some requests, while others continue. Its cause is the actual error."""

    def __init__(self, *requests: Request) -> None:
        super().__init__(", ".join(request.request_id for request in requests))
        self.requests = requests


class Identity(TypedDict, total=False):
    """The arguments of `Request` that determine which cached prefixes it can use."""

    options: RequestOptions
    adapter: str
    contents: Mapping[int, bytes]


class Common(Identity, total=False):
    """The arguments of `Request` that all kinds of requests have."""

    prompt_text: str | None
    request_class: RequestClass
    clock: Callable[[], float]


class Request:
    """A prompt with the state of its computation. Only the scheduler and the engine loop change it.

    Attributes that only a generation needs are None or 0 in other kinds, so the scheduler treats all kinds alike.

    Args:
        prompt: token ids, at least one.
        prompt_text: the text of the prompt, for the result.
        options: the caller's options: tenant, priority and class.
        adapter: the digest of the adapter that it runs with; "" for none. Prefixes are shared only with the same
            adapter.
        contents: position of a placeholder in the prompt -> digest of the content that replaces it.
        request_class: the class, with the targets for its latencies.
        clock: returns seconds, for its times.

    Attributes:
        scores: True if it needs outputs of its prompt, and no new tokens.
        outputs: the names of the prompt's outputs: see ``step_schema.OUTPUTS``.
        token_rows: True if one of these outputs has a row for each token of the prompt.
        whole: True if one step must compute all its tokens, as for a model without a cache.
        token_types: the types of the prompt's tokens, as of the two texts of a pair; () if all are 0.
    """

    scores = False
    outputs: tuple[str, ...] = ()
    token_rows = True
    whole = False
    token_types: Sequence[int] = ()
    max_tokens = 0
    search: BeamSearch | None = None
    rules: LogitRules | None = None
    token_times: tuple[float, float] | None = None  # of the first new token and the last
    _longest_interval = 0.0
    drafted = accepted = 0  # tokens that were computed ahead, and of these those that were right

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        prompt_text: str | None = None,
        options: RequestOptions = RequestOptions(),
        adapter: str = "",
        contents: Mapping[int, bytes] = MappingProxyType({}),
        request_class: RequestClass = NO_TARGETS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = str(next(_numbers))
        self.prompt_text = prompt_text
        self.options, self.tenant = options, options.tenant
        self.namespace = Namespace(self.tenant, adapter)
        self._contents = contents
        self.priority = request_class.priority if options.priority is None else options.priority
        self.request_class = request_class
        self.rank: tuple[float, ...] = ()  # the policy's: requests run in this order
        self._clock = clock
        self.queued = clock()
        self.started: float | None = None  # when its first chunk was scheduled
        self.tokens = list(prompt)  # prompt, then output
        self.prompt_length = len(self.tokens)
        self.computed = 0  # tokens whose keys and values are in the cache
        self.cached_tokens: int | None = None  # of the prompt, found in the prefix cache when it began
        self._tables = BlockTables()
        self.capacity = 0  # tokens that its blocks can hold
        self.finish_reason: FinishReason | None = None
        self.error: EnginewrightError | None = None  # why, where that is "error"

    @property
    def tables(self) -> BlockTables:
        """The request's block tables: one object for its whole life. Assignment replaces the contents."""
        return self._tables

    @tables.setter
    def tables(self, tables: Mapping[str, Iterable[int]]) -> None:
        self._tables.replace(tables)

    @property
    def items(self) -> Sequence[Item]:
        """The item of each of the request's tokens: its id, or a ``Content``.

        The prefix cache finds blocks by their items.
        """
        return items_of(self.tokens, self._contents) if self._contents else self.tokens

    @property
    def identity(self) -> Identity:
        """The arguments with which another ``Request`` must be made to share cached prefixes with this one."""
        options = RequestOptions(self.tenant)
        return {"options": options, "adapter": self.namespace.adapter, "contents": self._contents}

    @property
    def wants_prompt(self) -> bool:
        """True if outputs of prompt tokens are still missing, so that the request can't begin with a cached prefix."""
        return self.scores

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """The number of tokens that aren't in the KV cache yet."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """True if the next step gives the next token: one token is still to be computed, or a few after a rejected
        draft.
        """
        remaining = len(self.tokens) - self.computed  # not by the property: each step asks every request
        return remaining == 1 or (self.drafted > 0 and remaining <= DRAFT_ROWS)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def most_cached(self) -> int:
        """The most tokens that the request can ever have in the KV cache: all but the last new one, which is never
        computed.
        """
        return self.prompt_length + max(self.max_tokens - 1, 0)

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times and counts so far."""
        first, last = self.token_times or (None, None)
        return RequestMetrics(
            self.queued,
            first,
            last,
            self.started,
            max(self.output_length - 1, 0),
            self._longest_interval,
            self.drafted,
            self.accepted,
            self.cached_tokens or 0,
        )

    def fail(self, error: EnginewrightError) -> None:
        """Ends the request with an error; its output so far stays."""
        self.error = error
        self.finish("error")

    def finish(self, reason: FinishReason) -> None:
        """Ends the request. ``reason``: see ``FinishReason``."""
        self.finish_reason = reason

    def abort(self) -> None:
        """Ends the request because the caller aborted it. Never raises."""
        self.finish("abort")

    def take_piece(self) -> StreamPiece:
        """Returns the new output since the last call."""
        return StreamPiece((), "", self.finish_reason)


class PromptRequest(Request):
    """A request for outputs of its prompt, for every token or for the whole prompt. It produces no new tokens.

    Args:
        prompt, common: as for ``Request``.
        outputs: the names of the outputs.
        take: called with the position of the first of n tokens, and output -> its rows: [n, ...], or [1, ...] of an
            output of the whole prompt.
        whole, token_types: see ``Request``.
    """

    scores = True

    def __init__(
        self,
        prompt: Sequence[int],
        outputs: Sequence[str],
        take: Callable[[int, Mapping[str, FloatArray]], None],
        *,
        whole: bool = False,
        token_types: Sequence[int] = (),
        **common: Unpack[Common],
    ) -> None:
        super().__init__(prompt, **common)
        self.outputs = tuple(outputs)
        self.token_rows = not all(map(of_request, self.outputs))
        self.whole, self.token_types = whole, token_types
        self._take = take

    def accept_rows(self, start: int, output: StepOutput, rows: slice, index: int = 0) -> None:
        """Passes the request its rows of a step's outputs.

        Args:
            start: the position of the request's first token in the step.
            output: the output of the step.
            rows: the request's rows of outputs that have one for each token.
            index: the request's row of outputs that have one for each request.
        """
        of_prompt = slice(index, index + 1)
        arrays = {name: output.outputs[name] for name in self.outputs}
        self._take(start, {name: array[of_prompt if of_request(name) else rows] for name, array in arrays.items()})
        if self.whole or start + rows.stop - rows.start == self.prompt_length:
            self.finish("length")


class Generation(Request):
    """A request that produces new tokens.

    Args:
        prompt, common: as for ``Request``.
        params: the sampling parameters.
        end_token_ids: the model's tokens that end the text; ``params.stop_token_ids`` are added.
        max_tokens: the most new tokens; None takes ``params.max_tokens``.
        text: converts the new tokens to text; None if no text is needed (then stop strings have no effect).
        bad_words: the tokens of each of ``params.bad_words``.
        grammar: a new grammar for the answer, which this request alone advances; None for any answer.
        breakers: ``params.dry_sequence_breakers`` as tokens.
        sample: the index of this answer among the answers to the prompt; see ``sample_seed``.

    Attributes:
        search: the beam search that this request belongs to; None without one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        end_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
        text: OutputText | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        breakers: Breakers = MappingProxyType({}),
        sample: int = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(prompt, **common)
        self.params = params
        self.sample = sample
        self.stop_reason: int | str | None = None
        self.seed = sample_seed(seed_of(prompt) if params.seed is None else params.seed, sample)
        most = params.max_tokens if max_tokens is None else max_tokens
        if most is None:
            raise RequestError("max_tokens: None", hint="Say how many tokens the context has room for.")
        self.max_tokens = most
        self._end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or grammar is not None:
            self._end_token_ids |= frozenset(end_token_ids)
        self.rules = LogitRules.from_params(params, self.tokens, self._end_token_ids, bad_words, grammar, breakers)
        # What counts its new tokens, for penalties.
        self._counted = None if self.rules is None or not self.rules.counting else self.rules.push
        # Of the prompt's tokens; those of the first ``scored`` are known.
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * self.prompt_length
        self._scored = 0
        self._text = text
        self._whole_text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._taken = 0  # new tokens that were given out

    @property
    def wants_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are still missing."""
        return self._prompt_logprobs is not None and self._scored < self.prompt_length - 1  # nothing follows the last

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the request's text: the model's, and those of its parameters."""
        return self._end_token_ids

    @property
    def token_logprobs(self) -> Sequence[TokenLogprobs]:
        """The log-probabilities of new tokens; empty unless the parameters or a beam search need them."""
        return self._logprobs

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Appends a new token; ends the request if it is the last."""
        self.tokens.append(token)
        if self._counted is not None:
            self._counted(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._timed()
        if token in self._end_token_ids or (self._text is not None and self._text.push(token)):
            if self.params.include_stop_str_in_output and self._text is not None and token in self._end_token_ids:
                self._text.push(token)
            if token in self.params.stop_token_ids:
                self.stop_reason = token
            self.finish("stop")
        elif self.output_length >= self.max_tokens:
            self.finish("length")

    @property
    def _grammar(self) -> Grammar | None:
        return None if self.rules is None else self.rules.grammar

    def branch(self) -> Generation:
        """Returns a new request of the same beam search with the same tokens."""
        other = Generation(
            self.tokens[: self.prompt_length],
            self.params,
            max_tokens=self.max_tokens,
            grammar=self._grammar,
            options=self.options,
            adapter=self.namespace.adapter,
            contents=self._contents,
            request_class=self.request_class,
            clock=self._clock,
        )
        other.search, other.rank = self.search, self.rank
        other.become(self)
        return other

    def become(self, other: Generation) -> None:
        """Replaces this request's tokens and grammar's state by those of ``other``, a request of the same beam
        search.
        """
        self.tokens = other.tokens.copy()
        self._logprobs = other._logprobs.copy()
        if self.rules is not None and other._grammar is not None:
            self.rules.grammar = other._grammar.copy()

    def extend(self, entry: TokenLogprobs) -> None:
        """Appends one token, in a beam search. It doesn't check if the request ends."""
        self.tokens.append(entry.token_id)
        self._logprobs.append(entry)
        if self._grammar is not None:
            self._grammar.push(entry.token_id)
        self._timed()

    def accept_answers(self) -> None:
        """Ends the request with the answers of its beam search; its own tokens become those of the best answer."""
        assert self.search is not None
        best = self.search.answers[0]
        self.tokens[self.prompt_length :] = best.tokens
        self._logprobs = list(best.logprobs)
        self._text = self._text_of(best.tokens)
        self._timed()
        if best.tokens[-1] in self.params.stop_token_ids:
            self.stop_reason = best.tokens[-1]
        self.finish("stop" if best.stopped else "length")

    def _timed(self) -> None:
        """Records the time of a new token."""
        now = self._clock()
        first, last = self.token_times or (now, now)
        if now - last > self._longest_interval:
            self._longest_interval = now - last
        self.token_times = (first, now)

    def _text_of(self, tokens: Sequence[int]) -> OutputText | None:
        assert self.search is not None
        text = self.search.new_text()
        left_out = () if self.params.include_stop_str_in_output else self._end_token_ids
        for token in tokens:
            if text is not None and token not in left_out:
                text.push(token)
        return text

    def accept_scored(self, start: int, count: int, found: Sequence[TokenLogprobs]) -> None:
        """Stores log-probabilities of prompt tokens.

        Args:
            start: the position of the first computed token.
            count: the number of computed tokens.
            found: the log-probabilities of the prompt tokens at ``start`` + 1, ``start`` + 2, ...
        """
        assert self._prompt_logprobs is not None
        self._prompt_logprobs[start + 1 : start + 1 + len(found)] = found
        self._scored = max(self._scored, start + count)

    def fail(self, error: EnginewrightError) -> None:
        try:
            super().fail(error)
        except Exception:  # noqa: BLE001  its text may be what failed
            self._text = None
            self.finish("error")

    def abort(self) -> None:
        self._text = None  # nobody reads it, and it may fail
        super().abort()

    def finish(self, reason: FinishReason) -> None:
        """Ends the request. Text that was held back is released, which may complete a stop string and change the
        reason.
        """
        if self._text is not None and self._text.finish() and reason == "length":
            reason = "stop"
        if self._text is not None and self._text.stopped_by is not None:
            self.stop_reason = self._text.stopped_by
        super().finish(reason)

    def take_piece(self) -> StreamPiece:
        text = "" if self._text is None else self._text.take()
        self._whole_text.append(text)
        first, self._taken = self._taken, self.output_length
        return StreamPiece(
            token_ids=tuple(self.tokens[self.prompt_length + first :]),
            text=text,
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs[first:]),
            index=self.sample,
        )

    def to_output(self) -> RequestOutput:
        """Returns the complete result; call it after the last ``take_piece``."""
        assert self.finish_reason is not None
        answers = [] if self.search is None else self.search.answers[: self.params.n]
        return RequestOutput(
            prompt_token_ids=tuple(self.tokens[: self.prompt_length]),
            token_ids=tuple(self.tokens[self.prompt_length :]),
            text="".join(self._whole_text),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            stop_reason=self.stop_reason,
            prompt=self.prompt_text,
            request_id=self.request_id,
            error=self.error,
            metrics=self.metrics,
            num_cached_tokens=self.cached_tokens,
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            score=answers[0].score if answers else None,
            others=tuple(map(self._other, answers[1:])),
        )

    def _other(self, answer: Answer) -> RequestOutput:
        """Returns the result for one of the other answers of a beam search, after the best one."""
        text = self._text_of(answer.tokens)
        if text is not None:
            text.finish()
        reason: FinishReason = "stop" if answer.stopped else "length"
        stopped_by = answer.tokens[-1] if answer.tokens[-1] in self.params.stop_token_ids else None
        return RequestOutput(
            prompt_token_ids=tuple(self.tokens[: self.prompt_length]),
            token_ids=answer.tokens,
            text="" if text is None else text.take(),
            finish_reason=reason,
            logprobs=None if self.params.logprobs is None else answer.logprobs,
            stop_reason=stopped_by,
            prompt=self.prompt_text,
            request_id=self.request_id,
            score=answer.score,
        )


class Answer(msgspec.Struct, frozen=True):
    """A finished sequence of a beam search. ``stopped`` is True if an end token ended it."""

    score: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    stopped: bool


class Branch(msgspec.Struct, frozen=True):
    """A continuation in a beam search: ``parent`` with one more token. ``total`` is the sum of log-probabilities."""

    parent: Generation
    token: TokenLogprobs
    total: float


@dataclass(eq=False)
class BeamSearch:
    """A beam search: it decides which sequences of a request continue, and which finished ones are the answers.

    It follows the decisions of transformers 5 (``generate`` with ``num_beams``, ``length_penalty``,
    ``early_stopping``). A search has at most as many sequences as beams; each is a ``Generation`` for the scheduler.
    When all have computed their next token, the search chooses.

    Attributes:
        root: the request that the caller waits for, the first of ``members``.
        new_text: returns a decoder for an answer's text, or None if no text is needed.
        members: the running sequences.
        answers: the finished sequences, best first, at most as many as beams.
        finished: True when the search has ended.
    """

    params: SamplingParams
    end_tokens: frozenset[int]
    max_tokens: int
    vocab_size: int
    new_text: Callable[[], OutputText | None] = lambda: None
    members: list[Generation] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def begin(cls, root: Generation, vocab_size: int, new_text: Callable[[], OutputText | None] = lambda: None) -> None:
        """Begins a beam search whose first sequence is ``root``.

        Args:
            root: the request that the caller waits for.
            vocab_size: the number of tokens in the vocabulary.
            new_text: returns a decoder for an answer's text, or None if no text is needed.
        """
        root.search = cls(root.params, root.end_tokens, root.max_tokens, vocab_size, new_text, [root])

    def __post_init__(self) -> None:
        self._totals: dict[Generation, float] = {}
        self._found: dict[Generation, Sequence[tuple[int, float]]] = {}  # of members that are one token further

    @property
    def root(self) -> Generation:
        return self.members[0]

    @property
    def candidates(self) -> int:
        """The number of continuations to choose from.

        It is large enough for the search to go on if many of them end the text.
        """
        return max(2, 1 + len(self.end_tokens)) * self.params.num_beams

    @property
    def looked_at(self) -> int:
        """The number of most probable tokens to compute for each sequence: ``candidates``, or the size of the
        vocabulary.
        """
        return min(self.candidates, self.vocab_size)

    @property
    def ready(self) -> bool:
        """True if all sequences have the candidates for their next token, and the search hasn't ended."""
        return not self.finished and all(member in self._found for member in self.members)

    def take(self, member: Generation, top: Sequence[tuple[int, float]]) -> None:
        """Stores the next tokens from which a sequence may continue, as (token, logprob), best first."""
        self._found[member] = top

    def choose(self) -> list[Branch]:
        """Returns the sequences that continue, best first. At the end of the search it returns none and sets
        ``finished``.
        """
        params, beams = self.params, self.params.num_beams
        continuations = [
            (self._totals.get(member, 0.0) + logprob, member, token, logprob)
            for member in self.members
            for token, logprob in self._found[member]
            if logprob > -math.inf  # else its grammar bans it
        ]
        # Sorting keeps the order of equals: the first sequence's first.
        best = sorted(continuations, key=lambda one: -one[0])[: self.candidates]
        length = self.root.output_length + 1
        full = params.early_stopping is True and len(self.answers) == beams
        going = []
        for place, (total, member, token, logprob) in enumerate(best):
            ends = token in self.end_tokens
            if not ends and length < self.max_tokens:
                going.append(Branch(member, self._entry(member, token, logprob), total))
            elif place < beams and not full:
                entry = self._entry(member, token, logprob)
                tokens = (*member.tokens[member.prompt_length :], token)
                score = total / length**params.length_penalty
                self.answers.append(Answer(score, tokens, (*member.token_logprobs, entry), ends))
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[:beams]
        going = going[:beams]
        self._found.clear()
        self.finished = not going or (params.early_stopping is True and len(self.answers) == beams)
        self.finished = self.finished or not self._may_improve(going[0].total, length)
        return [] if self.finished else going

    def forget(self) -> None:
        """Drops the candidates of the current step, because the sequences will be computed again."""
        self._found.clear()

    def advanced(self, member: Generation, branch: Branch) -> None:
        """Extends ``member`` by the token of ``branch``; it must already have the tokens of the branch's parent."""
        self._totals[member] = branch.total
        member.extend(branch.token)

    def _may_improve(self, total: float, length: int) -> bool:
        """Returns True if a running sequence may still become a better answer; see ``SamplingParams.early_stopping``.

        Args:
            total: its sum of log-probabilities.
            length: its number of new tokens.
        """
        params = self.params
        if len(self.answers) < params.num_beams:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = float(total / (self.max_tokens if longest else length) ** params.length_penalty)
        return best > self.answers[-1].score

    def _entry(self, member: Generation, token: int, logprob: float) -> TokenLogprobs:
        return TokenLogprobs(token, logprob, tuple(self._found[member][: self.params.logprobs or 0]))
