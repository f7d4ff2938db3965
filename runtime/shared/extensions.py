"""Additions of other packages to Enginewright: targets and passes, found through entry points when they are named.

A package declares them in its pyproject.toml; see docs/build/extending.md. The package is imported only when a recipe,
a command or a bundle names its addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Generic, TypeVar

from .errors import TargetError

T = TypeVar("T")


def package_of(thing: object) -> str | None:
    """Returns the name of the distribution that has the class of ``thing``; None if that is Enginewright."""
    module = type(thing).__module__.partition(".")[0]
    if module == __name__.partition(".")[0]:
        return None
    return next(iter(metadata.packages_distributions().get(module, ())), module)


class Extensible(Mapping[str, T], Generic[T]):
    """A table of ours, extended by entries that packages declare in the group of entry points ``group``.

    Our entries can't be replaced. Names can be listed and tested without importing anything.
    """

    def __init__(self, own: Mapping[str, T], group: str, kind: type) -> None:
        self._own, self._group, self._kind = own, group, kind
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        """Returns the entry. Raises KeyError for an unknown name, TargetError if its package can't be loaded."""
        if name in self._own:
            return self._own[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._declared()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *sorted(self._declared()))))

    def __len__(self) -> int:
        return len(self._own.keys() | self._declared().keys())

    def _declared(self) -> dict[str, metadata.EntryPoint]:
        return {entry.name: entry for entry in metadata.entry_points(group=self._group)}

    def _load(self, name: str) -> T:
        entry = self._declared()[name]
        package = entry.dist.name if entry.dist is not None else entry.module
        try:
            loaded: T = entry.load()
        except (ImportError, AttributeError) as e:
            raise TargetError(
                f"{name}: package {package} declares it as {entry.value}, which can't be loaded: {e}",
                hint=f"Install {package} again, or take its name out of what you asked for.",
            ) from e
        if not isinstance(loaded, self._kind):
            raise TargetError(
                f"{name}: package {package} declares {entry.value}, which is {type(loaded).__name__} and not "
                f"{self._kind.__name__}",
                hint="See docs/build/extending.md for what an entry point names.",
            )
        return loaded
