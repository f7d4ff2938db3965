"""The results of `optimize tune` for a bundle on a machine: a file next to the bundle, BUNDLE.tune.json.

It isn't part of the bundle: it isn't hashed, copies of the bundle don't need it, and no result depends on it. It is
used only with the CPU model, number of cores, instruction set, version and program that it was measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.bundle.regular_file import read_regular
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.records import Positive, Record
from enginewright.runtime.shared.replaced_file import replacing
from enginewright.runtime.shared.threads import available_threads

from ...native.executable import TUNABLES
from ...native.processor import processor_name

FORMAT_VERSION: Literal[1] = 1
_MOST_BYTES = 1 << 20


class TuningFile(Record, frozen=True, kw_only=True):
    """The content of a tuning file. ``threads`` of 0 and missing ``choices`` mean the executor's defaults."""

    format_version: Literal[1] = FORMAT_VERSION
    enginewright: str
    program_sha256: str
    processor: str
    cores: Positive
    isa: str
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    choices: dict[str, int] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    """The name of a case -> the time with the executor's defaults divided by the time with these choices."""
    row_seconds: dict[int, tuple[Annotated[float, Meta(gt=0)], ...]] = field(default_factory=dict)
    """The tokens of a request -> the seconds of steps in which it has 1, 2, ... rows, with these choices."""

    @classmethod
    def for_here(
        cls,
        bundle: Bundle,
        isa: str,
        *,
        threads: int = 0,
        choices: dict[str, int],
        gains: dict[str, float],
        row_seconds: Mapping[int, tuple[float, ...]] | None = None,
    ) -> TuningFile:
        """Returns a file with these settings, for this machine's CPU and cores and for the bundle's program."""
        from importlib import metadata

        return cls(
            enginewright=metadata.version("enginewright"),
            program_sha256=bundle.files[bundle.program_file("cpu")].sha256,
            processor=processor_name(),
            cores=available_threads(),
            isa=isa,
            threads=threads,
            choices=choices,
            gains=gains,
            row_seconds=dict(row_seconds or {}),
        )

    def differs(self, bundle: Bundle, isa: str) -> str:
        """Returns the reason why the file doesn't apply to this machine and bundle; "" if it does."""
        here = TuningFile.for_here(bundle, isa, threads=0, choices={}, gains={})
        if self.program_sha256 != here.program_sha256:
            return "it was measured with another program"
        for name, measured, current in (
            ("version of Enginewright", self.enginewright, here.enginewright),
            ("processor", self.processor, here.processor),
            ("number of cores", self.cores, here.cores),
            ("instruction set", self.isa, here.isa),
        ):
            if measured != current:
                return f"it was measured with another {name}: {measured}, and here it is {current}"
        for name, value in self.choices.items():
            if not 0 <= value <= TUNABLES.get(name, -1):
                return f"there is no {name} of {value}"
        return ""

    def write(self, path: Path) -> None:
        """Writes the file under a temporary name and renames it. Raises BundleError if it can't be written."""
        try:
            with replacing(path) as unfinished:
                text = msgspec.json.format(msgspec.json.encode(self), indent=2).decode()
                unfinished.write_text(f"{text}\n", encoding="utf-8")
        except OSError as e:
            raise BundleError(f"{path}: cannot be written: {e.strerror}", hint="Give the folder write access.") from e


def load_tuning(bundle: Bundle, isa: str) -> tuple[TuningFile | None, str]:
    """Reads a bundle's tuning file for this machine. Returns the file and a note: None and "" if there is no file.

    If a file can't be used, it returns None and a note with the reason; no error, because results don't depend on the
    file.
    """
    path = tuning_path(bundle)
    try:
        file = msgspec.json.decode(read_regular(path, most=_MOST_BYTES), type=TuningFile)
    except FileNotFoundError:
        return None, ""
    except OSError as e:
        return None, f"{path.name} is ignored: {e.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        return None, f"{path.name} is ignored: {e}"
    why = file.differs(bundle, isa)
    return (None, f"{path.name} is ignored: {why}") if why else (file, f"{path.name} is used")
