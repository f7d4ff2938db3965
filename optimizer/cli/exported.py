"""Returns the bundle of a model for a command or ``LLM``; a model that isn't a bundle is exported once.

``LLM`` imports this module only for a model, so that the runtime needs no compiler. It needs no package of the command
line.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.runtime.bundle.hub_id import check_there, is_model
from enginewright.runtime.shared.errors import EnginewrightError, MissingDependencyError, RequestError

from .console import Terminated
from .progress import stage_bars

_CHILD = ("-P", "-m", "enginewright.optimizer.cli.exported")
"""The arguments of the exporting process. They prevent imports from the current folder."""

_SECONDS_TO_CLEAN_UP = 10.0
"""The seconds that an export gets to clean up after Ctrl-C. The next equal export removes the rest."""

if TYPE_CHECKING:
    from enginewright.optimizer.export.run import WantedExport
    from enginewright.runtime.shared.progress import ProgressEvent


def exported(
    model: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    apart: bool = True,
) -> Path:
    """Returns the folder of a bundle. A model is exported first, unless a cached export of the same is found.

    A line on stderr names a model's recipe and the reason, unless ``recipe`` is passed. Progress is on stderr too.

    Args:
        model: a bundle; or a Hugging Face folder, a GGUF file or a Hub id.
        recipe: the recipe for a model; by default gguf for a GGUF file with quantized matrices, else int8.
        quiet: True prints nothing.
        apart: True exports in another process, so that PyTorch's memory is free again before the bundle is opened.

    Raises:
        BundleError: the bundle doesn't exist.
        RequestError: a recipe is passed for a bundle.
        MissingDependencyError: a package for exporting is not installed.
        SourceError, CapacityError and others: as ``export`` raises them.
    """
    check_there(model)
    if not is_model(model):
        if recipe is not None:
            raise RequestError(
                f"recipe: {os.fspath(model)} isn't a model that is exported first",
                hint="Pass the model that the bundle was made from, or leave the recipe out.",
            )
        return Path(model)
    name = os.fspath(model)
    with MissingDependencyError.of_export(f"{name} isn't a bundle, and exporting it", "pass a bundle"):
        from enginewright.optimizer.export import export_to_keep, find_kept

    reason = ""
    with stage_bars(hidden=quiet) as show:

        def on_progress(event: ProgressEvent) -> None:
            nonlocal reason
            reason = event.detail if event.stage == "recipe" else reason
            show(event)

        export = find_kept(name, recipe=None if recipe is None else os.fspath(recipe), progress=on_progress)
    if reason and not quiet:
        print(f"{name}: recipe {reason}", file=sys.stderr, flush=True)
    if export.bundle is not None:
        return export.bundle
    if apart:
        return _export_apart(export, quiet)
    with stage_bars(hidden=quiet) as show:
        return export_to_keep(export, show)


def _export_apart(wanted: WantedExport, quiet: bool) -> Path:
    """Exports in a separate process. Ctrl-C also stops that process, which cleans up before this one continues."""
    child = subprocess.Popen([sys.executable, *_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        sent, _ = child.communicate(pickle.dumps((wanted, quiet)))
    except KeyboardInterrupt as e:
        if isinstance(e, Terminated):  # a terminal's Ctrl-C reaches the child by itself
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_TO_CLEAN_UP)
        raise
    finally:
        child.kill()  # nothing where it has ended
        child.wait()
    try:
        outcome: Path | BaseException = pickle.loads(sent)  # noqa: S301  our own process's
    except (EOFError, pickle.UnpicklingError):
        raise EnginewrightError(
            f"the process that exports {wanted.source} ended before its work was done (exit code {child.returncode})",
            hint="Is there memory enough? `optimize export MODEL --max-memory SIZE` takes less.",
        ) from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _run_export() -> None:
    """Runs in the other process: reads the export from stdin, writes the bundle's folder, or the error, to stdout."""
    from .console import raises_terminated, warnings_shown

    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the answer is alone there, whatever libraries print
    outcome: Path | BaseException
    try:
        from enginewright.optimizer.export import export_to_keep

        export, quiet = pickle.load(sys.stdin.buffer)  # noqa: S301  our own process's
        with raises_terminated(threading.Event()), warnings_shown(hidden=quiet), stage_bars(hidden=quiet) as show:
            outcome = export_to_keep(export, show)
    except (EnginewrightError, KeyboardInterrupt) as e:
        outcome = e
    with suppress(BrokenPipeError), answer:  # whoever wanted it may be gone; it is kept all the same
        pickle.dump(outcome, answer)


if __name__ == "__main__":
    _run_export()
