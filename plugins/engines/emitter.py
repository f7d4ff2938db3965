"""The common base of the emitters of TensorRT engines."""

from __future__ import annotations

import importlib.util

from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.base import Pass
from enginewright.passes.quantization.dequantize_tables import DequantizeTables
from enginewright.passes.quantization.requantize_offsets import RequantizeOffsets
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.kv_formats import SCALED_CACHES


class EnginesEmitter:
    """The base of an emitter of engines.

    Attributes:
        name: the target's name.
    """

    name: str

    def passes(self) -> list[Pass]:
        """Returns the target's own passes: rounding of caches, tables of floats (TensorRT can't gather integers), and
        int4 without offsets.

        TensorRT fuses ops itself.
        """
        return [RoundKvCache(SCALED_CACHES), DequantizeTables(), RequantizeOffsets()]

    def check_packages(self, packages: tuple[str, ...], purpose: str, hint: str) -> None:
        """Raises MissingDependencyError for the first package that isn't installed.

        Args:
            packages: the import names of the packages.
            purpose: the work that needs them, for the message.
            hint: the error's hint, in which {} is replaced by the package's name.
        """
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(
                    f"target {self.name}: {purpose} needs {package}, which is not installed", hint=hint.format(package)
                )
