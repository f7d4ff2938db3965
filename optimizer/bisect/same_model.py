"""Two sides have to be the same model, or comparing them says nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from enginewright.plugins.shared.contracts import CacheGroup, ModelInfo
from enginewright.plugins.shared.errors import ComparisonError, RequestError

from .points import layer_number


def check_same_model(a: ModelInfo, name_a: str, b: ModelInfo, name_b: str) -> None:
    """Raises ComparisonError, naming what differs, for models of another architecture or vocabulary."""
    facts = [{"architecture": info.architecture, "vocabulary": f"{info.vocab_size:,} tokens"} for info in (a, b)]
    _check(facts[0], name_a, facts[1], name_b)


def check_same_cache(a: Sequence[CacheGroup], name_a: str, b: Sequence[CacheGroup], name_b: str) -> None:
    """Raises ComparisonError, naming what differs, for models with other layers, heads or windows."""
    _check(_facts(a), name_a, _facts(b), name_b)


def check_layers(layers: Collection[int] | None, paths: Collection[str]) -> None:
    """Raises RequestError for a layer that none of a model's module paths is in."""
    if layers is None:
        return
    there = sorted({number for path in paths if (number := layer_number(path)) is not None})
    if missing := sorted(set(layers) - set(there)):
        known = f"0 to {there[-1]}" if there == list(range(len(there))) and there else f"{there or 'none'}"
        raise RequestError(f"layer {missing[0]} is not one of the model's: it has {known}", hint="See --layers.")


def _facts(groups: Sequence[CacheGroup]) -> dict[str, str]:
    layers = sorted((layer, group) for group in groups for layer in group.layers)
    return {
        "layers": f"{len(layers)}",
        "key and value heads": _each([f"{g.kv_heads}" for _, g in layers]),
        "head size": _each([f"{g.key_head_size}/{g.value_head_size}" for _, g in layers]),
        "window": _each([f"{g.window}" if g.window else "none" for _, g in layers]),
    }


def _each(values: Sequence[str]) -> str:
    """What all layers have, or each of them."""
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def _check(a: Mapping[str, str], name_a: str, b: Mapping[str, str], name_b: str) -> None:
    differing = [f"{key} {a[key]} and {b[key]}" for key in a if a[key] != b[key]]
    if differing:
        raise ComparisonError(
            f"{name_a} and {name_b} are different models: {'; '.join(differing)}",
            hint="Compare a bundle with the model that it was made of, or two bundles of one model.",
        )
