"""The bundle that ``LLM`` opens: what it is given, or what the optimizer exports of a model, once."""

from __future__ import annotations

import importlib
import os

from ..bundle.hub_id import check_there, is_model

_EXPORTER = "enginewright.optimizer.cli.exported"
"""The module that exports a model into the cache. It is loaded by its name, for models alone: it needs PyTorch."""


def exported(model: str | os.PathLike[str], recipe: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns the path of a bundle. A Hugging Face folder, a GGUF file or a Hub id is exported first, once.

    Raises BundleError where nothing is there, what exporting raises, MissingDependencyError if the extra "export" is
    not installed, and RequestError for a bundle that is given with a recipe.
    """
    check_there(model)
    if recipe is None and not is_model(model):
        return model
    bundle: os.PathLike[str] = importlib.import_module(_EXPORTER).exported(model, recipe=recipe, apart=False)
    return bundle
