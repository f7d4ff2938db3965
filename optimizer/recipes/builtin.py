"""The TOML files of the built-in recipes."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable


def builtin_files() -> dict[str, Traversable]:
    """By name, in the order of names."""
    files = (f for f in resources.files(__package__).iterdir() if f.name.endswith(".toml"))
    return {f.name.removesuffix(".toml"): f for f in sorted(files, key=lambda f: f.name)}
