"""Budgets of `verify --against`: limits on how much worse a build may be, and the check of each limit."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, StrictBool, ValidationError

from enginewright.optimizer.recipes.stored import recipe_of
from enginewright.passes.formats.section import Section
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError

_HINT = "See docs/use/commands/verify.md for the keys of a budget."


class Budget(Section):
    """Limits on how much worse a bundle may be than the one that it is compared with. ``inf`` sets no limit.

    Attributes:
        tokens_changed: share of the suite's tokens for which the likeliest token changed.
        kl_mean, kl_max: KL divergence in nats: the mean over these tokens, and the worst.
        cosine_min, cosine_mean, spearman, top10_overlap, spearman_scores, top1_agreement: the least values of metrics
            of a model that computes whole texts (measure/text_metrics.py); its kl_mean and kl_max are of scores.
        kl_layer: the largest mean KL divergence of one layer.
        layers: False doesn't compare layers.
        size_ratio, memory_ratio, prefill_ratio, decode_ratio: the bundle's bytes or seconds, divided by the other's.
        speed_margin: the share by which a ratio of times may exceed its limit.
        speed: False measures no times.
        tokenizer, templates, generation, kv_cache: True if each must be equal.
        bytes: True if all files must be equal.
    """

    tokens_changed: float = Field(default=0.01, ge=0)
    kl_mean: float = Field(default=1e-4, ge=0)
    kl_max: float = Field(default=1e-2, ge=0)
    cosine_min: float = Field(default=0.9999, le=1)
    cosine_mean: float = Field(default=0.9999, le=1)
    spearman: float = Field(default=0.999, le=1)
    top10_overlap: float = Field(default=0.99, le=1)
    spearman_scores: float = Field(default=0.999, le=1)
    top1_agreement: float = Field(default=0.99, le=1)
    layers: StrictBool = True
    kl_layer: float = Field(default=1e-3, ge=0)
    size_ratio: float = Field(default=1.02, gt=0)
    memory_ratio: float = Field(default=1.02, gt=0)
    speed: StrictBool = True
    prefill_ratio: float = Field(default=1.05, gt=0)
    decode_ratio: float = Field(default=1.05, gt=0)
    speed_margin: float = Field(default=0.05, ge=0)
    tokenizer: StrictBool = True
    templates: StrictBool = True
    generation: StrictBool = True
    kv_cache: StrictBool = True
    bytes: StrictBool = False

    def to_toml(self) -> str:
        """Returns the budget as the text of a TOML file."""
        return "".join(f"{key} = {str(value).lower()}\n" for key, value in self)


def read_budget(file: str | Path, default: Budget = Budget()) -> Budget:
    """Reads a budget from a TOML file. Missing values are those of ``default``."""
    try:
        limits = tomllib.loads(read_regular(file, most=MOST_JSON_BYTES, piped=True).decode())
        return Budget.model_validate(default.model_dump() | limits)
    except OSError as e:
        raise RequestError(f"budget: {file} can't be read: {e.strerror}", hint="Pass a TOML file.") from e
    except ValidationError as e:
        first = e.errors()[0]
        key = str(first["loc"][0])
        if first["type"] != "extra_forbidden":
            raise RequestError(f"budget: {file}: {key}: {_REASONS.get(first['type'], first['msg'])}", hint=_HINT) from e
        near = difflib.get_close_matches(key, Budget.model_fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(Budget.model_fields)}."
        raise RequestError(f"budget: {file}: {key}: unknown key", hint=hint) from e
    except ValueError as e:  # not TOML, or not UTF-8
        raise RequestError(f"budget: {file}: not TOML: {e}", hint=_HINT) from e


_REASONS = {"bool_type": "it must be true or false", "float_type": "it must be a number"}


def default_budget(bundle: Bundle, *, source: bool) -> Budget:
    """Returns the budget that is used without a file: a build must equal the one before, except for rounding.

    ``source``: True if the bundle is compared with its source.
    """
    recipe = recipe_of(bundle)
    if not source or recipe.exact:
        return Budget()
    from enginewright.optimizer.verify.verify import max_kl_of  # torch, which a source needs

    lossy = max_kl_of(recipe)
    mean = lossy or Budget().kl_mean
    unlimited = dict.fromkeys(("cosine_min", "spearman", "top10_overlap", "spearman_scores"), -math.inf)
    return Budget(
        tokens_changed=0.25,
        kl_mean=mean,
        kl_max=math.inf,
        kl_layer=math.inf,
        cosine_mean=1 - mean,
        top1_agreement=0.75,
        **unlimited,
    )


Outcome = Literal["passed", "failed", "inconclusive", "not compared"]


@dataclass(frozen=True)
class Check:
    """The check of one property that may have become worse.

    Attributes:
        name: the budget's key, or the property.
        outcome: "not compared" if it doesn't apply or the budget disables it; "inconclusive" if times vary too much.
        measured, limit: a number, or a text; an infinite number is None.
        least: True if the measured number has to be at least the limit, not at most.
        interval: bounds of a measured ratio of times, where an infinite bound is None in JSON; None for other
            properties.
        detail: the problem, or the reason why nothing was compared; "" if there is none.
    """

    name: str
    outcome: Outcome
    measured: float | str | None = None
    limit: float | str | None = None
    detail: str = ""
    interval: tuple[float, float] | None = None
    least: bool = False


def within(name: str, measured: float, limit: float, detail: str = "", *, least: bool = False) -> Check:
    """Returns a check named ``name``: passed if ``measured`` is at most ``limit``, or with ``least``, at least
    ``limit``.

    ``detail``: see ``Check``.
    """
    passed = measured >= limit if least else measured <= limit
    return Check(name, "passed" if passed else "failed", measured, limit, detail, least=least)


def shown(check: Check) -> str:
    """Returns the measured value and its limit, such as "1.3, at most 1.02"; "" if nothing was compared."""
    if check.outcome == "not compared" or check.measured is None:
        return ""
    return number(check.measured) + ("" if check.limit is None else f", {limit_of(check)}")


def limit_of(check: Check) -> str:
    """Returns the limit of a check as text, such as "at most 1.02"."""
    if isinstance(check.limit, str) or check.limit is None:
        return check.limit or ""
    return "no limit" if math.isinf(check.limit) else f"at {'least' if check.least else 'most'} {number(check.limit)}"


def number(value: float | str) -> str:
    """Returns a measured value in words: four digits of a number, and six of one just below 1."""
    return value if isinstance(value, str) else f"{value:.6g}" if 0.99 < value < 1 else f"{value:.4g}"
