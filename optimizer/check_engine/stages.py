"""The stages of a check: build, reference, open, prompt, decode, graph. They run in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from enginewright.optimizer.build_target import build_target
from enginewright.plugins.doctor.engine import Runs
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import runs_here, target_groups
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import EnginewrightError, VerificationError, shown
from enginewright.runtime.shared.targets import part

from .engines import REFERENCE, Task

STAGES = ("build", "reference", "open", "prompt", "decode", "graph")
"""The stages, in order."""

PROMPTS = (5, 29)
"""The tokens of each prompt. The answer to the second one extends into another block of 32 tokens."""

TOKENS = 8
"""The tokens of each answer."""

MOST_KL = 0.05
"""The largest allowed KL divergence from the cpu target's probabilities, in nats, as the mean of all positions.

The tiny model in bf16 gave 7e-5 in Triton's interpreter. The limit leaves room for the cpu target's 8-bit activations,
which it uses with integer weights.
"""

_CONTEXT, _REQUESTS = 64, 4

Tell = Callable[[dict[str, Any]], None]
"""A function that gets ``{"begins": stage}`` at the begin of a stage, and its result at the end."""

T = TypeVar("T")


class _SkippedError(Exception):
    """A stage doesn't apply; the text has the reason."""


class _EndedError(Exception):
    """A stage failed whose result the later stages need."""


@dataclass
class _Reference:
    """The cpu target's results.

    Attributes:
        prompts: the token ids of each prompt.
        tokens: the answer to each prompt.
        logits: the logits after each token of each prompt with its answer, [S, V].
        apart: the largest difference of the target's logits from these, once it is known.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[FloatArray]
    apart: float = field(default=0.0)


class _Served:
    """A target that `LLM` runs. Raises the errors of `LLM`."""

    def __init__(self, bundle: Bundle, target: str) -> None:
        groups = target_groups(bundle, target, context := min(_CONTEXT, bundle.model.context_length))
        blocks = sum(cache_block_bytes(group) * -(-context // group.block_size) for group in groups)
        self._llm = LLM(
            bundle.path,
            target=target,
            trust="code",
            context=context,
            max_requests=_REQUESTS,
            memory=2 * (_REQUESTS + 1) * blocks,
        )

    def logits(self, ids: Sequence[int]) -> FloatArray:
        return self._llm.logits(ids)

    def tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return [list(one.token_ids) for one in self._llm.generate(list(prompts), params, progress=False)]

    def info(self) -> dict[str, Any]:
        return dict(self._llm.info()["executor"])

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()


def run_stages(task: Task, tell: Tell) -> None:
    """Runs all stages of a check, and passes the result of each to ``tell``. An error of a stage is its result."""
    with suppress(_EndedError):
        _run(task, tell)


def _run(task: Task, tell: Tell) -> None:
    bundle = _stage("build", lambda: _build(task), tell, needed=True)
    reference = _stage("reference", lambda: _reference(bundle), tell, needed=True)
    opened = _stage("open", lambda: (_open(bundle, task.target), {}), tell, needed=True)
    with opened as target:
        _stage("prompt", lambda: (None, _prompt(target, reference)), tell)
        _stage("decode", lambda: (None, _decode(target, reference)), tell)
        _stage("graph", lambda: (None, _graph(target, reference)), tell)


def _open(bundle: Bundle, target: str) -> AbstractContextManager[Runs]:
    if runs_here(target):
        return _Served(bundle, target)
    module = part(target, "compile.check")
    assert module is not None  # engines that are declared have it, or are served
    return nullcontext(module.Opened(bundle, target, _CONTEXT, TOKENS))


def _stage(name: str, work: Callable[[], tuple[T, dict[str, Any]]], tell: Tell, *, needed: bool = False) -> T:
    """Runs a stage: ``work`` returns the stage's value, which is returned, and facts, which ``tell`` gets.

    Raises _EndedError if a ``needed`` stage fails.
    """
    tell({"begins": name})
    start, result = time.perf_counter(), None
    outcome: dict[str, Any] = {"status": "passed"}
    try:
        result, facts = work()
        outcome |= facts
    except _SkippedError as e:
        outcome = {"status": "skipped", "reason": str(e)}
    except Exception as e:  # noqa: BLE001  # of libraries that may raise anything: a report has it
        hint = e.hint if isinstance(e, EnginewrightError) else None
        message = e.message if isinstance(e, EnginewrightError) else shown(e, 2000)
        outcome = {"status": "failed", "error": f"{type(e).__name__}: {message}"} | ({"hint": hint} if hint else {})
    tell({"stage": name, "seconds": round(time.perf_counter() - start, 3), **outcome})
    if result is None and needed:
        raise _EndedError
    return result  # type: ignore[return-value]  # None where nobody needs it


def _build(task: Task) -> tuple[Bundle, dict[str, Any]]:
    """Exports the tiny model, if no bundle is given, and builds the target, if it isn't ready."""
    path = Path(task.bundle)
    if not task.bundle:
        from .tiny_model import export_tiny

        path = export_tiny(Path(task.folder), task.target, task.gpus)
    bundle = Bundle.open(path, "code")
    if bundle.targets[task.target].state == "ready":
        return bundle, {}
    report = build_target(path, task.target, trust="code").to_json()
    facts: dict[str, Any] = {name: report[name] for name in ("engines", "scratch", "copies") if name in report}
    return Bundle.open(path, "code"), facts


def _reference(bundle: Bundle) -> tuple[_Reference, dict[str, Any]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, bundle.model.vocab_size, n).tolist() for n in PROMPTS]
    with _Served(bundle, REFERENCE) as target:
        tokens = target.tokens(prompts)
        logits = [target.logits(prompt + answer) for prompt, answer in zip(prompts, tokens, strict=True)]
    return _Reference(prompts, tokens, logits), {"tokens": tokens}


def _prompt(target: Runs, reference: _Reference) -> dict[str, Any]:
    """Compares the logits after every token. Raises VerificationError."""
    divergences = []
    for prompt, answer, expected in zip(reference.prompts, reference.tokens, reference.logits, strict=True):
        logits = target.logits(prompt + answer)
        if not np.isfinite(logits).all():
            raise VerificationError("the target's logits are NaN or infinite")
        reference.apart = max(reference.apart, float(np.abs(logits - expected).max()))
        divergences.append(_divergence(expected, logits))
    kl = float(np.concatenate(divergences).mean())
    if not kl <= MOST_KL:
        reference.apart = 0.0  # then the target's own error mustn't excuse other tokens
        raise VerificationError(
            f"the logits differ from the {REFERENCE} target's: a KL of {kl:.3g} nats a token, more than {MOST_KL}"
        )
    return {"kl": kl, "largest_difference": reference.apart}


def _divergence(expected: FloatArray, logits: FloatArray) -> FloatArray:
    """Returns KL(expected || logits) of each row of [S, V], in nats."""
    greatest = (each - each.max(-1, keepdims=True) for each in (expected, logits))
    p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in greatest)
    return np.asarray((np.exp(p) * (p - q)).sum(-1), np.float32)


def _decode(target: Runs, reference: _Reference) -> dict[str, Any]:
    """Compares the answers to all prompts. Raises VerificationError.

    After a token that the cpu target finds nearly as likely as its own, the rest of that answer isn't compared.
    """
    answers, compared = target.tokens(reference.prompts), 0
    margin = 2 * reference.apart  # each of the two logits may be off by that
    for number, (answer, expected) in enumerate(zip(answers, reference.tokens, strict=True)):
        if len(answer) != len(expected):
            raise VerificationError(f"answer {number} has {len(answer)} tokens, and must have {len(expected)}")
        for i, (drawn, token) in enumerate(zip(answer, expected, strict=True)):
            if drawn != token:
                row = reference.logits[number][len(reference.prompts[number]) - 1 + i]
                gap = float(row[token] - row[drawn])
                if gap > margin:
                    raise VerificationError(
                        f"token {i} of answer {number} is {drawn} and must be {token}; the {REFERENCE} target's logits "
                        f"of the two differ by {gap:.3g}, more than rounding explains ({margin:.3g})"
                    )
                break
            compared += 1
    return {"tokens": answers, "compared": f"{compared} of {sum(map(len, answers))}", "runs_with": target.info()}


def _graph(target: Runs, reference: _Reference) -> dict[str, Any]:
    """Compares the answers once more, and expects that steps of known sizes were replayed from a CUDA graph."""
    facts = _decode(target, reference)
    notes = facts["runs_with"]
    if reason := notes.get("not_captured"):
        raise VerificationError(f"a step isn't captured as a CUDA graph: {reason}")
    if not notes.get("graph_launches"):
        raise _SkippedError("the tokens are right, and this engine made no CUDA graphs that Enginewright counts")
    return facts
