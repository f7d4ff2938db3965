"""What is said of engines that were built: sizes, seconds, memory, and the steps that they are for."""

from __future__ import annotations

from enginewright.runtime.kv_cache.cache_groups import format_bytes

from .document import ReportDocument


def engine_lines(document: ReportDocument) -> list[str]:
    """A line for each engine, and one for the sizes of its steps; none if none was built."""
    lines = []
    for engine in document.engines:
        gpus = ", ".join(engine.compute_capabilities)
        lines.append(
            f"{engine.target}: {engine.file}: {format_bytes(engine.file_bytes)} for compute capability {gpus}, built "
            f"in {engine.seconds:.1f} s with {format_bytes(engine.peak_rss_bytes)} of memory"
        )
        lines.append(f"{engine.target}: steps of {'; '.join(engine.profiles)}")
    return lines
