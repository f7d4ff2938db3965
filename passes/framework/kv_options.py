"""A recipe's options for attention: the format and number of key/value heads, and the part of the context that is
read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE
from enginewright.runtime.shared.errors import RecipeError
from enginewright.runtime.shared.kv_formats import CACHES, ROTATED_CACHES, CacheDtype

from ..formats.section import Section

KvMethod = Literal["calibrated", "mean"]
"""The method by which heads are merged. ``mean`` averages them; ``calibrated`` fits one head to the results of
attention on calibration tokens.
"""

KvGrouping = Literal["similar", "neighbours"]
"""The heads that are merged into one: ``similar`` groups those with similar results on calibration tokens,
``neighbours`` adjacent ones.
"""


AUTO = "auto"
"""The ``dtype`` of a recipe that leaves the choice of a format for each layer to the export."""


class CacheOverride(Section):
    """A cache format for attentions whose path matches ``layers``, a shell pattern: ``*.layers.3.*``."""

    layers: str = Field(min_length=1)
    dtype: str

    @field_validator("dtype")
    @classmethod
    def _dtype_exists(cls, value: str) -> str:
        return _existing(value)


class CacheOptions(Section):
    """[kv_cache] of a recipe: one format for all layers, or one for each by number or by a budget.

    Attributes:
        dtype: the storage format of keys and values, a key of ``kv_formats.CACHES``; ``AUTO`` for the formats with the
            least KL divergence within ``max_bytes_per_token``; None for the target's default.
        overrides: formats for some attentions; the first that matches the path counts.
        max_bytes_per_token: with ``AUTO``, the most cache bytes per token, over all layers. The ends of requests
            (``KvFormat.ends``) aren't counted.
        candidates: with ``AUTO``, the formats to choose from.
        tokens: with ``AUTO``, the most tokens of the sequence that a layer is measured with; large models use fewer.
    """

    dtype: str | None = None
    overrides: tuple[CacheOverride, ...] = ()
    max_bytes_per_token: int | None = Field(default=None, gt=0)
    candidates: tuple[str, ...] = Field(default=("bf16", *ROTATED_CACHES), min_length=2)
    tokens: int = Field(default=1024, ge=512)

    @field_validator("dtype")
    @classmethod
    def _dtype_exists(cls, value: str | None) -> str | None:
        return value if value is None or value == AUTO else _existing(value)

    @field_validator("candidates")
    @classmethod
    def _candidates_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_existing(name) for name in value)

    @model_validator(mode="after")
    def _auto_has_a_budget(self) -> Self:
        if self.searched and self.max_bytes_per_token is None:
            raise ValueError("dtype 'auto' needs max_bytes_per_token: the most cache bytes of a token, over all layers")
        if self.searched and self.overrides:
            raise ValueError("dtype 'auto' chooses the format of every layer: leave overrides out")
        if not self.searched and self != CacheOptions.model_construct(dtype=self.dtype, overrides=self.overrides):
            raise ValueError("max_bytes_per_token, candidates and tokens are for dtype 'auto' alone")
        if self.overrides and self.dtype is None:
            raise ValueError("overrides need a dtype, which the other layers have")
        return self

    @property
    def searched(self) -> bool:
        """True if a budget decides the formats."""
        return self.dtype == AUTO

    @property
    def default(self) -> CacheDtype | None:
        """The format of layers without an override; before a search its first candidate. None if there is none."""
        if self.dtype is None:
            return None
        return CACHES[self.candidates[0] if self.searched else self.dtype]

    @property
    def named(self) -> dict[str, str]:
        """The formats that layers have or may get, by their keys in the recipe."""
        if self.searched:
            return {f"kv_cache.candidates.{i}": name for i, name in enumerate(self.candidates)}
        each = {f"kv_cache.overrides.{i}.dtype": override.dtype for i, override in enumerate(self.overrides)}
        return each if self.dtype is None else {"kv_cache.dtype": self.dtype, **each}

    def override_of(self, path: str) -> CacheDtype | None:
        """Returns the format that an override gives the attention at ``path``; None if there is none."""
        return next((CACHES[o.dtype] for o in self.overrides if fnmatchcase(path, o.layers)), None)

    def check(self, paths: Collection[str], recipe: str) -> None:
        """Raises RecipeError if the pattern of an override matches none of the attentions at ``paths``, or only those
        that earlier patterns match. ``recipe`` is the recipe's name, for the error.
        """
        _check_patterns([o.layers for o in self.overrides], paths, f"recipe {recipe}: kv_cache")


class KvHeadsOverride(Section):
    """The number of key/value heads of attentions whose module path matches ``layers``, a shell pattern such as
    ``*.layers.3.*``.
    """

    layers: str = Field(min_length=1)
    kv_heads: int = Field(ge=1)


class KvOptions(Section):
    """[attention] of a recipe: fewer key/value heads than the model has, as a number or by a limit.

    Attributes:
        kv_heads: the number of heads of attentions without an override; None keeps the model's number.
        overrides: numbers for some attentions; the first whose pattern matches the module path applies.
        max_kl: a limit of the KL divergence from the original model, in nats per token. A search chooses the fewest
            heads within it.
        max_cache_bytes_per_token: a limit of the cache bytes per token, over all layers. A search chooses the heads
            with the least error within it.
        method, grouping: how heads are merged, and which.
        tokens: the most tokens on which a search measures a layer; it uses fewer for large models.
    """

    kv_heads: int | None = Field(default=None, ge=1)
    overrides: tuple[KvHeadsOverride, ...] = ()
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_cache_bytes_per_token: int | None = Field(default=None, gt=0)
    method: KvMethod = "calibrated"
    grouping: KvGrouping = "similar"
    tokens: int = Field(default=256, ge=16)

    @property
    def searched(self) -> bool:
        """True if a search chooses the numbers of heads within a limit."""
        return self.max_kl is not None or self.max_cache_bytes_per_token is not None

    @property
    def calibrated(self) -> bool:
        """True if merging or searching heads needs calibration tokens."""
        return self.searched or self.method == "calibrated" or self.grouping == "similar"

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        fixed = self.kv_heads is not None or bool(self.overrides)
        if fixed and self.searched:
            raise ValueError("kv_heads says what max_kl or max_cache_bytes_per_token would look for: give one of them")
        if not fixed and not self.searched:
            raise ValueError("it needs kv_heads, or a budget: max_kl or max_cache_bytes_per_token")
        return self

    def heads_of(self, path: str, present: int) -> int:
        """Returns the recipe's number of key/value heads for the attention at the module path ``path``.

        ``present`` is the model's number, which is returned if the recipe has none.
        """
        named = next((o.kv_heads for o in self.overrides if fnmatchcase(path, o.layers)), self.kv_heads)
        return present if named is None else named

    def check(self, present: Mapping[str, int], recipe: str) -> None:
        """Checks that the attentions of a model can have these numbers of heads.

        Args:
            present: the path of each attention -> its number of heads.
            recipe: the recipe's name, for errors.

        Raises:
            RecipeError: a number is larger than a layer's or doesn't divide it; a pattern matches nothing, or only
                attentions that earlier patterns match; or no layer would have fewer heads.
        """
        name = f"recipe {recipe}: attention"
        _check_patterns([override.layers for override in self.overrides], present, name)
        for path, heads in present.items():
            kv_heads = self.heads_of(path, heads)
            divisors = [d for d in range(1, heads + 1) if heads % d == 0]
            if kv_heads > heads:
                raise RecipeError(
                    f"{name}: kv_heads is {kv_heads} for {path}, which has {heads}",
                    hint=f"Heads can only become fewer: {_listed(divisors)}.",
                )
            if heads % kv_heads:
                raise RecipeError(
                    f"{name}: kv_heads is {kv_heads} for {path}, which does not divide its {heads}",
                    hint=f"Take one of {_listed(divisors)}.",
                )
        if all(self.heads_of(path, heads) == heads for path, heads in present.items()):
            have = _listed(sorted(set(present.values())))
            raise RecipeError(
                f"{name}: every attention has as many key/value heads as it is to have ({have})",
                hint="Take fewer, or leave [attention] out.",
            )


class ContextOptions(Section):
    """[adaptive_context] of a recipe: attention reads only the part of a long context that matters for a token.

    Keys are chosen in blocks of 32, separately for each token, layer and key/value head. ``best``, ``first`` and
    ``last`` are multiples of 32.

    Attributes:
        best: the number of keys that are chosen between the first and the last keys.
        first, last: the numbers of keys that are always read, at the beginning and right before the token's own block.
        below: tokens at positions below this one read all keys.
        whole_layers: the first layers, this many, read the whole context.
    """

    best: int = Field(ge=KV_BLOCK_SIZE)
    first: int = Field(default=64, ge=0)
    last: int = Field(default=256, ge=0)
    below: int = Field(default=0, ge=0)
    whole_layers: int = Field(default=2, ge=0)

    @model_validator(mode="after")
    def _whole_blocks(self) -> Self:
        for name in ("best", "first", "last"):
            if getattr(self, name) % KV_BLOCK_SIZE:
                raise ValueError(f"{name} is {getattr(self, name)}, which isn't a multiple of {KV_BLOCK_SIZE}")
        return self

    @property
    def choice(self) -> tuple[int, int, int, int]:
        """The options as the argument ``choice`` of ``ew.paged_attention``: (first, last, best) in blocks, and
        ``below``.
        """
        first, last, best = (n // KV_BLOCK_SIZE for n in (self.first, self.last, self.best))
        return first, last, best, self.below


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _existing(name: str) -> str:
    if name not in CACHES:
        raise ValueError(f"{name!r} can't be made for a KV cache yet, only {', '.join(CACHES)}")
    return name


def _check_patterns(patterns: Sequence[str], paths: Collection[str], name: str) -> None:
    """Raises RecipeError if one of the ``patterns`` of the overrides of section ``name`` has no effect on ``paths``."""
    left = set(paths)
    for pattern in patterns:
        matching = {path for path in paths if fnmatchcase(path, pattern)}
        if not matching & left:
            what = "matches no attention" if not matching else "has no effect: earlier overrides match all that it does"
            known = sorted(paths)
            raise RecipeError(
                f"{name}.overrides: layers {pattern!r} {what}",
                hint=f"Attentions are called {known[0]} to {known[-1]}." if known else "The model has none.",
            )
        left -= matching
