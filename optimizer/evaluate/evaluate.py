"""``evaluate``: measures a bundle on a text and on questions, alone or against another model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.optimizer.measure.texts import BUILT_IN, EVALUATION_TEXT, read_text
from enginewright.optimizer.measure.windows import Windows, plan_windows, split_prefix, spread
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .choices import ChoiceReport, EncodedChoice, Question, answer_questions, encode_choices, read_questions
from .models import BundleModel, OpenOptions, ScoredModel, check_same_tokens, finite_logits, open_reference


@dataclass(frozen=True)
class TextReport:
    """The scores of a bundle's predictions of a text.

    Attributes:
        source: the file, or BUILT_IN.
        tokens, scored: tokens of the text, without the prefix that the model expects, and the number of them scored.
        window, stride, windows: tokens of a window, prefix included; tokens between two starts; windows evaluated.
        nll: mean negative log-likelihood per scored token, in nats.
        perplexity: exp(nll).
        windows_in_text: windows of the whole text.
    """

    source: str
    tokens: int
    scored: int
    window: int
    stride: int
    windows: int
    nll: float
    perplexity: float
    windows_in_text: int = 0


@dataclass(frozen=True)
class ComparisonReport:
    """The bundle's difference from a reference, over the text's scored tokens.

    Attributes:
        against: the reference, as the user named it.
        nll, perplexity: those of the reference.
        kl_mean, kl_max: KL(reference || bundle) per token in nats.
        top1_agreement: share of the tokens for which both predict the same token as the likeliest.
        max_logit_difference: largest absolute difference of two logits.
        choices: the reference's answers; None without questions.
    """

    against: str
    nll: float
    perplexity: float
    kl_mean: float
    kl_max: float
    top1_agreement: float
    max_logit_difference: float
    choices: ChoiceReport | None


@dataclass(frozen=True)
class EvaluationReport:
    """The result of ``evaluate``.

    Attributes:
        bundle: the bundle's path.
        model: the model's name.
        text: the scores over the text.
        comparison: the difference from the reference; None without one.
        choices: the answers to questions; None without questions.
        seconds: the duration of the evaluation.
    """

    bundle: str
    model: str
    text: TextReport
    comparison: ComparisonReport | None
    choices: ChoiceReport | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        return asdict(self)


def evaluate(
    bundle: str | Path,
    *,
    text: str | Path = BUILT_IN,
    against: str | Path | None = None,
    choices: str | Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    windows: int | None = None,
    target: str | None = None,
    provider: str | None = None,
    context: int | None = None,
    trust: str | None = None,
    threads: int = 0,
    ranks: int | None = None,
    partition: str | None = None,
    memory: str | int | None = None,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Evaluates a bundle on a text. The logits of one window (of both models) are in memory at a time.

    Args:
        bundle: the bundle, which the runtime runs without torch.
        text: a UTF-8 file; BUILT_IN is the package's text.
        against: a bundle to compare with, or a Hugging Face directory, GGUF file or Hub id; the last three need the
            export extra.
        choices: a JSONL file of questions; BUILT_IN is the package's questions.
        window, stride: see ``windows.plan_windows``.
        windows: maximum number of windows, spread over the text; None for all.
        target, provider, context, trust, ranks, partition: as for LLM, for the evaluated bundle.
        threads, memory: as for LLM, for each model.
        progress: called after each window and question.

    Raises:
        RequestError: a text, question or value is invalid, or the models share no vocabulary or tokenizer.
        BundleError, SourceError, UnsupportedModelError, CapacityError, MissingDependencyError: see these classes.
        EnginewrightError: a model's logits are not finite.
    """
    start = time.perf_counter()
    on_progress = progress or silent
    written = read_text(text, "text", EVALUATION_TEXT)
    questions = [] if choices is None else read_questions(choices)
    with ExitStack() as stack:
        model = stack.enter_context(
            closing(
                BundleModel(bundle, OpenOptions(threads, memory, target, provider, context, trust, ranks, partition))
            )
        )
        reference: ScoredModel | None = None
        if against is not None:
            on_progress(ProgressEvent("load", 0, 1, str(against)))
            reference = stack.enter_context(
                closing(open_reference(against, trust=trust, threads=threads, memory=memory, progress=on_progress))
            )
            on_progress(ProgressEvent("load", 1, 1, reference.name))
            choice_texts = [whole for question in questions for _, whole in question.texts()]
            check_same_tokens(model, reference, [written, *choice_texts])
        prefix, ids = split_prefix(model.tokenizer, written)
        if len(ids) < 2:
            raise RequestError(
                f"text: {text} is too short: it has {len(ids)} token", hint="Pass a text of two tokens or more."
            )
        shared_context = min(m.context_length for m in (model, reference) if m is not None)
        cut = plan_windows(window, stride, shared_context, prefix)
        most, available = cut.size + len(prefix), cut.count(len(ids))
        chosen = spread(available if windows is None else windows, available)
        encoded = [(q, encode_choices(q, model.tokenizer, most)) for q in questions]

        likelihood, divergence = _read(model, reference, ids, cut, chosen, on_progress)
        answers = _answers(model, choices, encoded, on_progress)
        comparison = None
        if reference is not None:
            comparison = _comparison(reference, divergence, _answers(reference, choices, encoded, on_progress))
        return EvaluationReport(
            bundle=str(bundle),
            model=model.name,
            text=TextReport(
                source=str(text),
                tokens=len(ids),
                scored=likelihood.tokens,
                window=most,
                stride=cut.stride,
                windows=len(chosen),
                nll=likelihood.nll,
                perplexity=likelihood.perplexity,
                windows_in_text=available,
            ),
            comparison=comparison,
            choices=answers,
            seconds=round(time.perf_counter() - start, 3),
        )


def _read(
    model: ScoredModel,
    reference: ScoredModel | None,
    ids: Sequence[int],
    windows: Windows,
    chosen: Sequence[int],
    on_progress: Progress,
) -> tuple[Likelihood, Divergence]:
    """Reads windows of a text with both models, one window at a time. Without a reference the divergence stays empty.

    Args:
        model, reference: the models; None for no reference.
        ids: the tokens of the text.
        windows: the division of the text.
        chosen: the indices of the windows to read.
        on_progress: called after each window.
    """
    likelihood = Likelihood()
    divergence = Divergence(likelihood, Likelihood())
    count, every = len(chosen), list(windows.steps(ids))
    on_progress(ProgressEvent("text", 0, count, model.path))
    for done, (tokens, rows, targets) in enumerate((every[i] for i in chosen), 1):
        logits = finite_logits(model, tokens)[rows]  # [n, V]
        if reference is None:
            likelihood.add(logits, targets)
        else:
            divergence.add(logits, finite_logits(reference, tokens)[rows], targets)
        on_progress(ProgressEvent("text", done, count, f"perplexity {likelihood.perplexity:.3f}"))
    return likelihood, divergence


def _answers(
    model: ScoredModel,
    source: str | Path | None,
    encoded: list[tuple[Question, list[EncodedChoice]]],
    on_progress: Progress,
) -> ChoiceReport | None:
    if source is None:
        return None
    done = 0

    def on_answer() -> None:
        nonlocal done
        done += 1
        on_progress(ProgressEvent(f"choices of {model.name}", done, len(encoded), ""))

    return answer_questions(model, str(source), encoded, on_answer)


def _comparison(reference: ScoredModel, divergence: Divergence, answers: ChoiceReport | None) -> ComparisonReport:
    return ComparisonReport(
        against=reference.path,
        nll=divergence.reference.nll,
        perplexity=divergence.reference.perplexity,
        kl_mean=divergence.kl_mean,
        kl_max=divergence.kl_max,
        top1_agreement=divergence.top1_agreement,
        max_logit_difference=divergence.logit_difference,
        choices=answers,
    )
