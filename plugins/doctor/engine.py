"""The declaration of an engine that ``optimize doctor --run`` and ``optimize build --check`` can check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from enginewright.runtime.shared.contracts import FloatArray


@dataclass(frozen=True)
class Engine:
    """An engine that can be checked: ``ENGINE`` in a target's module ``serve.doctor``.

    If `LLM` doesn't run the target, its module ``compile.check`` has a class ``Opened``, which is called with a bundle,
    the target's name, the context and the tokens of each answer. Its objects implement ``Runs``.

    Attributes:
        name: the engine's name in messages.
        packages: the Python packages whose versions a report names.
        exported_for: returns the compute capability for which to export a bundle that runs on a GPU of the given one.
    """

    name: str
    packages: tuple[str, ...]
    exported_for: Callable[[str], str] = str


class Runs(Protocol):
    """A target of a bundle, opened for a check."""

    def logits(self, ids: Sequence[int]) -> FloatArray:
        """Returns the logits after every token of a text: [S] -> [S, V]."""

    def tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the most likely next tokens of each prompt; all prompts run together."""

    def info(self) -> dict[str, Any]:
        """Returns facts about the runs, by name. "graph_launches" counts the steps that a CUDA graph replayed."""
