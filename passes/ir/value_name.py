"""Names of the values in a model: a module's path, and which of its values it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .provenance import layer_path

What = Literal["input", "output", "query", "key", "value", "context", "logits"]
"""Which value of a module a name means.

``input`` and ``output`` are for modules without submodules: a linear, a norm, an activation, an embedding. ``query``,
``key`` and ``value`` are the inputs of attention, after any rotation; ``context`` is its output.
"""

_PLAIN: Mapping[What, str] = {
    "input": "input of",
    "output": "output of",
    "query": "query, as attention gets it, of",
    "key": "key, as attention gets it, of",
    "value": "value, as attention gets it, of",
    "context": "what attention gives in",
}


@dataclass(frozen=True, order=True)
class ValueName:
    """A value's name.

    Attributes:
        path: the path of the module; "" for the logits.
        what: which of the module's values it is.
    """

    path: str
    what: What

    def __str__(self) -> str:
        return "logits" if self.what == "logits" else f"{_PLAIN[self.what]} {self.path}"

    @property
    def layer(self) -> str:
        """The path of the module's layer, such as "model.layers.3"; "" outside of layers."""
        return layer_path(self.path)


LOGITS = ValueName("", "logits")
