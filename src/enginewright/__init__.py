"""Enginewright: compiles a language model to a bundle, and serves bundles.

Importing this package loads nothing; every name is loaded when it is first used (PEP 562). ``export`` and
``recover`` need ``enginewright[export]``; everything else runs without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .optimizer.export import export
    from .optimizer.recover import RecoverOptions, recover
    from .runtime.engine.llm import LLM
    from .runtime.requests.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        Classification,
        CompletionOutput,
        RequestMetrics,
        RequestOutput,
        StreamPiece,
        TokenLogprobs,
    )
    from .runtime.requests.sampling import BeamSearchParams, SamplingParams
    from .runtime.requests.structured import StructuredOutputsParams
    from .runtime.scheduler.options import Scheduling
    from .runtime.shared.errors import (
        BundleError,
        CapacityError,
        ComparisonError,
        ContextError,
        EnginewrightError,
        MissingDependencyError,
        OffloadError,
        OverloadError,
        PartialExportError,
        PassError,
        RecipeError,
        RequestError,
        SourceError,
        TargetError,
        TrustError,
        UnsupportedModelError,
        VerificationError,
    )

    __version__: str

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BundleError",
    "CapacityError",
    "Classification",
    "ComparisonError",
    "CompletionOutput",
    "ContextError",
    "EnginewrightError",
    "MissingDependencyError",
    "OffloadError",
    "OverloadError",
    "PartialExportError",
    "PassError",
    "RecipeError",
    "RecoverOptions",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Scheduling",
    "SourceError",
    "StreamPiece",
    "StructuredOutputsParams",
    "TargetError",
    "TokenLogprobs",
    "TrustError",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
    "export",
    "recover",
]

_MODULES = {
    "LLM": "runtime.engine.llm",
    "BeamSearchOutput": "runtime.requests.outputs",
    "BeamSearchParams": "runtime.requests.sampling",
    "BeamSearchSequence": "runtime.requests.outputs",
    "Classification": "runtime.requests.outputs",
    "CompletionOutput": "runtime.requests.outputs",
    "RecoverOptions": "optimizer.recover",
    "RequestMetrics": "runtime.requests.outputs",
    "RequestOutput": "runtime.requests.outputs",
    "SamplingParams": "runtime.requests.sampling",
    "Scheduling": "runtime.scheduler.options",
    "StreamPiece": "runtime.requests.outputs",
    "StructuredOutputsParams": "runtime.requests.structured",
    "TokenLogprobs": "runtime.requests.outputs",
    "export": "optimizer.export",
    "recover": "optimizer.recover",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .runtime.shared.errors import MissingDependencyError

    with MissingDependencyError.of_export(f"{__name__}.{name}"):
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'runtime.shared.errors')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
