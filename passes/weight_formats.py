"""Which format the weight of each module gets: a default, and overrides by module path."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from enginewright.plugins.contracts import WeightFormat


@dataclass(frozen=True)
class FormatOverride:
    """A format for the modules whose path matches ``layers``, a shell pattern such as ``*.mlp.down_proj``."""

    layers: str
    format: WeightFormat


@dataclass(frozen=True)
class WeightFormats:
    """The first override that matches a module's path counts, else the default."""

    default: WeightFormat = field(default_factory=WeightFormat)
    overrides: tuple[FormatOverride, ...] = ()

    def override_of(self, path: str) -> FormatOverride | None:
        """The override for the module at ``path``, if there is one."""
        return next((o for o in self.overrides if fnmatchcase(path, o.layers)), None)
