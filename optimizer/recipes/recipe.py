"""What a recipe says: the schema, the built-in ones, and how one is loaded from TOML.

A recipe holds everything that decides what an export makes of a model. Unknown keys are errors, and no environment
variable changes a result.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from enginewright.passes.weight_formats import FormatOverride, WeightFormats
from enginewright.plugins.contracts import Activation, CacheDtype, Rotation, Sparsity, Storage, WeightFormat
from enginewright.plugins.errors import RecipeError

Name = TypeVar("Name", bound=str)

TARGETS = ("cpu",)
"""Targets that can be emitted today."""

WEIGHT_STORAGES: tuple[Storage, ...] = ("f32", "bf16", "int8")
"""Weight storage types that can be emitted today."""

ACTIVATION_OF: dict[Storage, Activation] = {"f32": "float", "bf16": "bf16", "int8": "int8"}
"""What each of them is multiplied with."""

GROUP_SIZES = (0, 32, 64)
"""Of int8 weights and activations; 0 is one scale a row."""

CACHE_DTYPES: tuple[CacheDtype, ...] = ("f32",)
"""KV-cache formats that can be emitted today."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightFormatSection(_Section):
    """``contracts.WeightFormat`` as a TOML table."""

    storage: Storage = "f32"
    group_size: int = Field(default=0, ge=0)
    zero_point: StrictBool = False
    activation: Activation = "float"
    activation_group_size: int = Field(default=0, ge=0)
    rotation: Rotation = "none"
    sparsity: Sparsity = "dense"

    @field_validator("storage")
    @classmethod
    def _storage_exists(cls, value: Storage) -> Storage:
        return _supported(value, WEIGHT_STORAGES, "weights")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (wanted := ACTIVATION_OF[self.storage]) != self.activation:
            raise ValueError(f"storage {self.storage!r} goes with activation {wanted!r}, not {self.activation!r}")
        groups = {"group_size": self.group_size, "activation_group_size": self.activation_group_size}
        for key, size in groups.items():
            if self.storage != "int8" and size:
                raise ValueError(f"{key} is {size}, but storage {self.storage!r} has no scales")
            if size not in GROUP_SIZES:
                raise ValueError(f"{key} is {size}, which can't be made yet, only {_listed(GROUP_SIZES)}")
        if self.group_size and self.activation_group_size and self.group_size != self.activation_group_size:
            raise ValueError(
                f"group_size is {self.group_size} and activation_group_size {self.activation_group_size}: "
                "where both are not 0 they must be the same"
            )
        if self.zero_point:
            raise ValueError("zero_point can't be true yet: values are symmetric around 0")
        if self.rotation != "none":
            raise ValueError(f"rotation {self.rotation!r} can't be made yet, only 'none'")
        if self.sparsity != "dense":
            raise ValueError(f"sparsity {self.sparsity!r} can't be made yet, only 'dense'")
        return self

    def to_format(self) -> WeightFormat:
        """The same as the dataclass that passes and emitters take."""
        return WeightFormat(**self.model_dump())


class WeightOverride(_Section):
    """A weight format for the modules whose path ``layers`` matches (shell pattern, e.g. ``*.mlp.down_proj``)."""

    layers: str = Field(min_length=1)
    format: WeightFormatSection


class WeightsSection(_Section):
    """The format of the weight of every linear and embedding: the first override that matches, or the default."""

    default: WeightFormatSection = WeightFormatSection()
    overrides: tuple[WeightOverride, ...] = ()

    def to_formats(self) -> WeightFormats:
        """The same as passes take it."""
        overrides = tuple(FormatOverride(o.layers, o.format.to_format()) for o in self.overrides)
        return WeightFormats(self.default.to_format(), overrides)


class CacheSection(_Section):
    """How keys and values are stored."""

    dtype: CacheDtype = "f32"

    @field_validator("dtype")
    @classmethod
    def _dtype_exists(cls, value: CacheDtype) -> CacheDtype:
        return _supported(value, CACHE_DTYPES, "a KV cache")


class BudgetSection(_Section):
    """How far from its source an exported model may be.

    ``max_kl``: mean KL divergence per token in nats, above which the export fails. None takes the default of formats
    that lose precision; exact recipes are held to rounding instead.
    """

    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)


TargetName = Annotated[str, Field(min_length=1)]


class Recipe(_Section):
    """What an export does to a model.

    ``passes`` turns optional passes on or off by name; a pass that is on and matches nothing is an error, one that is
    not named does what it can. ``context_length`` is the longest request in tokens; frequencies of positions that are
    scaled by the length are fixed for it. None takes what the model needs no such scaling for, or all that it can.
    """

    name: str = Field(min_length=1)
    description: str = ""
    targets: tuple[TargetName, ...] = Field(default=("cpu",), min_length=1)
    context_length: int | None = Field(default=None, gt=0)
    weights: WeightsSection = WeightsSection()
    kv_cache: CacheSection = CacheSection()
    passes: dict[str, StrictBool] = Field(default_factory=dict)
    budget: BudgetSection = BudgetSection()

    @property
    def exact(self) -> bool:
        """Whether nothing loses precision: every weight, activation and cache entry is a 32-bit float."""
        formats = [self.weights.default, *(o.format for o in self.weights.overrides)]
        return self.kv_cache.dtype == "f32" and all(f.storage == "f32" and f.activation == "float" for f in formats)

    @field_validator("targets")
    @classmethod
    def _targets_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            _supported(target, TARGETS, "a target")
        return value


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)


def _supported(value: Name, known: Sequence[Name], what: str) -> Name:
    """Refuses what the schema has a word for and no emitter can make yet."""
    if value not in known:
        recipes = ", ".join(_builtin_files())
        raise ValueError(f"{value!r} can't be made for {what} yet, only {', '.join(known)} (recipes: {recipes})")
    return value


def load_recipe(name_or_path: str | Path) -> Recipe:
    """The built-in recipe of that name, or the recipe in that TOML file.

    Raises RecipeError naming the file, the line and the key.
    """
    builtin = _builtin_files()
    if str(name_or_path) in builtin:
        return _parse(builtin[str(name_or_path)].read_text(encoding="utf-8"), f"{name_or_path}.toml")
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise RecipeError(
            f"there is no recipe {str(name_or_path)!r}", hint=_suggest(str(name_or_path), builtin, "recipe")
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise RecipeError(
            f"{path}: can't read the recipe: {e.strerror}", hint=_suggest(path.stem, builtin, "recipe")
        ) from e
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path}: not UTF-8 text", hint="A recipe is a TOML file.") from e
    return _parse(text, str(path))


def list_recipes() -> list[Recipe]:
    """The built-in recipes, in the order of their names."""
    return [load_recipe(name) for name in _builtin_files()]


def recipe_text(name: str) -> str:
    """The TOML of a built-in recipe, comments included. Raises RecipeError."""
    builtin = _builtin_files()
    if name not in builtin:
        raise RecipeError(f"there is no recipe {name!r}", hint=_suggest(name, builtin, "recipe"))
    return builtin[name].read_text(encoding="utf-8")


def _builtin_files() -> dict[str, Traversable]:
    files = (f for f in resources.files(__package__).iterdir() if f.name.endswith(".toml"))
    return {f.name.removesuffix(".toml"): f for f in sorted(files, key=lambda f: f.name)}


def _suggest(word: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known {what}s: {', '.join(known)}."


def _parse(text: str, source: str) -> Recipe:
    try:
        return Recipe.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise RecipeError(f"{source}: not TOML: {e}", hint="See docs/commands/recipes.md for an example.") from e
    except ValidationError as e:
        errors = e.errors()  # a misspelt key is also a missing one: say which it is
        first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
        line = _line_of(text, first["loc"])
        where = f"{source}:{line}" if line else source
        key = ".".join(str(part) for part in first["loc"])
        raise RecipeError(f"{where}: {key}: {_reason(first)}", hint=_hint(first)) from e


_REASONS = {  # in the words of TOML, where pydantic's are those of Python
    "tuple_type": "it must be a list",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
    "bool_type": "it must be true or false",
    "too_short": "it must not be empty",
}


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "missing":
        return "this key is missing"
    return _REASONS.get(error["type"]) or error["msg"].removeprefix("Value error, ")


def _hint(error: ErrorDetails) -> str | None:
    if error["type"] != "extra_forbidden":
        return None
    model: type[BaseModel] = Recipe
    for part in error["loc"][:-1]:
        if isinstance(part, str):
            model = _section_of(model.model_fields[part].annotation)
    return _suggest(str(error["loc"][-1]), model.model_fields, "key")


def _section_of(annotation: Any) -> type[BaseModel]:
    """The section in ``Section`` or ``tuple[Section, ...]``."""
    candidates = (annotation, *get_args(annotation))
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def _line_of(text: str, loc: tuple[int | str, ...]) -> int | None:
    """The line (from 1) of the deepest key of ``loc`` that has a line of its own; tomllib keeps no positions."""
    wanted = tuple(part for part in loc if isinstance(part, str))
    table: tuple[str, ...] = ()
    entry = -1  # index of the current [[table]] among those of its name
    best: tuple[int, int] | None = None  # (how deep, line)
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\- ]+?)\s*\]", line):
            name = tuple(header[2].replace(" ", "").split("."))
            entry = (entry + 1 if name == table else 0) if header[1] == "[[" else -1
            table, path = name, name
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            path = (*table, *key[1].split("."))
        else:
            continue
        if entry >= 0 and entry not in loc:
            continue
        if path == wanted[: len(path)] and (best is None or len(path) > best[0]):
            best = len(path), number
    return best[1] if best else None
