from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from enginewright.optimizer.evaluate import evaluate
from enginewright.optimizer.evaluate.choices import (
    Question,
    choice_log_likelihood,
    encode_choices,
    read_questions,
)
from enginewright.optimizer.evaluate.models import BundleModel, OpenOptions
from enginewright.runtime.shared.errors import RequestError

from .conftest import Pair

# f32 logits of two engines, some 1e-6 apart, summed over at most 30 tokens.
TOLERANCE = 1e-4

QUESTIONS: list[dict[str, Any]] = [
    {"prompt": "The sky is", "choices": ["blue", "a rather loud shade", "ß"], "answer": 0},
    {"prompt": "Count: one, two, ", "choices": ["three", "tree"], "answer": 0},
    {"prompt": "Wo ist", "choices": [" Köln", "\tBonn", "Ulm, und wo der Rest?", "x"], "answer": 2},
    {"prompt": "A", "choices": ["b", "cc", "ddd"], "answer": 1, "source": "ignored"},
]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def lm_eval_scores(pair: Pair, entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(sums, sums by bytes), with transformers; what lm-eval's HFLM does for a multiple_choice task."""
    tokenizer, model = AutoTokenizer.from_pretrained(pair.folder), pair.model()
    sums = []
    for choice in entry["choices"]:
        context, continuation = entry["prompt"], choice
        if not (context[-1].isspace() or choice[0].isspace()):
            continuation = " " + choice  # target_delimiter
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, before = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
        answer_ids = whole[len(before) :]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole[:-1]]), use_cache=False).logits[0].double()
        log_probabilities = torch.log_softmax(logits, -1)[-len(answer_ids) :]
        sums.append(float(log_probabilities[torch.arange(len(answer_ids)), answer_ids].sum()))
    return sums, [s / len(c.encode()) for s, c in zip(sums, entry["choices"], strict=True)]


def test_scores_and_accuracy_equal_transformers(pair: Pair, text: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", *(json.dumps(q) for q in QUESTIONS))
    expected = [lm_eval_scores(pair, q) for q in QUESTIONS]
    model = BundleModel(pair.bundle, OpenOptions(threads=1, memory=None))
    try:
        for question, (sums, _) in zip(read_questions(file), expected, strict=True):
            encoded = encode_choices(question, model.tokenizer, 512)
            scores = [choice_log_likelihood(model, choice) for choice in encoded]
            assert scores == pytest.approx(sums, abs=TOLERANCE)
    finally:
        model.close()
    report = evaluate(pair.bundle, text=text, choices=file, against=pair.folder, threads=1)
    assert report.choices is not None
    assert report.comparison is not None
    assert report.comparison.choices == report.choices

    def share(kind: int) -> float:
        best = [max(range(len(e[kind])), key=e[kind].__getitem__) for e in expected]
        return sum(b == q["answer"] for b, q in zip(best, QUESTIONS, strict=True)) / len(QUESTIONS)

    assert (report.choices.acc, report.choices.acc_norm) == (share(0), share(1))
    assert report.choices.questions == len(QUESTIONS)


def test_every_answer_can_be_right_or_wrong(pair: Pair, text: Path, tmp_path: Path) -> None:
    """With the model's own favourites as answers both accuracies are 1, with any others 0."""
    scored = [lm_eval_scores(pair, q) for q in QUESTIONS]
    for kind, name in ((0, "acc"), (1, "acc_norm")):
        best = [max(range(len(e[kind])), key=e[kind].__getitem__) for e in scored]
        for shift, accuracy in ((0, 1.0), (1, 0.0)):
            entries = [q | {"answer": (b + shift) % len(q["choices"])} for q, b in zip(QUESTIONS, best, strict=True)]
            file = write(tmp_path / "q.jsonl", *(json.dumps(e) for e in entries))
            report = evaluate(pair.bundle, text=text, choices=file, threads=1).choices
            assert getattr(report, name) == accuracy


def test_texts_are_joined_as_lm_eval_does() -> None:
    def joined(prompt: str, choice: str) -> tuple[str, str]:
        return Question(prompt, (choice, "other"), 0, "").texts()[0]

    assert joined("The sky is", "blue") == ("The sky is", "The sky is blue")
    assert joined("The sky is ", "blue") == ("The sky is", "The sky is blue")
    assert joined("The sky is \n", "blue") == ("The sky is", "The sky is \nblue")
    assert joined("The sky is", "\nblue") == ("The sky is", "The sky is\nblue")


def test_what_does_not_fit_in_a_window_is_named(bundle_model: BundleModel) -> None:
    question = Question("x" * 20, ("ab", "abcd"), 0, "choices: q.jsonl:7")
    assert [c.own for c in encode_choices(question, bundle_model.tokenizer, 25)] == [3, 5]
    with pytest.raises(RequestError, match=r"q\.jsonl:7: prompt with choices\[1\] has 25 tokens, and a window 24"):
        encode_choices(question, bundle_model.tokenizer, 24)


GOOD = '{"prompt": "a", "choices": ["b", "c"], "answer": 1}'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be an object"),
        ('{"choices": ["b", "c"], "answer": 1}', "prompt is missing"),
        ('{"prompt": "a", "answer": 1}', "choices is missing"),
        ('{"prompt": "a", "choices": ["b", "c"]}', "answer is missing"),
        ('{"prompt": " ", "choices": ["b", "c"], "answer": 1}', "prompt must be"),
        ('{"prompt": 3, "choices": ["b", "c"], "answer": 1}', "prompt must be"),
        ('{"prompt": "a", "choices": "bc", "answer": 1}', "choices must be"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "choices must be"),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', r"choices\[1\] must be"),
        ('{"prompt": "a", "choices": ["b", null], "answer": 0}', r"choices\[1\] must be"),
        ('{"prompt": "a", "choices": ["b", "c", "b"], "answer": 0}', r"choices\[2\] is there twice"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer must be .* from 0 to 1, and is 2"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": -1}', "answer must be"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "answer must be"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": "b"}', "answer must be"),
        ('{"prompt": "a", "choices": ["b", "\\ud800"], "answer": 0}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(line: str, named: str, tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", GOOD, "", line)
    with pytest.raises(RequestError, match=rf"q\.jsonl:3: .*{named}") as caught:
        read_questions(file)
    assert caught.value.hint


def test_blank_lines_and_windows_line_ends_are_no_questions(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(f"{GOOD}\r\n\r\n{GOOD}".encode())
    assert [q.answer for q in read_questions(file)] == [1, 1]
