"""The recipe ``auto``: formats chosen unit by unit, by what each costs."""

from .formats_for_export import RECIPE_COMMENT, RECIPE_FILE, check_bytes, choose_for_export
from .formats_report import AutoReport, FormatOption, ParetoPoint, UnitChoice
from .search_formats import Choice, choose_automatically

__all__ = [
    "RECIPE_COMMENT",
    "RECIPE_FILE",
    "AutoReport",
    "Choice",
    "FormatOption",
    "ParetoPoint",
    "UnitChoice",
    "check_bytes",
    "choose_automatically",
    "choose_for_export",
]
