"""Multiple choice: finds the likeliest of several endings, with the scores of lm-eval.

It follows ``loglikelihood`` requests of a ``multiple_choice`` task without examples in EleutherAI's
lm-evaluation-harness (Biderman et al. 2024, arXiv:2405.14782): lm_eval/api/model.py (``_encode_pair``) and
lm_eval/api/task.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.optimizer.measure.distances import log_likelihood
from enginewright.optimizer.measure.texts import read_text
from enginewright.optimizer.measure.windows import split_prefix
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

from .models import ScoredModel, finite_logits

_HINT = 'A line is an object such as {"prompt": "The sky is", "choices": ["blue", "loud"], "answer": 0}.'
_BUILT_IN_FILE = "choices.jsonl"


@dataclass(frozen=True)
class Question:
    """A question with several choices.

    Attributes:
        prompt: the text before a choice.
        choices: the endings to choose from.
        answer: the index of the right choice.
        where: its file and line.
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int
    where: str

    def texts(self) -> list[tuple[str, str]]:
        """Returns (context, context with choice) for each choice.

        As in lm-eval, a space separates prompt and choice (unless one of them has white space there), and white space
        at the prompt's end belongs to the choice.
        """
        context = self.prompt.rstrip()
        space = self.prompt[len(context) :]
        return [(context, context + (space or ("" if c[0].isspace() else " ")) + c) for c in self.choices]


@dataclass(frozen=True)
class ChoiceReport:
    """The accuracy of a model's answers.

    Attributes:
        source: the file, or BUILT_IN.
        questions: the number of questions.
        acc: the share of right answers if the choice with the largest log-likelihood, summed over its tokens, is the
            answer.
        acc_norm: the same, with the sum divided by the choice's length in bytes of UTF-8.
    """

    source: str
    questions: int
    acc: float
    acc_norm: float


@dataclass(frozen=True)
class EncodedChoice:
    """The tokens of a context and a choice.

    Attributes:
        ids: all token ids.
        own: the number of tokens at the end that belong to the choice.
        bytes: the length of the choice in bytes of UTF-8.
    """

    ids: list[int]
    own: int
    bytes: int


def read_questions(source: str | Path) -> list[Question]:
    """Returns the questions of a JSONL file: on each line an object with prompt, choices and answer; other fields are
    ignored.

    Raises RequestError naming the file, line and field that is wrong.
    """
    lines = read_text(source, "choices", _BUILT_IN_FILE).split("\n")
    return [_question(line, f"choices: {source}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def encode_choices(question: Question, tokenizer: Tokenizer, most_tokens: int) -> list[EncodedChoice]:
    """Returns the tokens of each choice after its context.

    Context and choice are encoded together, and the context alone; the choice's tokens are those after the context's.

    Raises RequestError if a choice has no token of its own, or if context and choice have more than ``most_tokens``.
    """
    encoded = []
    for i, (context, whole) in enumerate(question.texts()):
        prefix, ids = split_prefix(tokenizer, whole)
        count = len(ids) - len(tokenizer.encode(context, add_special_tokens=False))
        if count < 1:
            raise RequestError(
                f"{question.where}: choices[{i}]: it has no token of its own behind the prompt",
                hint="Begin the choice with a space, or move the end of the prompt into it.",
            )
        ids = [*prefix, *ids]
        if len(ids) > most_tokens:
            raise RequestError(
                f"{question.where}: prompt with choices[{i}] has {len(ids)} tokens, and a window {most_tokens}",
                hint="Shorten the prompt, or raise the window up to the model's context.",
            )
        encoded.append(EncodedChoice(ids, count, len(question.choices[i].encode())))
    return encoded


def answer_questions(
    model: ScoredModel,
    source: str,
    questions: Sequence[tuple[Question, list[EncodedChoice]]],
    on_answer: Callable[[], None],
) -> ChoiceReport:
    """Measures the accuracy of a model. If choices are equally likely, the first one counts as the answer.

    Args:
        model: the model.
        source: the name of the file with the questions, for the report.
        questions: the questions with their encoded choices.
        on_answer: called after each question.
    """
    right = right_norm = 0
    for question, encoded in questions:
        sums = np.array([choice_log_likelihood(model, choice) for choice in encoded])
        right += int(sums.argmax()) == question.answer
        right_norm += int((sums / [choice.bytes for choice in encoded]).argmax()) == question.answer
        on_answer()
    return ChoiceReport(source, len(questions), right / len(questions), right_norm / len(questions))


def choice_log_likelihood(model: ScoredModel, choice: EncodedChoice) -> float:
    """Sums the log-likelihoods of the choice's tokens given the context, in nats."""
    logits = finite_logits(model, choice.ids[:-1])  # [S, V]; row i is of token i + 1
    return log_likelihood(logits[-choice.own :], choice.ids[-choice.own :])


def _question(line: str, where: str) -> Question:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where}: not JSON: {e}", hint=_HINT) from e
    if not isinstance(entry, dict):
        raise RequestError(f"{where}: must be an object", hint=_HINT)
    for field in ("prompt", "choices", "answer"):
        if field not in entry:
            raise RequestError(f"{where}: {field} is missing", hint=_HINT)
    prompt, choices, answer = entry["prompt"], entry["choices"], entry["answer"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError(f"{where}: prompt must be a text that is not empty", hint=_HINT)
    if not isinstance(choices, list) or len(choices) < 2:
        raise RequestError(f"{where}: choices must be a list of at least two texts", hint=_HINT)
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise RequestError(f"{where}: choices[{i}] must be a text that is not empty", hint=_HINT)
        if choice in choices[:i]:
            raise RequestError(f"{where}: choices[{i}] is there twice", hint=_HINT)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise RequestError(
            f"{where}: answer must be the index of a choice, from 0 to {len(choices) - 1}, and is {answer!r}",
            hint=_HINT,
        )
    for text in (prompt, *choices):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise RequestError(f"{where}: half of a surrogate pair isn't text", hint="Escape characters in pairs.")
    return Question(prompt, tuple(choices), answer, where)
