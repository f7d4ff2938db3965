"""The answer to a request that runs alone: no blocks, no steps, no scheduler, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from .grammars import Form
from .model import ALL, BITS, END, POISON, RECURRENT, WEIGHTS, Distribution, Draw, Model, first_cell, mix, next_state
from .scenario import Ask


@dataclass
class Answer:
    """The result of a request alone.

    Attributes:
        tokens, logprobs: new tokens, and the log-probability of each.
        reason: "stop", "length" or "error".
        score: of a beam search's answer.
        prompt: of a request that wants something of its prompt: the value, or log-probability, of each token.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: str = "length"
    score: float = 0.0
    prompt: tuple[float, ...] = ()


class Context:
    """One sequence's own cells, in lists. ``windows``: of each cache group, 0 for none; RECURRENT for states."""

    def __init__(self, model: Model, windows: Sequence[int]) -> None:
        self.model, self.windows = model, tuple(windows)
        self.tokens: list[int] = []
        self._first: list[list[int]] = [[] for _ in windows]  # weighed
        self._second: list[list[int]] = [[] for _ in windows]
        self._sums = [[0, 0] for _ in windows]
        self.poisoned = False

    def copy(self) -> Context:
        """Another sequence with the same tokens."""
        other = Context(self.model, self.windows)
        other.tokens, other.poisoned = self.tokens[:], self.poisoned
        other._first, other._second = [one[:] for one in self._first], [one[:] for one in self._second]
        other._sums = [one[:] for one in self._sums]
        return other

    def push(self, token: int) -> int:
        """Computes one token more; returns the value of its row."""
        position = len(self.tokens)
        self.tokens.append(token)
        self.poisoned |= token == POISON
        weight = WEIGHTS[position]
        seen = []
        for group, window in enumerate(self.windows):
            first, second, sums = self._first[group], self._second[group], self._sums[group]
            if window == RECURRENT:
                sums[0] = next_state(sums[0], token, position, group)
                seen.append(sums[0])
                continue
            sums[0] += first_cell(token, position, group) * weight
            first.append(sums[0])
            sums[1] += mix(sums[0] - (first[position - window] if window and position >= window else 0)) * weight
            second.append(sums[1])
            seen.append((sums[1] - (second[position - window] if window and position >= window else 0)) & BITS)
        return self.model.value(seen)


def answer(model: Model, windows: Sequence[int], ask: Ask, sample: int, forms: Callable[[str], Form]) -> Answer:
    """Gives what sample number ``sample`` of a request is."""
    context = Context(model, windows)
    if ask.kind in ("score", "hidden"):
        values = [context.push(token) >> 40 for token in ask.prompt]
        return Answer(prompt=tuple(map(float, values)), reason="error" if context.poisoned else "length")
    scored = []
    value = 0
    for at, token in enumerate(ask.prompt):
        value = context.push(token)
        if ask.prompt_logprobs and at + 1 < len(ask.prompt):
            order = model.distribution(value, Draw(token))
            scored.append(order.logprob(ask.prompt[at + 1]))
    if context.poisoned:
        return Answer(reason="error")
    if ask.beams > 1:
        return _beams(context, value, ask, forms)
    sampled = _sampled(context, value, ask, sample, forms)
    sampled.prompt = tuple(scored)
    return sampled


def _sampled(context: Context, value: int, ask: Ask, sample: int, forms: Callable[[str], Form]) -> Answer:
    form = forms(ask.form) if ask.form else None
    tokens: list[int] = []
    logprobs: list[float] = []
    ends = {END} if not ask.ignore_eos or form is not None else set[int]()
    while True:
        draw = Draw(
            context.tokens[-1],
            ask.temperature,
            ask.seed_of(sample),
            len(tokens),
            tuple(sorted({*ask.prompt, *tokens})) if ask.repetition else (),
            tuple(sorted((token, tokens.count(token)) for token in set(tokens))) if ask.frequency else (),
        )
        order = context.model.distribution(value, draw)
        token = order.best(_rules(ask, tokens, ends, form))
        if token < 0:
            return Answer(tuple(tokens), tuple(logprobs), "error")
        tokens.append(token)
        logprobs.append(order.logprob(token))
        if token in ends:
            return Answer(tuple(tokens), tuple(logprobs), "stop")
        if len(tokens) == ask.new_tokens:
            return Answer(tuple(tokens), tuple(logprobs), "length")
        if form is not None:
            form = form.after(token)
        value = context.push(token)


def _rules(ask: Ask, tokens: Sequence[int], ends: set[int], form: Form | None) -> Collection[int] | None:
    """The tokens that may come; None for all."""
    banned = set(ends) if len(tokens) < ask.min_tokens else set[int]()
    whole = [*ask.prompt, *tokens]
    for word in ask.bad_words:
        if len(word) == 1 or tuple(whole[-len(word) + 1 :]) == word[:-1]:
            banned.add(word[-1])
    if not banned and not ask.allowed and form is None:
        return None
    allowed = set(ask.allowed) or ALL
    return (allowed if form is None else allowed.intersection(form.allowed())) - banned


@dataclass
class _Beam:
    context: Context
    value: int
    form: Form | None
    total: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def _beams(context: Context, value: int, ask: Ask, forms: Callable[[str], Form]) -> Answer:
    """The best answer of a beam search, as ``SamplingParams`` and transformers define it."""
    form = forms(ask.form) if ask.form else None
    ends = {END} if not ask.ignore_eos or form is not None else set[int]()
    beams = [_Beam(context, value, form)]
    answers: list[Answer] = []
    count = max(2, 1 + len(ends)) * ask.beams
    while True:
        candidates = []
        for beam in beams:
            order: Distribution = context.model.distribution(beam.value, Draw(beam.context.tokens[-1]))
            may = None if beam.form is None else beam.form.allowed()
            for token, logprob in order.top(count, may):
                if logprob > -np.inf:
                    candidates.append((beam.total + logprob, beam, token, logprob))
        candidates.sort(key=lambda one: -one[0])
        length = len(beams[0].tokens) + 1
        full = ask.early_stopping is True and len(answers) == ask.beams
        going = []
        for place, (total, beam, token, logprob) in enumerate(candidates[:count]):
            if token not in ends and length < ask.new_tokens:
                going.append((total, beam, token, logprob))
            elif place < ask.beams and not full:
                score = total / length**ask.length_penalty
                ended = "stop" if token in ends else "length"
                answers.append(Answer((*beam.tokens, token), (*beam.logprobs, logprob), ended, score))
        answers = sorted(answers, key=lambda one: -one.score)[: ask.beams]
        going = going[: ask.beams]
        if not going or (ask.early_stopping is True and len(answers) == ask.beams):
            return answers[0] if answers else Answer(reason="error")
        if len(answers) == ask.beams:
            most = ask.new_tokens if ask.early_stopping == "never" and ask.length_penalty > 0 else length
            if going[0][0] / most**ask.length_penalty <= answers[-1].score:
                return answers[0]
        following = []
        for total, beam, token, logprob in going:
            other = beam.context.copy()
            after = None if beam.form is None else beam.form.after(token)
            value = other.push(token)
            following.append(_Beam(other, value, after, total, [*beam.tokens, token], [*beam.logprobs, logprob]))
        beams = following
