"""``optimize export``: a model becomes a bundle, stage by stage."""

from .run import export

__all__ = ["export"]
