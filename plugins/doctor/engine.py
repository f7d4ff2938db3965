"""The declaration of an engine that ``optimize doctor --run`` and ``optimize build --check`` check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from enginewright.runtime.shared.contracts import FloatArray


@dataclass(frozen=True)
class Engine:
    """An engine that can be checked: ``ENGINE`` of a target's module ``serve.doctor``.

    If `LLM` doesn't run the target, its module ``compile.check`` has a class ``Opened``, called with a bundle, the
    target's name, the context and the tokens of each answer. Its objects implement ``Runs``.

    Attributes:
        name: the engine's name, for people.
        packages: the Python packages whose versions a report names.
        exported_for: returns the compute capability, for an export, that suits a GPU of another capability.
    """

    name: str
    packages: tuple[str, ...]
    exported_for: Callable[[str], str] = str


class Runs(Protocol):
    """An opened target of a bundle."""

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Returns the logits after every token of a text: [S] -> [S, V]."""

    def tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the likeliest next tokens of each prompt; all prompts run together."""

    def info(self) -> dict[str, Any]:
        """Returns notes on the run, by name; "graph_launches" counts the steps that a CUDA graph replayed."""
