"""Stores recipes as TOML, and reads them from the manifest of a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError

from .recipe import Recipe


def to_toml(recipe: Recipe, comment: str = "") -> str:
    """Returns the values that differ from the defaults as TOML, with ``comment`` before them."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    content = {key: value for key, value in content.items() if value is not None}
    lines = [f"# {line}" for line in comment.splitlines()]
    plain = {k: v for k, v in content.items() if not isinstance(v, Mapping)}
    lines += _pairs(plain)
    for name, section in content.items():
        if isinstance(section, Mapping):
            lines += _table(name, section)
    return "\n".join(lines) + "\n"


def _table(name: str, section: Mapping[str, Any]) -> list[str]:
    lists = {k: v for k, v in section.items() if isinstance(v, list) and v and isinstance(v[0], Mapping)}
    lines = ["", f"[{name}]", *_pairs({k: v for k, v in section.items() if k not in lists})]
    for key, entries in lists.items():
        for entry in entries:
            lines += ["", f"[[{name}.{key}]]", *_pairs(entry)]
    return lines


def _pairs(section: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in section.items()]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # numbers, true and false, and basic strings are written as in TOML


def recipe_of(bundle: Bundle) -> Recipe:
    """Returns the recipe in the bundle's manifest. Raises BundleError naming the key that this version can't read."""
    try:
        return Recipe.model_validate(bundle.manifest.recipe)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            f"{bundle.path / MANIFEST_PATH}: recipe.{key}: {first['msg']}",
            hint="Another version exported it (see toolchain there): take that one, or export the model again.",
        ) from e
