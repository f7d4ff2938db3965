"""Capture: a Hugging Face directory, a GGUF file or a live transformers model becomes a Program.

Loaded when it is used: a machine without torch finds sources and names them with the other modules of this folder.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture_model import CapturedModel, build_from_directory, build_from_gguf, build_from_source, capture

__all__ = ["CapturedModel", "build_from_directory", "build_from_gguf", "build_from_source", "capture"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import capture_model

    return getattr(capture_model, name)
