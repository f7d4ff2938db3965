"""A recipe's options for attention: the format and number of key/value heads, and the part of the context that is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE
from enginewright.runtime.shared.errors import RecipeError
from enginewright.runtime.shared.kv_formats import CACHES

from ..formats.section import Section

KvMethod = Literal["calibrated", "mean"]
"""The method by which heads are merged. ``mean`` averages them; ``calibrated`` fits one head to the results of
attention on calibration tokens.
"""

KvGrouping = Literal["similar", "neighbours"]
"""The heads that are merged into one: ``similar`` groups those with similar results on calibration tokens,
``neighbours`` adjacent ones.
"""


class CacheOptions(Section):
    """[kv_cache] of a recipe.

    Attributes:
        dtype: the storage format of keys and values, a key of ``kv_formats.CACHES``; None for the target's default.
    """

    dtype: str | None = None

    @field_validator("dtype")
    @classmethod
    def _dtype_exists(cls, value: str | None) -> str | None:
        if value is not None and value not in CACHES:
            raise ValueError(f"{value!r} can't be made for a KV cache yet, only {', '.join(CACHES)}")
        return value


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
        left = set(present)
        for override in self.overrides:
            matching = {path for path in present if fnmatchcase(path, override.layers)}
            if not matching & left:
                what = (
                    "matches no attention"
                    if not matching
                    else "has no effect: earlier overrides match all that it does"
                )
                paths = sorted(present)
                raise RecipeError(
                    f"{name}.overrides: layers {override.layers!r} {what}",
                    hint=f"Attentions are called {paths[0]} to {paths[-1]}." if paths else "The model has none.",
                )
            left -= matching
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
