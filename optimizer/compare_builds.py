"""``optimize verify --against``: compares a bundle with an older build or with its source, within a budget.

Each property that may have become worse is a check, with the measured value and the budget's limit. Predictions are
compared on a suite of prompts, as in `optimize eval`; speed is measured in pairs, as in `optimize bench`; files and
weights are compared as in `optimize diff`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

import numpy as np

from enginewright.optimizer.build_budget import (
    Budget,
    Check,
    default_budget,
    read_budget,
    shown,
    within,
)
from enginewright.optimizer.build_speed import Settled, SpeedPairs, measure_speed, speed_checks
from enginewright.optimizer.capture.check_source import check_source
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.diff_bundles import BundleDiff, diff_bundles
from enginewright.optimizer.evaluate.models import BundleModel, OpenOptions, ScoredModel, finite_logits
from enginewright.optimizer.evaluate.texts import evaluate_texts
from enginewright.optimizer.measure.distances import Divergence, Likelihood
from enginewright.optimizer.measure.text_metrics import METRICS
from enginewright.optimizer.measure.texts import BUILT_IN, SuitePrompt, read_prompts
from enginewright.optimizer.plan.planner import Memory
from enginewright.optimizer.shared.files import write_output
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import CODE, Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.executors.open import choose_target, context_of, target_groups
from enginewright.runtime.shared.contracts import ModelInfo, PooledTask
from enginewright.runtime.shared.errors import EnginewrightError, MissingDependencyError, RequestError
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.progress import Progress, ProgressEvent, loading, silent
from enginewright.runtime.shared.targets import MEASURED, part
from enginewright.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from enginewright.optimizer.bisect.layer_divergence import LayerDivergence

ANSWER_TOKENS = 32
"""The number of tokens after each prompt that are compared too."""

LAYER_TOKENS = 64
"""The number of tokens, from the first prompts, on which layers are compared.

Each run computes them for every layer.
"""

MEMORY_CONTEXT = 4096
"""The longest request whose memory is counted, in tokens."""

_MOST_FILES, _RANDOM_PROMPTS, _RANDOM_TOKENS, _MOST_TEXTS = 20, 12, 24, 64


@dataclass(frozen=True)
class ChangedPrompt:
    """A prompt with tokens that the two models predict differently.

    Attributes:
        where: file and line of the prompt in the suite.
        changed: the number of positions, of ``tokens``, at which the two likeliest tokens differ.
        first: the first such position in prompt and answer, and the two likeliest tokens there, as text or ids.
        kl_max: the largest KL divergence of a token, in nats.
    """

    where: str
    tokens: int
    changed: int
    first: int
    expected: str
    found: str
    kl_max: float


@dataclass(frozen=True)
class BuildComparison:
    """The result of ``compare_builds``.

    Attributes:
        bundle, against: the names of both models, as the caller passed them.
        kind: the kind of the model that the bundle is compared with.
        target: the target that runs both models.
        budget: the limits of the checks.
        prompts, tokens: sizes of the suite, tokens of the answers included; 0 for bundles with equal files.
        checks: all checks, in the order in which they are shown; for bundles with equal files ``bytes`` alone.
        layers: KL of each layer's input, then of the logits; empty if these can't be compared.
        changed: prompts whose answers differ.
        files: differences of the files, as `optimize diff` lists them with the older bundle as A.
        speed: paired speeds; None if they weren't measured.
        seconds: duration of the comparison.
        task: the task of models that compute whole texts, whose texts are counted as prompts; None for others.
    """

    bundle: str
    against: str
    kind: Literal["bundle", "source"]
    target: str
    budget: Budget
    prompts: int = 0
    tokens: int = 0
    checks: tuple[Check, ...] = ()
    layers: tuple[LayerDivergence, ...] = ()
    changed: tuple[ChangedPrompt, ...] = ()
    files: tuple[str, ...] = ()
    speed: SpeedPairs | None = None
    seconds: float = 0.0
    task: PooledTask | None = None

    @property
    def equal_files(self) -> bool:
        """Returns True if the files of both bundles are equal, without report/. No other comparison was made then."""
        return not self.prompts

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that are over the budget."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    @property
    def inconclusive(self) -> tuple[Check, ...]:
        """The checks without a result, because a busy machine made the times too noisy."""
        return tuple(check for check in self.checks if check.outcome == "inconclusive")

    @property
    def within_budget(self) -> bool:
        """True if no check failed."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``; an infinite number is null."""
        plain = {"within_budget": self.within_budget} | asdict(self) | {"budget": self.budget.model_dump()}
        document: dict[str, Any] = _finite(plain)
        return document

    def to_junit(self) -> str:
        """Returns JUnit's XML: a suite with a case for each check. The machine's times are only properties."""
        cases = self.checks
        skipped = sum(check.outcome in ("not compared", "inconclusive") for check in cases)
        counts = {"tests": str(len(cases)), "failures": str(len(self.failed)), "errors": "0", "skipped": str(skipped)}
        root = ElementTree.Element("testsuites", {"name": "optimize verify"} | counts)
        suite = ElementTree.SubElement(
            root, "testsuite", {"name": "optimize verify", "time": f"{self.seconds}"} | counts
        )
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in (
            ("bundle", self.bundle),
            ("against", self.against),
            ("target", self.target),
            *((f"budget.{key}", str(value).lower()) for key, value in self.budget),
        ):
            ElementTree.SubElement(properties, "property", {"name": name, "value": _xml(value)})
        for check in cases:
            case = ElementTree.SubElement(suite, "testcase", {"classname": "optimize.verify", "name": check.name})
            message = _xml(" ".join(filter(None, (shown(check), check.detail))))
            if check.outcome == "failed":
                ElementTree.SubElement(case, "failure", {"message": message, "type": "OverBudget"}).text = self._why(
                    check
                )
            elif check.outcome == "not compared":
                ElementTree.SubElement(case, "skipped", {"message": message})
            elif check.outcome == "inconclusive":  # JUnit has no word for it
                ElementTree.SubElement(case, "skipped", {"message": f"inconclusive: {message}"})
            else:
                ElementTree.SubElement(case, "system-out").text = message
        ElementTree.indent(root)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'

    def _why(self, check: Check) -> str:
        """Returns the facts that help to explain a failed check, one per line."""
        lines = [f"{check.name}: {shown(check)}", check.detail]
        if check.name.startswith(("kl", "tokens_changed")):
            lines += [f"{one.where}: token {one.first}: {one.expected} became {one.found}" for one in self.changed]
        lines += self.files
        return _xml("\n".join(filter(None, lines)))


def write_junit(found: BuildComparison, path: Path) -> None:
    """Writes ``to_junit`` to a file, completely or not at all. Raises RequestError."""
    write_output(path, found.to_junit(), RequestError)


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON can't express by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _xml(text: str) -> str:
    """Returns the text without characters that XML 1.0 can't represent."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "�", text)


Measure = Callable[[Bundle, Bundle, str, int, Settled, Progress], SpeedPairs | None]


def compare_builds(
    bundle: str | Path,
    against: str | Path,
    *,
    budget: str | Path | Budget | None = None,
    prompts: str | Path = BUILT_IN,
    target: str | None = None,
    provider: str | None = None,
    trust: str | None = None,
    threads: int = 0,
    measure: Measure | None = None,
    progress: Progress = silent,
) -> BuildComparison:
    """Compares a bundle with an older build of it, or with its source, and checks the differences against a budget.

    Two bundles with the same files are within every budget; neither is run. Otherwise prompts are tokenized as
    ``against`` does. Both models read these and the greedy answers of ``against`` (for a source, the bundle's answers),
    so that one changed token doesn't change all later tokens. A model that computes whole texts is compared by
    ``evaluate_texts``, on the texts of the file of prompts.

    Args:
        bundle: the new build.
        against: a bundle, or a Hugging Face directory, GGUF file or Hub id; the last three need the export extra.
        budget: a TOML file or a Budget; None for ``default_budget``.
        prompts: a file, see ``read_prompts``; BUILT_IN for the package's prompts.
        target: the target of both bundles; None for the first that runs here.
        provider, trust, threads: as for ``LLM``, for both.
        measure: measures the speed of two bundles, or returns None if that is impossible; None for ``measure_speed``.
        progress: called with the stages "load", "prompts", "layers", "speed", "compare".

    Raises:
        RequestError: the budget or the prompts are wrong.
        BundleError, TrustError, SourceError, UnsupportedModelError, CapacityError, MissingDependencyError: see these
            classes.
        EnginewrightError: the logits of ``against`` are not finite.
    """
    start = time.perf_counter()
    new = Bundle.open(bundle, trust)
    name = choose_target(new, target)
    place = find_source(against, option="against", progress=progress)
    older: Bundle | None = None
    if (place / MANIFEST_PATH).is_file():
        older = Bundle.open(place, trust if trust == CODE else None)
        choose_target(older, name)
    else:
        check_source(place)
    default = default_budget(new, source=older is None)
    if isinstance(budget, Budget):
        allowed = budget
    else:
        allowed = default if budget is None else read_budget(budget, default)
    suite_prompts = read_prompts(prompts)
    diff = None if older is None else diff_bundles(place, bundle, progress=progress)

    comparison = BuildComparison(
        str(bundle), str(against), "source" if older is None else "bundle", target=name, budget=allowed
    )
    if diff is not None and diff.equal:
        equal = Check("bytes", "passed", "equal", "equal", "all files are equal")
        return replace(comparison, checks=(equal,), seconds=_since(start))
    options = OpenOptions(threads, target=name, provider=provider, trust=trust)
    if new.model.pooling is not None:
        return replace(
            _compare_texts(comparison, new, older, suite_prompts, prompts, options, progress),
            files=() if diff is None else _lines_of(diff)[:_MOST_FILES],
            seconds=_since(start),
        )
    checks: list[Check] = []
    with ExitStack() as stack:
        progress(ProgressEvent("load", 0, 2, str(bundle)))
        model = stack.enter_context(closing(BundleModel(bundle, options)))
        progress(ProgressEvent("load", 1, 2, str(against)))
        reference: ScoredModel
        if older is not None:
            other = stack.enter_context(closing(BundleModel(place, replace(options, trust=older.trust))))
            reference, files, info, answering = other, older.tokenizer_files(), older.model, other
        else:
            loading(progress)
            with MissingDependencyError.of_export("against: a source model"):
                from enginewright.optimizer.evaluate.source_model import (
                    SourceModel,  # torch and transformers, which bundles do without
                )
            source_model = stack.enter_context(closing(SourceModel(place, threads=threads)))
            reference, files, info, answering = (
                source_model,
                source_model.files or TokenizerFiles(),
                source_model.info,
                model,
            )
        progress(ProgressEvent("load", 2, 2, str(against)))
        suite = _tokenized(
            suite_prompts, str(prompts), reference, files, min(model.context_length, reference.context_length)
        )
        read = _read_suite(model, reference, answering, suite, progress)
    checks += _of_suite(read, allowed)
    sequences = _some_tokens([one.ids for one in suite])
    layers: list[LayerDivergence] = []
    if allowed.layers:
        layer_result = None if read.problem else _layers(new, older, place, name, sequences, progress)
        layers, why = (
            layer_result if isinstance(layer_result, list) else [],
            layer_result if isinstance(layer_result, str) else read.problem,
        )
        checks.append(_of_layers(layers, why or "", allowed))
    else:
        checks.append(Check("kl_layer", "not compared", detail="the budget has layers = false"))
    checks += _of_files(new.tokenizer_files(), files, allowed)
    checks.append(_of_generation(new.model, info, allowed))
    differing: tuple[str, ...] = ()
    speed: SpeedPairs | None = None
    if older is None or diff is None:
        why = "a source is not a build"
        checks += [Check(key, "not compared", detail=why) for key in _OF_BUILDS]
    else:
        checks.append(_of_caches(new, older, name, allowed))
        checks += _of_sizes(new, older, name, allowed)
        if allowed.speed and provider is None:

            def settled(pairs: SpeedPairs) -> bool:
                return all(check.outcome != "inconclusive" for check in speed_checks(pairs, allowed, provider))

            speed = (measure or measure_speed)(new, older, name, threads, settled, progress)
        checks += speed_checks(speed, allowed, provider)
        differing = _lines_of(diff)
        checks.append(_equal("bytes", False, f"{len(diff.differences)} of {diff.files} files differ", allowed))
    return replace(
        comparison,
        prompts=len(suite),
        tokens=read.total.tokens,
        checks=tuple(checks),
        layers=tuple(layers),
        changed=tuple(read.changed),
        files=differing[:_MOST_FILES],
        speed=speed,
        seconds=_since(start),
    )


def _compare_texts(
    comparison: BuildComparison,
    new: Bundle,
    older: Bundle | None,
    prompts: Sequence[SuitePrompt],
    file: str | Path,
    options: OpenOptions,
    progress: Progress,
) -> BuildComparison:
    """Compares builds of a model that computes whole texts: its metrics on a file's prompts, files and sizes.

    With BUILT_IN as file, it reads the lines of the package's text. Raises RequestError if a prompt is a conversation.
    """
    if conversation := next((one.where for one in prompts if one.text is None and file != BUILT_IN), None):
        raise RequestError(
            f"prompts: {conversation}: this model reads texts, and no messages", hint='A line is {"prompt": "text"}.'
        )
    budget = comparison.budget
    report = evaluate_texts(
        comparison.bundle,
        comparison.against,
        text=file,
        lines=None if file == BUILT_IN else [one.text for one in prompts if one.text is not None],
        texts=_MOST_TEXTS,
        options=options,
        progress=progress,
    )
    checks = []
    for name, value in report.metrics.items():
        metric = METRICS[name]
        if value is None:
            checks.append(Check(name, "not compared", detail=f"it needs {metric.texts} texts"))
        else:
            checks.append(within(name, value, getattr(budget, name), metric.label, least=not metric.at_most))
    if older is None:
        checks += [Check(key, "not compared", detail="a source is not a build") for key in _OF_BUILDS]
    else:
        checks += _of_files(new.tokenizer_files(), older.tokenizer_files(), budget)
        checks += [
            _equal("generation", new.model.pooling == older.model.pooling, "prompts, labels or sizes", budget),
            *_of_sizes(new, older, comparison.target, budget),
            *(Check(key, "not compared", detail="times are of models that generate") for key in _OF_TIMES),
            _equal("bytes", False, "some files differ", budget),
        ]
    return replace(comparison, prompts=report.texts, tokens=report.tokens, checks=tuple(checks), task=report.task)


def _since(start: float) -> float:
    """Returns the seconds since ``start``, a time of ``time.perf_counter``, to the millisecond."""
    return round(time.perf_counter() - start, 3)


def _lines_of(diff: BundleDiff) -> tuple[str, ...]:
    """Returns the differences of two bundles, weights first, without sizes and hashes in manifests, which follow
    from them.
    """
    lines = []
    for file in diff.differences:
        only = ("only in the older one",) if file.bytes_b is None else ("only in the new one",)
        details = file.details if None not in (file.bytes_a, file.bytes_b) else only
        rank = next((i for i, start in enumerate(_FIRST_FILES) if file.path.startswith(start)), len(_FIRST_FILES))
        shown_details = [detail for detail in details if not detail.startswith(("files.", "tensors.", "blobs."))]
        lines += [(rank, f"{file.path}: {detail}") for detail in shown_details]
    return tuple(line for _, line in sorted(lines, key=lambda line: line[0]))


_FIRST_FILES = ("weights/weights", "tokenizer/", "manifest.json")
_OF_TIMES = ("prefill_ratio", "decode_ratio")
_OF_BUILDS = ("kv_cache", "size_ratio", "memory_ratio", *_OF_TIMES, "bytes")


# ---- the suite of prompts


@dataclass(frozen=True)
class _Prompt:
    where: str
    ids: list[int]
    answer: int
    tokenizer: Tokenizer | None = None


def _tokenized(
    asked: Sequence[SuitePrompt], source: str, reference: ScoredModel, files: TokenizerFiles, context: int
) -> list[_Prompt]:
    """Returns the suite as token ids, cut to the context, with the number of answer tokens for each."""
    answer = max(1, min(ANSWER_TOKENS, context // 2))
    most = context - answer
    tokenizer = reference.tokenizer if files.tokenizer_json is not None else None
    if tokenizer is None:
        if source != BUILT_IN:
            raise RequestError(
                f"prompts: {reference.path} has no tokenizer, so it can't read {source}", hint="Leave --prompts out."
            )
        generator = np.random.default_rng(0)
        drawn = generator.integers(0, reference.vocab_size, (_RANDOM_PROMPTS, min(_RANDOM_TOKENS, most)))
        return [_Prompt(f"random tokens {i}", ids, answer) for i, ids in enumerate(drawn.tolist(), 1)]
    tokenized = []
    for one in asked:
        text = one.text
        if text is None and files.chat_template is None:
            if source != BUILT_IN:
                raise RequestError(
                    f"prompts: {one.where}: messages need a chat template, and {reference.path} has none",
                    hint="Pass texts.",
                )
            text = str(one.messages[-1]["content"])
        ids = tokenizer.encode_chat(one.messages) if text is None else tokenizer.encode(text)
        if ids:
            tokenized.append(_Prompt(one.where, ids[:most], answer, tokenizer))
    if not tokenized:
        raise RequestError(f"prompts: {source} has no tokens", hint="Pass texts of one token or more.")
    return tokenized


@dataclass
class _Read:
    """The result of reading the suite with both models. ``problem``: the reason why they can't be compared, or ""."""

    total: Divergence = field(default_factory=lambda: Divergence(Likelihood(), Likelihood()))
    changed: list[ChangedPrompt] = field(default_factory=list)
    problem: str = ""


def _read_suite(
    model: BundleModel, reference: ScoredModel, answering: BundleModel, suite: Sequence[_Prompt], progress: Progress
) -> _Read:
    """Reads every prompt and its answer with both models.

    It goes prompt by prompt, so that memory holds the logits of one prompt only.
    """
    read = _Read()
    if model.vocab_size != reference.vocab_size:
        read.problem = f"the bundle has {model.vocab_size:,} tokens, the other one {reference.vocab_size:,}"
        return read
    for done, prompt in enumerate(suite, 1):
        ids = prompt.ids if answering is model else _answered(answering, prompt)
        try:
            if answering is model:
                ids = _answered(model, prompt)
            logits = model.logits(ids)  # [S, V]
        except EnginewrightError as e:
            if type(e) is not EnginewrightError:  # such as too little memory, which isn't the bundle's fault
                raise
            read.problem = f"{prompt.where}: {e.message}"
            return read
        expected = finite_logits(reference, ids)
        divergence = Divergence(Likelihood(), Likelihood())
        divergence.add(logits, expected)
        _add(read.total, divergence)
        tops = expected.argmax(axis=-1), logits.argmax(axis=-1)
        if len(places := np.flatnonzero(tops[0] != tops[1])):
            first = int(places[0])
            was, now = (_word(prompt.tokenizer, int(top[first])) for top in tops)
            read.changed.append(ChangedPrompt(prompt.where, len(ids), len(places), first, was, now, divergence.kl_max))
        progress(ProgressEvent("prompts", done, len(suite), f"KL {read.total.kl_mean:.3g}"))
    return read


def _answered(model: BundleModel, prompt: _Prompt) -> list[int]:
    """Returns a prompt followed by the model's greedy answer."""
    return [*prompt.ids, *model.continued(prompt.ids, prompt.answer)]


def _add(total: Divergence, own: Divergence) -> None:
    total.tokens += own.tokens
    total.kl_sum += own.kl_sum
    total.kl_max = max(total.kl_max, own.kl_max)
    total.agreed += own.agreed


def _word(tokenizer: Tokenizer | None, token: int) -> str:
    return str(token) if tokenizer is None else repr(tokenizer.decode([token], skip_special_tokens=False))


def _of_suite(read: _Read, budget: Budget) -> list[Check]:
    limits = {"tokens_changed": budget.tokens_changed, "kl_mean": budget.kl_mean, "kl_max": budget.kl_max}
    if read.problem:
        return [Check(key, "failed", None, limit, read.problem) for key, limit in limits.items()]
    total = read.total
    changed = total.tokens - total.agreed
    detail = f"{changed:,} of {total.tokens:,}"
    return [
        within("tokens_changed", changed / total.tokens, budget.tokens_changed, detail),
        within("kl_mean", total.kl_mean, budget.kl_mean),
        within("kl_max", total.kl_max, budget.kl_max),
    ]


def _some_tokens(suite: Sequence[list[int]]) -> list[list[int]]:
    """Returns the beginnings of some prompts, a quarter of LAYER_TOKENS each."""
    starts: list[list[int]] = []
    for ids in suite:
        if len(starts) < 4:
            starts.append(ids[: LAYER_TOKENS // 4])
    return starts


# ---- by layer


def _layers(
    new: Bundle, older: Bundle | None, source: Path, target: str, sequences: Sequence[list[int]], progress: Progress
) -> list[LayerDivergence] | str:
    """Returns the divergence by layer, or the reason why it can't be computed."""
    if target != MEASURED or any(target not in b.programs for b in (new, older) if b is not None):
        return f"the values of target {target} can't be looked at"
    progress(ProgressEvent("layers", 0, 1, ""))
    try:
        with MissingDependencyError.of_export("kl_layer"):
            import torch

            from enginewright.optimizer.bisect.bundle_run import BundleRun
            from enginewright.optimizer.bisect.layer_divergence import layer_divergence
            from enginewright.optimizer.bisect.source_run import SourceRun
    except MissingDependencyError as e:
        return e.message
    tokens = [torch.tensor(ids, dtype=torch.int32) for ids in sequences]
    new_run = BundleRun(new, str(new.path), target=target)
    if older is not None:
        layers = layer_divergence(BundleRun(older, str(older.path), target=target), new_run, tokens, progress)
    else:
        run = SourceRun(source, str(source), context_length=new.model.context_length)
        layers = layer_divergence(run, new_run, tokens, progress)
    return "the two have other layers, or what a layer gets is not a value of its own" if layers is None else layers


def _of_layers(layers: Sequence[LayerDivergence], why: str, budget: Budget) -> Check:
    if not layers:
        return Check("kl_layer", "not compared", detail=why)
    worst = max(layers, key=lambda one: one.kl_mean)
    first = next((one for one in layers if one.kl_mean > budget.kl_layer), worst)
    place = "the logits" if first.layer is None else f"what layer {first.layer} gets"
    if first.kl_mean > budget.kl_layer:
        return within("kl_layer", worst.kl_mean, budget.kl_layer, f"from {place} on")
    return within("kl_layer", worst.kl_mean, budget.kl_layer, f"largest at {place}" if worst.kl_mean else "")


# ---- what a bundle says of the model


def _equal(name: str, same: bool, different: str, budget: Budget) -> Check:
    """Returns the check ``name``: passed if ``same`` is True, with ``different`` as the detail if not.

    It is "not compared" if the budget has ``name`` = false.
    """
    measured = "equal" if same else "different"
    if not getattr(budget, name):
        return Check(name, "not compared", detail=f"the budget has {name} = false")
    return Check(name, "passed" if same else "failed", measured, "equal", "" if same else different)


def _of_files(new: TokenizerFiles, older: TokenizerFiles, budget: Budget) -> list[Check]:
    """Returns checks of the tokenizer and the chat templates; a source without a tokenizer counts as having none."""
    parts = {"tokenizer.json": (new.tokenizer_json, older.tokenizer_json)}
    names = sorted(new.special_tokens.keys() | older.special_tokens.keys())
    parts |= {name: (new.special_tokens.get(name), older.special_tokens.get(name)) for name in names}  # type: ignore[misc]
    templates: dict[str, tuple[object, object]] = {"default": (new.chat_template, older.chat_template)}
    for name in sorted(new.other_templates.keys() | older.other_templates.keys()):
        templates[name] = (new.other_templates.get(name), older.other_templates.get(name))
    templates["of answers"] = (new.response_template, older.response_template)
    checks = []
    for key, compared in (("tokenizer", parts), ("templates", templates)):
        unlike = [name for name, (a, b) in compared.items() if a != b]
        checks.append(_equal(key, not unlike, f"another {', '.join(unlike)}", budget))
    return checks


def _of_generation(new: ModelInfo, older: ModelInfo, budget: Budget) -> Check:
    """Returns a check of the sampling defaults, of the tokens that begin and end a text, and of the longest
    request.
    """
    settings: list[dict[str, object]] = [
        {"eos_token_ids": sorted(info.eos_token_ids), "bos_token_id": info.bos_token_id, **info.generation_defaults}
        for info in (older, new)
    ]
    unlike = [
        f"{key} {settings[0].get(key)} became {settings[1].get(key)}"
        for key in sorted(settings[0].keys() | settings[1].keys())
        if settings[0].get(key) != settings[1].get(key)
    ]
    return _equal("generation", not unlike, "; ".join(unlike), budget)


def _of_caches(new: Bundle, older: Bundle, target: str, budget: Budget) -> Check:
    """Returns a check of the formats of keys and values, layer by layer, and of the context length."""
    facts = []
    for bundle in (older, new):
        context = context_of(bundle, None, target)
        groups = target_groups(bundle, target, context)
        dtypes = {layer: group.dtype for group in groups for layer in group.layers}
        facts.append((f"{context:,} tokens of {', '.join(sorted(set(dtypes.values()))) or 'nothing'}", context, dtypes))
    (was, *before), (now, *after) = facts
    return _equal("kv_cache", before == after, f"{was} became {now}", budget)


def _of_sizes(new: Bundle, older: Bundle, target: str, budget: Budget) -> list[Check]:
    ours, theirs = (sum(file.bytes for file in bundle.files.values()) for bundle in (new, older))
    checks = [_ratio("size_ratio", ours, theirs, budget.size_ratio)]
    programs = [bundle.programs.get(target) for bundle in (new, older)]
    first, second = programs
    if first is None or second is None or getattr(part(target, "section"), "OWN_FORM", False):
        return [*checks, Check("memory_ratio", "not compared", detail=f"target {target} doesn't say what it takes")]
    context = min(MEMORY_CONTEXT, *(context_of(bundle, None, target) for bundle in (new, older)))
    ours, theirs = (Memory(program, target).needed(1, context, context) for program in (first, second))
    return [*checks, _ratio("memory_ratio", ours, theirs, budget.memory_ratio)]


def _ratio(name: str, new: int, older: int, limit: float) -> Check:
    return within(name, new / max(older, 1), limit, f"{format_bytes(older)} became {format_bytes(new)}")
