"""A recipe, the settings of an export: its class, the built-in recipes, and loading from TOML.

The result of an export depends only on the source and the recipe. Unknown keys are errors, and no environment variable
changes a result.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    StrictBool,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from enginewright.passes.formats.section import Section
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.kv_options import AUTO
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.framework.weight_formats import WeightFormats, chooses
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.executors.open import TARGETS
from enginewright.runtime.shared.errors import RecipeError
from enginewright.runtime.shared.kv_formats import CACHES, CacheDtype
from enginewright.runtime.shared.memory import parse_size
from enginewright.runtime.shared.targets import MEASURED, OWN, part
from enginewright.runtime.shared.weight_formats import FORMATS

from .bucket_section import BucketsSection
from .sections import (
    DEFAULT_CACHE,
    AutoSection,
    BudgetSection,
    CalibrationSection,
    PoolingSection,
    builtin_files,
)

TargetName = Annotated[str, Field(min_length=1)]


class Recipe(PassOptions):
    """The settings of an export.

    Attributes:
        passes: optional passes to turn on or off, by name. If a pass that is turned on matches nothing, that is an
            error. A pass that isn't named is applied where it matches.
        context_length: the longest request in tokens. Rotary frequencies that depend on this length are fixed for it.
            None takes the longest length without such scaling, or else the model's maximum.

    A table with the name of a target, such as [tvm], is for that target alone: its package defines the table's keys
    (``recipe.TABLE``). Tables of our own targets are None if a recipe has none.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SerializeAsAny[Section] | None]

    name: str = Field(min_length=1)
    description: str = ""
    targets: tuple[TargetName, ...] = Field(default=(MEASURED,), min_length=1)
    context_length: int | None = Field(default=None, gt=0)
    passes: dict[str, StrictBool] = Field(default_factory=dict)
    budget: BudgetSection = BudgetSection()
    calibration: CalibrationSection = CalibrationSection()
    auto: AutoSection | None = None
    buckets: BucketsSection | None = None
    pooling: PoolingSection | None = None
    engines: EnginesSection | None = None

    def target_tables(self) -> tuple[Section, ...]:
        """Returns the tables of the recipe that are for a single target, such as [tvm]."""
        return tuple(table for table in self.__pydantic_extra__.values() if table is not None)

    @property
    def exact(self) -> bool:
        """True if the exported model equals the source: no part is removed, and all numbers are 32-bit floats."""
        whole = self.prune is None and self.attention is None and self.adaptive_context is None
        return whole and not self.rounded

    @property
    def rounded(self) -> bool:
        """True if a weight, activation or cache entry may have less precision than a 32-bit float."""
        return set(self.caches) != {"f32"} or self._rounded_weights

    @property
    def cache(self) -> CacheDtype:
        """The storage type of keys and values on targets with such caches.

        If the recipe leaves it open, it is 32-bit floats for a recipe whose weights are 32-bit floats, and the default
        cache otherwise.
        """
        return self.kv_cache.default or (DEFAULT_CACHE if self._rounded_weights else "f32")

    @property
    def _rounded_weights(self) -> bool:
        return not self.weights.exact or self.auto is not None

    @property
    def sparse(self) -> bool:
        """Returns True if weights may keep only two of every four values."""
        return any(f.sparsity != "dense" for f in self._formats)

    @property
    def pruning(self) -> Pruning | None:
        """The section [prune], changed so that the remaining columns fit the groups of every possible weight format."""
        if self.prune is None:
            return None
        pruning = self.prune.fitting(self._formats)
        if self.auto is None or self.auto.candidates is not None:
            return pruning
        stored = (f for f in FORMATS.values() if f.layout is not None)
        every = (size for f in stored for size in (*f.group_sizes, f.multiple) if size)
        return pruning.model_copy(update={"multiple": lcm(pruning.multiple, *every)})

    @property
    def _formats(self) -> tuple[WeightFormat, ...]:
        """All weight formats that the recipe names, candidates included."""
        return (*self.weights.formats, *((self.auto.candidates or ()) if self.auto is not None else ()))

    @property
    def searched(self) -> bool:
        """Returns True if a budget decides on formats or shapes, which exports search for before their passes."""
        heads = self.attention is not None and self.attention.searched
        pruned = self.prune is not None and self.prune.max_kl is not None
        return self.auto is not None or heads or pruned or self.kv_cache.searched

    @model_validator(mode="before")
    @classmethod
    def _read_target_tables(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        others = {key: entry for key, entry in value.items() if key not in cls.model_fields}
        names = dict.fromkeys((*_OWN_TABLES, *(str(key) for key in others)))
        tables = _tables(tuple(names)).model_validate(others)  # its errors name the keys as they are in the recipe
        return {**value, **dict(tables)}

    @model_validator(mode="after")
    def _auto_fits(self) -> Self:
        method = self.weights.method
        every = self.auto is not None and self.auto.candidates is None
        if method != "nearest" and not every and not any(chooses(method, f) for f in self._formats):
            of = "int4" if method == "awq" else "fewer than 8 bits"
            raise ValueError(f"method {method!r} chooses integers of {of}, which no format here has")
        if self.weights.sparsify is not None and not self.sparse:
            raise ValueError(f"sparsify {self.weights.sparsify!r} is for formats of sparsity '2:4', which none here is")
        if self.weights.keep_blocks and (remade := self._remade):
            raise ValueError(
                f"weights.keep_blocks keeps a file's integers, and {remade} makes other weights of them: leave one out"
            )
        if self.weights.sparsify == "sparsegpt" and method == "awq":
            raise ValueError("sparsify 'sparsegpt' chooses integers too, so that method can't be 'awq'")
        if self.auto is None:
            return self
        if self.budget == BudgetSection():
            raise ValueError("[auto] needs a budget: max_kl, max_bytes or max_ms_per_token in [budget]")
        if self.weights != WeightFormats(method=method, gptq=self.weights.gptq, sparsify=self.weights.sparsify):
            raise ValueError("[auto] chooses all formats: leave all but the method out of [weights]")
        if self.shares and self.budget.max_kl is None:
            raise ValueError(
                f"[auto] beside {' and '.join(self.shares)} with a max_kl needs max_kl in [budget]: what all may cost "
                "together, of which formats have the rest"
            )
        return self

    @property
    def _remade(self) -> str:
        """The name of the section that fits weights anew or changes their rows and columns; "" if none does.

        Sections that only remove whole layers don't count.
        """
        if self.attention is not None:
            return "[attention]"
        within = self.prune is not None and (self.prune.channels or self.prune.heads or self.prune.overrides)
        return "[prune]" if within else ""

    @property
    def shares(self) -> dict[str, float]:
        """Section that searches for shapes -> the part of the budget that it may use."""
        sections = {"[prune]": self.prune, "[attention]": self.attention}
        return {name: s.max_kl for name, s in sections.items() if s is not None and s.max_kl is not None}

    @model_validator(mode="after")
    def _shapes_fit_the_budget(self) -> Self:
        together, whole = sum(self.shares.values()), self.budget.max_kl
        if whole is None or together < whole or (together == whole and self.auto is None):
            return self
        each = " and ".join(f"{share:g} in {name}" for name, share in self.shares.items())
        left = "" if self.auto is None or together > whole else ", of which nothing is left for formats"
        raise ValueError(f"max_kl is {each}, and all together may cost {whole:g} by [budget]{left}")

    @field_validator("targets")
    @classmethod
    def _targets_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for target in value:
            if target not in TARGETS:  # our own are known without a look at what packages declare
                known = f"only {', '.join(TARGETS)} (recipes: {', '.join(builtin_files())})"
                raise ValueError(f"{target!r} can't be made for a target yet, {known}")
        return value


def _table_of(target: str) -> type[Section] | None:
    """Returns the model of a target's table in a recipe, from the target's package; None if it has none. Raises
    TargetError.
    """
    table: type[Section] | None = getattr(part(target, "recipe"), "TABLE", None)
    return table


_OWN_TABLES = tuple(name for name in OWN if _table_of(name) is not None)


@cache
def _tables(names: tuple[str, ...]) -> type[Section]:
    """Returns a class with the tables of these targets as fields. Any other key is an error."""
    kinds = {name: kind for name in names if (kind := _table_of(name)) is not None}
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in kinds.items()}
    return create_model("Tables", __base__=Section, **fields)


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Returns the built-in recipe of that name, or the recipe in that TOML file. Its paths are relative to that file.

    Raises RecipeError naming the file, the line and the key.
    """
    builtin = builtin_files()
    if str(name_or_path) in builtin:
        return _parse(builtin[str(name_or_path)].read_text(encoding="utf-8"), f"{name_or_path}.toml")
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise RecipeError(
            f"there is no recipe {str(name_or_path)!r}", hint=_suggest(str(name_or_path), builtin, "recipe")
        )
    try:
        text = read_regular(path, most=MOST_JSON_BYTES, piped=True).decode()
    except OSError as e:
        raise RecipeError(
            f"{path}: can't read the recipe: {e.strerror}", hint=_suggest(path.stem, builtin, "recipe")
        ) from e
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path}: not UTF-8 text", hint="A recipe is a TOML file.") from e
    recipe = _parse(text, str(path))
    if recipe.buckets is not None:
        recipe = recipe.model_copy(update={"buckets": recipe.buckets.beside(path.parent)})
    return recipe


def recipe_file(given: str | Path | Recipe) -> Path | None:
    """Returns the file that ``load_recipe`` would read; None for a built-in recipe's name, and for a Recipe."""
    return None if isinstance(given, Recipe) or str(given) in builtin_files() else Path(given)


def with_partitions(recipe: Recipe, partitions: Sequence[str]) -> Recipe:
    """Returns the recipe with ``partitions`` in [engines] and in the targets' tables that have such a field.

    Raises RecipeError for one that isn't a partition.
    """
    chosen: dict[str, Any] = {"partitions": tuple(partitions)}
    kinds = {name: kind for name in _OWN_TABLES if (kind := _table_of(name)) and "partitions" in kind.model_fields}
    engines = (recipe.engines or EnginesSection()).model_copy(update=chosen)
    try:
        tables = {name: kind(**chosen) for name, kind in kinds.items()}
        return recipe.model_copy(update={**tables, "engines": engines})
    except ValidationError as e:
        raise RecipeError(str(e.errors()[0]["msg"]).removeprefix("Value error, ")) from e


def with_cache(recipe: Recipe, dtype: str) -> Recipe:
    """Returns the recipe with another KV-cache format for all layers, or with ``auto`` or ``auto:BYTES``, which chooses
    one for each layer within that many bytes per token; without a number those of the recipe.

    Raises RecipeError if the format doesn't exist, or ``auto`` has no number of bytes.
    """
    name, _, size = dtype.partition(":")
    options: dict[str, Any] = {"dtype": dtype}
    if name == AUTO:
        keys = ("max_bytes_per_token", "candidates", "tokens") if recipe.kv_cache.searched else ()
        options = {"dtype": AUTO, **{key: getattr(recipe.kv_cache, key) for key in keys}}
        if size:
            options["max_bytes_per_token"] = parse_size(size, "kv_cache", least=1)
    try:
        cache = type(recipe.kv_cache).model_validate(options)
    except ValidationError as e:
        if name == AUTO:
            raise RecipeError(
                f"kv_cache: {str(e.errors()[0]['msg']).removeprefix('Value error, ')}",
                hint="Give it as --kv-cache auto:BYTES, or in [kv_cache] of the recipe.",
            ) from e
        raise RecipeError(
            f"kv_cache: there is no KV-cache format {dtype!r}", hint=_suggest(dtype, (*CACHES, AUTO), "format")
        ) from e
    return recipe.model_copy(update={"kv_cache": cache})


def list_recipes() -> list[Recipe]:
    """Returns the built-in recipes, in the order of their names."""
    return [load_recipe(name) for name in builtin_files()]


def recipe_text(name: str) -> str:
    """Returns the TOML of a built-in recipe, comments included. Raises RecipeError."""
    builtin = builtin_files()
    if name not in builtin:
        raise RecipeError(f"there is no recipe {name!r}", hint=_suggest(name, builtin, "recipe"))
    return builtin[name].read_text(encoding="utf-8")


def _suggest(word: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known {what}s: {', '.join(known)}."


def _parse(text: str, source: str) -> Recipe:
    try:
        return Recipe.model_validate(tomllib.loads(text), context=source)
    except tomllib.TOMLDecodeError as e:
        raise RecipeError(f"{source}: not TOML: {e}", hint="See docs/use/recipe-file.md for an example.") from e
    except ValidationError as e:
        errors = e.errors()  # a misspelt key is also a missing one: say which it is
        first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
        line = _line_of(text, first["loc"])
        where = f"{source}:{line}" if line else source
        key = ".".join(str(part) for part in first["loc"])
        named = f"{where}: {key}" if key else where  # what doesn't go together isn't a single key's fault
        raise RecipeError(f"{named}: {_reason(first)}", hint=_hint(first)) from e


_REASONS = {  # in the words of TOML, where pydantic's are those of Python
    "tuple_type": "it must be a list",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
    "bool_type": "it must be true or false",
    "too_short": "it must not be empty",
}


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] == "missing":
        return "this key is missing"
    return _REASONS.get(error["type"]) or error["msg"].removeprefix("Value error, ")


def _hint(error: Mapping[str, Any]) -> str | None:
    if error["type"] != "extra_forbidden":
        return None
    model: type[BaseModel] = Recipe
    for key in error["loc"][:-1]:
        if isinstance(key, str):
            field = model.model_fields.get(key)
            model = _section_of(_table_of(key) if field is None else field.annotation)
    known = (*model.model_fields, *(_OWN_TABLES if model is Recipe else ()))
    return _suggest(str(error["loc"][-1]), known, "key")


def _section_of(annotation: Any) -> type[BaseModel]:
    """Returns the class of a section, for an annotation that is the class itself or a tuple of it."""
    candidates = (annotation, *get_args(annotation))
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def _line_of(text: str, loc: tuple[int | str, ...]) -> int | None:
    """Returns the line (from 1) of the deepest key of ``loc`` that has a line, found by text as tomllib has no
    positions.
    """
    names = tuple(part for part in loc if isinstance(part, str))
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
        if path == names[: len(path)] and (best is None or len(path) > best[0]):
            best = len(path), number
    return best[1] if best else None
