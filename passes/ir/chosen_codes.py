"""Quantized weights whose integers a calibrated pass has chosen, stored in memory or in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .kept import keep
from .prequantized import CodeFormat, Codes, Prequantized
from .weights import InPlaceOf, WeightExpr


@dataclass(frozen=True)
class ChosenCodes(InPlaceOf, Prequantized):
    """Integers in place of ``base`` [.., N, K], with the provenance of its rows. Two are equal if their bits are.

    Attributes:
        format: the format of the integers.
        digest: the digest of their bits.
        read: returns them.
    """

    of_source = False
    format: CodeFormat
    digest: str
    read: Callable[[], Codes] = field(compare=False, repr=False)

    @staticmethod
    def of(base: WeightExpr, code_format: CodeFormat, codes: Codes, file: Path | None = None) -> ChosenCodes:
        """Returns an expression of ``codes`` in place of ``base``, with the codes stored in ``file``; in memory if it
        is None.

        The file is read each time that the codes are needed. Raises CapacityError naming the file if it can't be
        written.
        """
        tensors = codes.tensors
        digest, read = keep(tensors, file)
        return ChosenCodes(base, code_format, digest, lambda: Codes(*read()))

    @property
    def code_format(self) -> CodeFormat:
        return self.format

    def codes(self) -> Codes:
        return self.read()

    def describe(self) -> str:
        return f"chosen({self.base.describe()}, {self.format.group_size}, {self.digest[:8]})"
