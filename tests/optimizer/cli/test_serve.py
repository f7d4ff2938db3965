"""The models that `optimize serve` prepares before it serves them; tests/runtime/server tests the serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from enginewright.optimizer.cli import serve
from enginewright.runtime.shared.errors import BundleError


def test_a_recipe_is_of_models_alone(tiny_bundle: Path) -> None:
    assert serve._exported(str(tiny_bundle), "int8") == str(tiny_bundle)
    with pytest.raises(BundleError, match=r"missing\.gguf doesn't exist"):
        serve._exported("missing.gguf", "int8")


@pytest.mark.parametrize(
    ("given", "name"),
    [("a/smollm2.bundle", "smollm2"), ("missing/tiny.gguf", "tiny"), ("org/name:Q8_0", "org/name:Q8_0")],
)
def test_what_a_model_is_called(given: str, name: str) -> None:
    assert serve._name_of(given) == name


def test_a_name_is_of_one_model() -> None:
    for arguments in (["a=b.bundle", "a=c.bundle"], ["b=b.bundle", "a=c.bundle", "a=d.bundle"]):
        with pytest.raises(typer.BadParameter, match="--model: two are called a, "):
            serve._named_models(None, arguments, None)
    with pytest.raises(typer.BadParameter, match=r"two are called a, x/a\.bundle and b\.bundle"):
        serve._named_models("x/a.bundle", ["a=b.bundle"], None)
    with pytest.raises(typer.BadParameter, match="--alias: two are called x, a and b"):
        serve._named_models(None, ["a=a.bundle", "b=b.bundle"], ["x=a", "x=b"])
    assert serve._named_models("a.bundle", ["b=b.bundle"], ["x=a"]) == {
        "models": {"a": "a.bundle", "b": "b.bundle"},
        "aliases": {"x": "a"},
    }
