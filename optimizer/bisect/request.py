"""The request of a bisection: two runs of one model, the tokens, and the checks that the runs are comparable."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.calibration.calibrate import TEXT_ORIGIN
from enginewright.optimizer.capture.find_source import describe_source, find_source
from enginewright.optimizer.pipeline.pass_context import needs_tokens
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recover import FinishedRecovery
from enginewright.passes.recovery.load_recovered import LoadRecovered
from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.contracts import CacheGroup, ModelInfo
from enginewright.runtime.shared.errors import ComparisonError, RequestError
from enginewright.runtime.shared.progress import Progress
from enginewright.runtime.text.tokenizer import Tokenizer

from .values import layer_number


@dataclass(frozen=True)
class Given:
    """One of the two models or bundles to compare.

    Attributes:
        what: a bundle's folder, a Hugging Face folder, a GGUF file, a Hub id, or a transformers model.
        target: the target of a bundle; None takes the first one.
        isa: the instruction set for a bundle; None takes the best one.
    """

    what: Path | PreTrainedModel
    target: str | None = None
    isa: str | None = None

    @property
    def is_bundle(self) -> bool:
        return isinstance(self.what, Path) and (self.what / MANIFEST_PATH).is_file()

    @property
    def name(self) -> str:
        return describe_source(self.what).name if isinstance(self.what, Path) else type(self.what).__name__

    def found(self, progress: Progress) -> Given:
        """Returns a copy with a local path; a Hub id is downloaded."""
        return replace(self, what=find_source(self.what, progress=progress)) if isinstance(self.what, Path) else self

    def is_same(self, other: Given) -> bool:
        """Returns True if both are the same model or bundle, on any target."""
        if isinstance(self.what, Path) and isinstance(other.what, Path):
            return self.what.resolve() == other.what.resolve()
        return self.what is other.what


@dataclass(frozen=True)
class Options:
    """The options of a comparison.

    Attributes:
        tolerance: largest relative error, in place of the defaults.
        recipe: the recipe, by name or file, for a source that is compared with its own passes; None takes f32.
        calibration: a file of calibration text, for a recipe that needs one.
        tokens, texts: sequences to compare on; random ones by ``seed`` if both are empty.
        recovered: the folder of ``recover``, for a bundle with recovered weights.
        layers: numbers of the layers to compare; None: all layers, and everything outside layers.
    """

    tolerance: float | None = None
    recipe: str | None = None
    calibration: Path | None = None
    tokens: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    seed: int = 0
    recovered: Path | None = None
    layers: Collection[int] | None = None


def check_meaning(a: Given, b: Given, options: Options) -> None:
    """Raises ComparisonError for an option or a property of ``a`` or ``b`` that has no meaning in their comparison."""
    for one in (a, b):
        if not one.is_bundle and one.isa is not None:
            raise ComparisonError(
                f"{one.name} is a model, which transformers computes: it has no instruction set to choose",
                hint="Instruction sets are for bundles.",
            )
    if options.recipe is not None and (a.is_bundle or b.is_bundle or not a.is_same(b)):
        raise ComparisonError(
            f"a recipe is given ({options.recipe}), but {a.name} and {b.name} aren't a model and itself",
            hint="A bundle goes by the recipe that it was made by; leave it out.",
        )


def check_no_adapters(bundle: Bundle, source: Given) -> None:
    """Raises ComparisonError for a bundle with adapters, as the source is read without them."""
    if bundle.manifest.source.adapters:
        names = ", ".join(adapter.name for adapter in bundle.manifest.source.adapters)
        raise ComparisonError(
            f"{bundle.path} was made with adapters ({names}), and {source.name} is read without",
            hint="Merge them with peft, export the merged model, and compare with that.",
        )


def check_same_model(a: ModelInfo, name_a: str, b: ModelInfo, name_b: str) -> None:
    """Raises ComparisonError, naming the difference, if models A and B have different architectures or vocabularies."""
    facts = [{"architecture": info.architecture, "vocabulary": f"{info.vocab_size:,} tokens"} for info in (a, b)]
    _check(facts[0], name_a, facts[1], name_b)


def check_same_cache(a: Sequence[CacheGroup], name_a: str, b: Sequence[CacheGroup], name_b: str) -> None:
    """Raises ComparisonError, naming the difference, if A and B differ in the layers, heads or windows of their KV
    caches.
    """
    _check(_facts(a), name_a, _facts(b), name_b)


def check_layers(layers: Collection[int] | None, paths: Collection[str]) -> None:
    """Raises RequestError if the model has no layer of one of these numbers.

    Args:
        layers: the numbers; None for all layers.
        paths: the paths of the model's modules.
    """
    if layers is None:
        return
    there = sorted({number for path in paths if (number := layer_number(path)) is not None})
    if missing := sorted(set(layers) - set(there)):
        known = f"0 to {there[-1]}" if there == list(range(len(there))) and there else f"{there or 'none'}"
        raise RequestError(f"layer {missing[0]} is not one of the model's: it has {known}", hint="See --layers.")


def _facts(groups: Sequence[CacheGroup]) -> dict[str, str]:
    layers = sorted((layer, group) for group in groups for layer in group.layers if not group.holds_ends)
    return {
        "layers": f"{len(layers)}",
        "key and value heads": _each([f"{g.planes[0].heads}" for _, g in layers]),
        "head size": _each(["/".join(f"{plane.size}" for plane in g.planes) for _, g in layers]),
        "window": _each([f"{g.window}" if g.window else "none" for _, g in layers]),
    }


def _each(values: Sequence[str]) -> str:
    """Joins the values of layers to a text: a single value if all layers have the same, otherwise a list."""
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def _check(a: Mapping[str, str], name_a: str, b: Mapping[str, str], name_b: str) -> None:
    differing = [f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key]]
    if differing:
        raise ComparisonError(
            f"{name_a} and {name_b} are different models: {'; '.join(differing)}",
            hint="Compare a bundle with the model that it was made of, or two bundles of one model.",
        )


_REPORT = "report/report.json"


def check_calibration(bundle: Bundle, target: str, recipe: Recipe, file: Path | None) -> None:
    """Raises ComparisonError if a pass of the export read tokens of a calibration file, and ``file`` is None."""
    if file is not None or not needs_tokens(recipe, (target,)):
        return
    try:
        report = json.loads(read_regular(bundle.path / _REPORT, most=MOST_JSON_BYTES))
    except (OSError, ValueError):
        return  # without its report nothing says so; then the programs differ at a calibrated weight
    calibration = report.get("calibration") if isinstance(report, dict) else None
    origin = calibration.get("origin") if isinstance(calibration, dict) else None
    if isinstance(origin, str) and origin != TEXT_ORIGIN and not origin.startswith("sampled"):
        raise ComparisonError(
            f"{bundle.path}: its recipe can't be repeated without the file {origin} that it was calibrated with",
            hint="Pass that file with --calibration.",
        )


def recovery_of(bundle: Bundle, folder: Path | None) -> FinishedRecovery | None:
    """Opens the recovery that a bundle's weights are from; None if they weren't recovered.

    Raises ComparisonError if the bundle needs the folder and it wasn't passed, or the other way round.
    """
    trained = any(p.name == LoadRecovered.name and p.matched for p in bundle.manifest.passes)
    if trained == (folder is not None):
        return None if folder is None else FinishedRecovery.open(folder)
    if trained:
        raise ComparisonError(
            f"{bundle.path}: its weights were recovered, and can't be made again without the folder of that",
            hint="Pass it with --recovered.",
        )
    raise ComparisonError(f"{bundle.path}: its weights are not recovered ones", hint="Leave --recovered out.")


LENGTHS = (37, 23)
"""The lengths of random sequences. The first one needs a second KV block. No model has either as a size of its own."""

LONGEST = 512
"""The most tokens of a comparison: every value of the model is in memory for each of them."""


def choose_tokens(
    info: ModelInfo,
    *,
    tokens: Sequence[Sequence[int]],
    texts: Sequence[str],
    seed: int,
    tokenizer: Tokenizer | None,
) -> list[torch.Tensor]:
    """Returns sequences of token ids, int32 [S] each: ``tokens`` and ``texts``, or random ones without any.

    Args:
        info: the model's vocabulary and context.
        tokens: sequences of token ids.
        texts: texts, which ``tokenizer`` encodes.
        seed: of the random sequences.
        tokenizer: None if the model has none.

    Raises:
        RequestError: an id is outside the vocabulary, a sequence is empty or too long, or there is a text without a
            tokenizer.
    """
    sequences = [list(ids) for ids in tokens]
    if texts and tokenizer is None:
        raise RequestError("a text is given, but the model has no tokenizer", hint="Give token ids with --tokens.")
    for text in texts:
        assert tokenizer is not None
        sequences.append(list(tokenizer.encode(text)))
    if not sequences:
        generator = np.random.default_rng(seed)
        lengths = [min(length, info.context_length) for length in LENGTHS]
        sequences = [generator.integers(0, info.vocab_size, length).tolist() for length in lengths]
    for ids in sequences:
        if not ids:
            raise RequestError("a sequence to compare on has no tokens", hint="Give at least one token.")
        if len(ids) > info.context_length:
            raise RequestError(
                f"a sequence to compare on has {len(ids):,} tokens, the model takes {info.context_length:,}",
                hint="Give a shorter one.",
            )
        if wrong := [i for i in ids if not 0 <= i < info.vocab_size]:
            raise RequestError(
                f"token {wrong[0]} is not one of the model's {info.vocab_size:,}",
                hint=f"Token ids are 0 to {info.vocab_size - 1}.",
            )
    if (total := sum(len(ids) for ids in sequences)) > LONGEST:
        raise RequestError(
            f"{total:,} tokens to compare on are more than {LONGEST}, of which every value is kept",
            hint="Give fewer, or shorter, sequences.",
        )
    return [torch.tensor(ids, dtype=torch.int32) for ids in sequences]
