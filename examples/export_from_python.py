"""Exports a model and shows what the export did. Needs enginewright[export].

python examples/export_from_python.py SmolLM2-135M-Instruct smollm2.bundle
"""

from __future__ import annotations

import sys

import enginewright as ew


def main(model: str, bundle: str) -> None:
    """Exports ``model`` (a Hugging Face folder or a GGUF file) to ``bundle``."""
    report = ew.export(
        model,
        bundle,
        recipe="f32",
        targets=["cpu"],
        overwrite=True,
        progress=lambda event: print(f"{event.stage} {event.done}/{event.total} {event.detail}", file=sys.stderr),
    )
    print(f"{report.path}: {report.bundle_bytes / 1e6:.1f} MB in {report.seconds:.1f} s")
    for summary in report.passes:
        if summary.matched:
            print(f"  {summary.name}: {summary.matched}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
