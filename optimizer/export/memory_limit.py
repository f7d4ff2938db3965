"""``--max-memory``: how an export keeps to a size, and what it says if it didn't."""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.optimizer.measure.source_runner import KEEP_BYTES
from enginewright.optimizer.shared.resources import peak_rss_bytes, rss_bytes
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.memory import parse_size, return_large_blocks_at_once

from .report import MemoryReport

LEAST_ROOM = 64 << 20
"""Bytes that the export of the smallest model takes in addition to the process's own."""

_SHARE = 4
"""Weights that are kept take a quarter of the budget; activations and what is being computed need the rest."""


@dataclass(frozen=True)
class MemoryLimit:
    """Most bytes that the process may have resident; None: no limit."""

    limit: int | None

    @staticmethod
    def parse(value: int | str | None) -> MemoryLimit:
        """The limit as a user gives it, such as "4GiB".

        Raises:
            RequestError: it isn't a size.
            CapacityError: the process has more already, or hardly less; says how much it needs.
        """
        if value is None:
            return MemoryLimit(None)
        limit = parse_size(value, "max_memory", least=1)
        return_large_blocks_at_once()
        needed = rss_bytes() + LEAST_ROOM
        if limit < needed:
            raise CapacityError(
                f"max_memory: {value} is too little: the process itself takes {rss_bytes():,} bytes before it begins",
                hint=f"Allow {needed:,} bytes at least, and for a large model more.",
            )
        return MemoryLimit(limit)

    def memory_budget(self) -> int | None:
        """Bytes that are left now; None without a limit."""
        return None if self.limit is None else max(0, self.limit - rss_bytes())

    def keep_bytes(self) -> int:
        """Bytes of weights that may be kept in memory where that saves reading them again."""
        budget = self.memory_budget()
        return KEEP_BYTES if budget is None else min(KEEP_BYTES, budget // _SHARE)

    def cache_bytes(self) -> int | None:
        """Bytes that keys and values may take while the model is sampled from."""
        budget = self.memory_budget()
        return None if budget is None else budget // _SHARE

    def report(self) -> MemoryReport | None:
        """Reports if the limit was kept, after the work is done; None without a limit."""
        if self.limit is None:
            return None
        peak = peak_rss_bytes()
        return MemoryReport(self.limit, peak, peak <= self.limit)
