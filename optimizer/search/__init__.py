"""Searches under a budget: formats, key/value heads, and what goes of a model."""

from .compose import Searched, Searching, search, search_shapes
from .formats import check_bytes
from .report import (
    RECIPE_COMMENT,
    RECIPE_FILE,
    AutoReport,
    Candidate,
    KvHeadsReport,
    PruneReport,
    heads_report,
)

__all__ = [
    "RECIPE_COMMENT",
    "RECIPE_FILE",
    "AutoReport",
    "Candidate",
    "KvHeadsReport",
    "PruneReport",
    "Searched",
    "Searching",
    "check_bytes",
    "heads_report",
    "search",
    "search_shapes",
]
