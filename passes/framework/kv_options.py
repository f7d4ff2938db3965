"""How many key/value heads each attention is to have, and how they are made of those there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from enginewright.plugins.shared.errors import RecipeError

KvMethod = Literal["calibrated", "mean"]
"""``mean``: heads are averaged. ``calibrated``: fitted to what attention computes on calibration tokens."""

KvGrouping = Literal["similar", "neighbours"]
"""Which heads become one: those that compute alike on calibration tokens, or those that lie side by side."""


@dataclass(frozen=True)
class KvHeadsOverride:
    """A number of heads for the attentions whose path matches ``layers``, a shell pattern such as ``*.layers.3.*``."""

    layers: str
    kv_heads: int


@dataclass(frozen=True)
class KvOptions:
    """What a recipe says of key/value heads.

    Attributes:
        kv_heads: of the attentions that no override names; None: these keep theirs.
        overrides: the first that matches an attention's path counts.
        method, grouping: how heads become fewer.
        recipe: its name, for errors.
    """

    kv_heads: int | None = None
    overrides: tuple[KvHeadsOverride, ...] = ()
    method: KvMethod = "calibrated"
    grouping: KvGrouping = "similar"
    recipe: str = ""

    @property
    def calibrated(self) -> bool:
        """Whether calibration tokens are looked at."""
        return self.method == "calibrated" or self.grouping == "similar"

    def heads_of(self, path: str, present: int) -> int:
        """How many heads the attention at ``path`` is to have, of as many as are ``present``."""
        named = next((o.kv_heads for o in self.overrides if fnmatchcase(path, o.layers)), self.kv_heads)
        return present if named is None else named

    def check(self, present: Mapping[str, int]) -> None:
        """Whether the attentions of a model, by path, can have these numbers of heads.

        Args:
            present: how many each has.

        Raises:
            RecipeError: a number doesn't divide a layer's or is more; a pattern matches nothing, or earlier ones match
                it all; or no layer would have fewer.
        """
        name = f"recipe {self.recipe}: attention"
        left = set(present)
        for override in self.overrides:
            own = {path for path in present if fnmatchcase(path, override.layers)}
            if not own & left:
                what = "matches no attention" if not own else "has no effect: earlier overrides match all that it does"
                paths = sorted(present)
                raise RecipeError(
                    f"{name}.overrides: layers {override.layers!r} {what}",
                    hint=f"Attentions are called {paths[0]} to {paths[-1]}." if paths else "The model has none.",
                )
            left -= own
        for path, heads in present.items():
            wanted = self.heads_of(path, heads)
            divisors = [d for d in range(1, heads + 1) if heads % d == 0]
            if wanted > heads:
                raise RecipeError(
                    f"{name}: kv_heads is {wanted} for {path}, which has {heads}",
                    hint=f"Heads can only become fewer: {_listed(divisors)}.",
                )
            if heads % wanted:
                raise RecipeError(
                    f"{name}: kv_heads is {wanted} for {path}, which does not divide its {heads}",
                    hint=f"Take one of {_listed(divisors)}.",
                )
        if all(self.heads_of(path, heads) == heads for path, heads in present.items()):
            have = _listed(sorted(set(present.values())))
            raise RecipeError(
                f"{name}: every attention has as many key/value heads as it is to have ({have})",
                hint="Take fewer, or leave [attention] out.",
            )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
