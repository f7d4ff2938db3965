"""The recipe that a bundle was made by."""

from __future__ import annotations

from pydantic import ValidationError

from enginewright.plugins.shared.errors import BundleError
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle

from .recipe import Recipe


def recipe_of(bundle: Bundle) -> Recipe:
    """As its manifest has it. Raises BundleError, naming the key, if it is none of this version."""
    try:
        return Recipe.model_validate(bundle.manifest.recipe)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            f"{bundle.path / MANIFEST_PATH}: recipe.{key}: {first['msg']}",
            hint="Another version exported it (see toolchain there): take that one, or export the model again.",
        ) from e
