"""``optimize cache``: the bundles of earlier exports, which an equal export reuses."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from enginewright.runtime.shared.errors import MissingDependencyError

from .console import print_json, reported
from .options import AsJson

EPILOG = (
    "Examples:\n\n"
    "  optimize cache\n\n"
    "  optimize cache --json\n\n"
    "  optimize cache clear\n\n"
    "  optimize export model.gguf --no-cache"
)
_ACTIONS = ("show", "clear")


@reported
def command(
    action: Annotated[
        str, typer.Argument(metavar="show|clear", help="List the cached bundles, or remove all of them.")
    ] = "show",
    as_json: AsJson = False,
) -> None:
    """Shows or removes cached bundles, which exports and other commands made from models.

    A bundle is found by a hash of the source, the recipe and Enginewright's code.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is neither {' nor '.join(_ACTIONS)}")
    with MissingDependencyError.of_export("cache: exporting"):
        from enginewright.optimizer.export.kept_exports import MOST_BYTES, KeptExports
    from enginewright.runtime.shared.memory import format_bytes

    exports = KeptExports.of_user()
    if action == "clear":
        freed = exports.clear()
        if as_json:
            print_json({"folder": None if exports.root is None else str(exports.root), "freed_bytes": freed})
        else:
            print(f"{format_bytes(freed)} removed")
        return
    entries = exports.entries()
    if as_json:
        shown = [
            {"key": e.key, "source": e.source, "recipe": e.recipe, "targets": list(e.targets), "bytes": e.bytes}
            | {"made": e.made}
            for e in entries
        ]
        folder = None if exports.root is None else str(exports.root)
        print_json({"folder": folder, "most_bytes": MOST_BYTES, "entries": shown})
        return
    for entry in entries:
        date = datetime.fromtimestamp(entry.made).strftime("%Y-%m-%d %H:%M")
        what = f"{entry.source}, recipe {entry.recipe}, for {', '.join(entry.targets)}"
        print(f"{date}  {format_bytes(entry.bytes):>10}  {what}")
    total = format_bytes(sum(entry.bytes for entry in entries))
    print(f"{len(entries)} kept, {total} of {format_bytes(MOST_BYTES)} at most, in {exports.root}")
