"""``--max-memory``: limits an export's memory, and reports the memory used."""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.optimizer.measure.source_runner import KEEP_BYTES
from enginewright.optimizer.shared.resources import peak_rss_bytes, rss_bytes
from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.memory import parse_size, return_large_blocks_at_once

from .report import MemoryReport

LEAST_ROOM = 64 << 20
"""The bytes that the export of the smallest model needs in addition to the process's present memory."""

_SHARE = 4
"""The share of the budget for weights that are kept. Activations and computed weights need the rest."""


@dataclass(frozen=True)
class MemoryLimit:
    """The most bytes of resident memory of the process; None for no limit."""

    limit: int | None

    @staticmethod
    def parse(value: int | str | None) -> MemoryLimit:
        """Parses a limit such as "4GiB".

        Raises:
            RequestError: it isn't a size.
            CapacityError: the process already uses that much, or nearly; the text has the least possible limit.
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
        """Returns the bytes that the process may still use; None without a limit."""
        return None if self.limit is None else max(0, self.limit - rss_bytes())

    def keep_bytes(self) -> int:
        """Returns the bytes of evaluated weights that may stay in memory instead of being read again."""
        budget = self.memory_budget()
        return KEEP_BYTES if budget is None else min(KEEP_BYTES, budget // _SHARE)

    def cache_bytes(self) -> int | None:
        """Returns the limit of keys and values in bytes while sampling from the model; None for no limit."""
        budget = self.memory_budget()
        return None if budget is None else budget // _SHARE

    def report(self) -> MemoryReport | None:
        """Returns a report of the peak memory against the limit, after the work is done; None without a limit."""
        if self.limit is None:
            return None
        peak = peak_rss_bytes()
        return MemoryReport(self.limit, peak, peak <= self.limit)
