"""Which format the weight of each module gets: a default, and overrides by module path."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from enginewright.plugins.shared.contracts import WeightFormat

Method = Literal["nearest", "gptq", "awq"]
"""How integers are chosen: each by itself to the nearest, or by what a layer gives on calibration tokens."""

Sparsify = Literal["magnitude", "wanda", "sparsegpt"]
"""How the two of every four weights that a sparse format keeps are chosen: see ``passes/sparsity/choose_kept.py``."""


@dataclass(frozen=True)
class GptqOptions:
    """How GPTQ goes through a weight's columns.

    Attributes:
        damping: what is added to the Hessian's diagonal, as a share of its mean. The paper has 0.01, which fits what a
            few thousand tokens happen to show: docs/inside/notes-quantization.md has errors on held-out tokens.
        activation_order: columns of the largest inputs come first; otherwise as they are stored.
    """

    damping: float = 0.1
    activation_order: bool = True


@dataclass(frozen=True)
class FormatOverride:
    """A format for the modules whose path matches ``layers``, a shell pattern such as ``*.mlp.down_proj``."""

    layers: str
    format: WeightFormat


@dataclass(frozen=True)
class WeightFormats:
    """The first override that matches a module's path counts, else the default.

    ``embeddings`` is the default of token tables and of the product that gives the logits. ``keep_blocks``: a weight
    that its file holds in blocks of a format that can be made keeps it, whatever the default. ``method``: how integers
    of 4 bits are chosen where they are; ``gptq`` is for that method. ``sparsify``: which weights formats of sparsity
    2:4 keep.
    """

    default: WeightFormat = field(default_factory=WeightFormat)
    overrides: tuple[FormatOverride, ...] = ()
    embeddings: WeightFormat | None = None
    keep_blocks: bool = False
    method: Method = "nearest"
    sparsify: Sparsify = "wanda"
    gptq: GptqOptions = GptqOptions()

    def override_of(self, path: str) -> FormatOverride | None:
        """The override for the module at ``path``, if there is one."""
        return next((o for o in self.overrides if fnmatchcase(path, o.layers)), None)
