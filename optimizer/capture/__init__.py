"""Captures a model as a Program, from a Hugging Face directory, a GGUF file or a live transformers model.

Functions are imported on first use, so that the modules that find a source work without torch.
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
