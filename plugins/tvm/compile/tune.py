"""Searches for faster schedules of the tvm target's products, and compiles its library with them.

A product is compiled alone with each choice and timed against its best so far. The best choices are compared once more
in the whole program. Then the library and the records with which it was compiled are written into the target's folder.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle.manifest import FileSection, target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import check_code
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.threads import available_threads

from ...emit.finished_bundle import add_file, replace_manifest
from ...steps.timed_steps import (
    STAGE,
    Measured,
    Timed,
    Trial,
    cases_of,
    check_seconds,
    compare,
    mean,
    random_step,
    worth,
)
from ...steps.x86_levels import LEVELS, Level, LevelName
from ..section import TunedLibrary, TvmSection
from ..serve.executor import OwnMemory, TvmStep, check_section, tvm_section
from ..serve.library import INSTALL, Library
from .schedules import OWN, Schedule, Schedules, from_json, products_of, to_json

CANDIDATES: Mapping[str, tuple[int, ...]] = {
    "rows": (4, 6, 8),
    "unroll": (2, 4),
    "streams": (1, 2, 8),
    "row_block": (48, 192),
    "groups": (16, 256),
}
"""Field of a schedule -> the values to try in addition to the default."""

TARGET = "tvm"
_ROUNDS, _LAST_ROUNDS = 7, 9
_SECONDS = 0.005
"""The seconds of one measurement of a case of a product."""
_FILL = 0x3C
"""The value of each byte that products read, which is 0.01 as a float."""


@dataclass(frozen=True, kw_only=True)
class TriedSchedule(Trial):
    """A value of a field of a product's schedule, compared with the product's best so far.

    Attributes:
        product: the product's name; see ``products_of``.
    """

    product: str


@dataclass(frozen=True, kw_only=True)
class TunedTvm(Measured[TriedSchedule]):
    """The result of `optimize tune` for the tvm target.

    Attributes:
        bundle: the path of the bundle.
        path: the path of the library that was written; None if none was.
        level: the level of x86-64 of the library.
        records: product -> its fastest schedule, for products for which it isn't the default.
    """

    bundle: Path
    path: Path | None
    level: LevelName
    records: dict[str, Schedule]

    def to_json(self) -> dict[str, Any]:
        """Returns the result as values that JSON has."""
        return {
            "path": str(self.path) if self.path else None,
            "level": self.level,
            "records": {name: schedule.model_dump() for name, schedule in self.records.items()},
            **self.measured(),
        }

    def table(self) -> list[str]:
        """Returns the lines of two tables: each schedule compared with the best so far, and all of them together by
        kind of step.
        """
        width = max((len(t.product) for t in self.tried), default=0)
        tried = [
            f"{t.product:<{width}}  {t.name:<10}{t.value:>6}{t.gain:>8.3f}x{'  faster' if t.faster else ''}"
            for t in self.tried
        ]
        return tried + [f"{name:<28}{gain:>8.3f}x" for name, gain in self.gains.items()]

    def summary(self) -> list[str]:
        """Returns lines of text with the chosen schedules and the path of the library."""
        lines = [] if self.records else ["nothing is faster here than the schedules that it has"]
        for name, schedule in self.records.items():
            lines.append(f"{name}: " + ", ".join(f"{field} {value}" for field, value in schedule.model_dump().items()))
        lines += self.too_short()
        return [*lines, f"{self.path} for x86-64-{self.level}" if self.path else f"{self.bundle} was not changed"]


def tune(
    bundle: Bundle,
    *,
    seconds: float = 40.0,
    threads: int = 0,
    records: Path | None = None,
    write: bool = True,
    progress: Progress = silent,
) -> TunedTvm:
    """Searches for faster schedules of products, and compiles the library for this CPU's level with them.

    Args:
        bundle: an open bundle, with a ready target tvm.
        seconds: the maximum time of the measurement. Products with the largest weights come first.
        threads: the number of threads; 0 means one for each core.
        records: a file of schedules from an earlier run, possibly for another bundle or machine; then nothing is
            measured.
        write: True if the bundle is changed.
        progress: called with the stage "tune".

    Raises:
        RequestError: ``seconds`` is out of range.
        TrustError: the bundle isn't trusted, as code compiled from its program is run.
        BundleError: the target isn't ready, the records are for other products, or its folder can't be written.
        TargetError: the target doesn't run here, or its products are the cpu target's kernels.
        MissingDependencyError: TVM or a linker is missing.
    """
    check_seconds(seconds)
    began = time.perf_counter()
    compiler = _Compiler(bundle, threads)
    if records is not None:
        schedules = from_json(_read(records), str(records))
        if unknown := sorted(schedules.keys() - compiler.products.keys()):
            raise BundleError(f"{records}: the bundle has no product {unknown[0]}", hint="Tune it without --records.")
        path = _write(bundle, compiler.level, compiler.library(schedules), schedules) if write else None
        return TunedTvm(
            bundle=bundle.path,
            path=path,
            level=compiler.level,
            records=schedules,
            gain=1.0,
            gains={},
            tried=(),
            candidates=0,
            seconds=time.perf_counter() - began,
            most_seconds=seconds,
        )
    search = _Search(compiler, began + seconds, progress)
    schedules = search.run()
    names = [case.name for case in compiler.cases]
    gains, path = dict.fromkeys(names, 1.0), None
    if schedules:
        progress(ProgressEvent(STAGE, len(search.plan), len(search.plan) + 1, "all of them beside the own ones"))
        library = compiler.library(schedules)
        default, best = compiler.whole(compiler.library({})), compiler.whole(library)
        gains = compare(default, best, compiler.cases, _LAST_ROUNDS)
        if not worth(gains.values()):
            schedules = {}
        elif write:
            path = _write(bundle, compiler.level, library, schedules)
    progress(ProgressEvent(STAGE, len(search.plan) + 1, len(search.plan) + 1))
    return TunedTvm(
        bundle=bundle.path,
        path=path,
        level=compiler.level,
        records=schedules,
        gain=mean(gains.values()),
        gains=gains,
        tried=tuple(search.tried),
        candidates=len(search.plan),
        seconds=time.perf_counter() - began,
        most_seconds=seconds,
    )


class _Compiler:
    """Compiles a bundle's program, or a single product of it, with any schedules, for measurements."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        section = tvm_section(bundle, TARGET)
        check_code(bundle, TARGET)  # what is compiled of its program runs unchecked
        if section.kernels is not None:
            raise TargetError(
                f"{bundle.path}: the products of target tvm are {section.kernels}'s kernels, which it doesn't compile",
                hint="Tune the target cpu, or export without `kernels` in the recipe's [tvm].",
            )
        self.level = check_section(section)
        if importlib.util.find_spec("tvm") is None:
            raise MissingDependencyError("tuning target tvm needs TVM (apache-tvm)", hint=INSTALL)
        from . import compile_library, step_function  # only this needs the package

        compile_library.linker()
        self._compile, self._module = compile_library.compile_library, step_function.step_module
        self._threads = threads or available_threads()
        self.program = bundle.program(TARGET)
        self._weights = {use.name: bundle.weight(use.name) for use in self.program.weights}
        sizes = {use.name: self._weights[use.name].nbytes for use in self.program.weights}
        first = products_of(self.program)

        def weight_bytes(product: str) -> int:
            step = self.program.steps[first[product]]
            return sum(sizes[o.name] for o in step.inputs if o.kind == "weight")

        self.products = {name: first[name] for name in sorted(first, key=lambda n: (-weight_bytes(n), n))}
        self.cases = cases_of(bundle.model.context_length)
        vocabulary = bundle.model.vocab_size
        self._steps = [random_step(self.program.cache_groups, vocabulary, case.sizes) for case in self.cases]
        self._blocks = {
            group.name: max(int(step.block_tables[group.name].max()) + 1 for step in self._steps)
            for group in self.program.cache_groups
        }

    def library(self, schedules: Schedules, program: LoweredProgram | None = None) -> bytes:
        level = LEVELS[self.level]
        return self._compile(self._module(program or self.program, level, schedules=schedules), level)

    def whole(self, library: bytes) -> Timed:
        """Returns the whole program with this library, ready to be timed."""
        return Timed(self._steps_with(self.program, library))

    def product(self, name: str, schedule: Schedule) -> Timed:
        """Compiles a program of one product with a schedule, and returns it ready to be timed."""
        program = self.program.model_copy(update={"steps": (self.program.steps[self.products[name]],), "taps": {}})
        return Timed(self._steps_with(program, self.library({name: schedule}, program)), _SECONDS)

    def _steps_with(self, program: LoweredProgram, library: bytes) -> list[partial[Any]]:
        """Returns a function for each case, which runs the case's step with this library."""
        loaded = Library(library, Path("tuned.so"), self._threads)
        run = loaded.program(program)
        step = TvmStep(run, loaded, self._weights, OwnMemory(run, self._blocks))
        for one in self._steps:
            step.memory.begin(one).fill(_FILL)
        for memories in step.memory.blocks.values():
            for memory in memories:
                memory.fill(_FILL)
        return [partial(step.run, one) for one in self._steps]


def fits(product: str, name: str, value: int, level: Level) -> bool:
    """Returns True if the value of a field could change the code of a product.

    ``name`` is the field. Blocks have at most the level's rows, and only products of floats on levels with two vectors
    of sums use ``streams``.
    """
    if name == "streams":
        return product.startswith("linear ") and level.vectors == 2
    return name != "rows" or value < level.rows


class _Search:
    """Tries one value after the other, product by product, until the time is over."""

    def __init__(self, compiler: _Compiler, end: float, progress: Progress) -> None:
        self._compiler, self._end, self._progress = compiler, end, progress
        level = LEVELS[compiler.level]
        self.plan = [
            (p, n, v) for p in compiler.products for n, of in CANDIDATES.items() for v in of if fits(p, n, v, level)
        ]
        self.tried: list[TriedSchedule] = []

    def run(self) -> dict[str, Schedule]:
        """Returns product -> its fastest schedule, for products for which it isn't the default."""
        fastest: dict[str, Schedule] = {}
        best: dict[str, Timed] = {}
        longest = 0.0
        for done, (product, name, value) in enumerate(self.plan):
            # The last comparison compiles the whole program twice: about what each of its kernels takes alone.
            last = 2 * longest * len(self._compiler.products)
            if time.perf_counter() + (2 if product not in best else 1) * longest + last > self._end:
                break
            self._progress(ProgressEvent(STAGE, done, len(self.plan) + 1, f"{product}: {name} {value:,}"))
            start = time.perf_counter()
            so_far = fastest.get(product, OWN)
            if product not in best:
                best = {product: self._compiler.product(product, so_far)}  # one at a time is in memory
            schedule = so_far.model_copy(update={name: value})
            other = self._compiler.product(product, schedule)
            gains = compare(best[product], other, self._compiler.cases, _ROUNDS)
            faster = worth(gains.values())
            self.tried.append(
                TriedSchedule(
                    product=product, name=name, value=value, gain=mean(gains.values()), gains=gains, faster=faster
                )
            )
            if faster:
                fastest[product], best[product] = schedule, other
            longest = max(longest, time.perf_counter() - start)
        return fastest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise BundleError(f"{path}: {e.strerror}", hint="Name a file that optimize tune --target tvm wrote.") from e


def _write(bundle: Bundle, level: LevelName, library: bytes, records: Schedules) -> Path:
    """Writes the library and its records into the target's folder, updates the manifest, and removes earlier files.

    Returns the library's path.
    """
    folder, manifest = bundle.path / target_folder(TARGET), bundle.target(TARGET)
    section = manifest.section(TvmSection)
    assert section is not None, "it was asked for"
    before = section.tuned.get(level)
    old = {before.library, before.records} if before is not None else set()
    new: dict[str, FileSection] = {}
    try:
        of_library, new_file = add_file(folder, f"step-{level}", ".so", library)
        new[of_library] = new_file
        of_records, new_file = add_file(folder, f"schedules-{level}", ".json", to_json(records).encode())
        new[of_records] = new_file
        tuned = section.tuned | {level: TunedLibrary(library=of_library, records=of_records)}
        other_files = {name: file for name, file in manifest.files.items() if name not in old}
        finished = manifest.with_section(section.model_copy(update={"tuned": dict(sorted(tuned.items()))}))
        files = dict(sorted((other_files | new).items()))
        replace_manifest(bundle.path, TARGET, finished.model_copy(update={"files": files}))
    except BaseException:
        for name in new.keys() - manifest.files.keys():
            (folder / name).unlink(missing_ok=True)
        raise
    for name in old - new.keys():
        (folder / name).unlink(missing_ok=True)
    return folder / of_library
