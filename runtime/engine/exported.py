"""The bundle that ``LLM`` opens: the caller's bundle, or the export of the caller's model, which is cached."""

from __future__ import annotations

import importlib
import os

from ..bundle.hub_id import check_there, is_model

_EXPORTER = "enginewright.optimizer.cli.exported"
"""The module that exports a model into the cache. It needs PyTorch, so it is imported by name, and only for models."""


def exported(model: str | os.PathLike[str], recipe: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns the path of a bundle. A Hugging Face folder, a GGUF file or a Hub id is exported first, if it isn't in
    the cache.

    Raises:
        BundleError: nothing exists at the path.
        RequestError: the path is a bundle and there is a recipe.
        MissingDependencyError: the extra "export" isn't installed.
        EnginewrightError: the export failed.
    """
    check_there(model)
    if recipe is None and not is_model(model):
        return model
    bundle: os.PathLike[str] = importlib.import_module(_EXPORTER).exported(model, recipe=recipe, apart=False)
    return bundle
