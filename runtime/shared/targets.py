"""The table of targets and their packages. Importing this module imports none of them.

Our targets are in ``OWN``; another package declares its own by an entry point of the group ``GROUP``, such as
``toy = "enginewright_toy"``. A target's package has these modules; all but the first are optional:

    compile.target  TARGET, a ``plugins.emit.target.Target``: the compiling half
    serve.target    TARGET, a ``runtime.executors.target.ServedTarget``: the serving half, which imports no compiler
    section         the target's part of a bundle:
        SECTIONS        key in the target's manifest -> the type of its record
        check_opened    (bundle, target) -> any object; called when a bundle with the ready target is opened, and stored
                        in ``Bundle.opened``. Raises BundleError.
        OWN_FORM        True if its lowered program has another form than the cpu target's, which ``optimize verify``
                        verifies
        made_with       target's manifest -> names and versions of software that it needs, for ``optimize sbom``
        described       (bundle, target) -> lines for ``optimize inspect``
    recipe          TABLE, a ``passes.formats.section.Section``: the table of a recipe with the target's name
    compile.tune    tune(bundle, ...), a ``plugins.steps.timed_steps.Tune``, for ``optimize tune``
    compile.build   build(bundle, target, ...), a ``plugins.emit.engine_report.Build``, for ``optimize build``
    compile.plan    PLANNING, a ``plugins.steps.planning.Planning``, for ``optimize plan``
    serve.doctor    check(machine, target), a ``plugins.doctor.checks.Check``: compares the target's
                    requirements with a machine; look(problems) -> fields of ``plugins.doctor.machine.Machine``;
                    ENGINE, a ``plugins.doctor.engine.Engine``, for ``optimize doctor --run``
    compile.check   Opened, for a target with an ENGINE that isn't served: see ``Engine``
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar

from .errors import TargetError
from .records import Record

if TYPE_CHECKING:
    from importlib import metadata

OWN = {
    "cpu": "enginewright.plugins.cpu",
    "onnx": "enginewright.plugins.onnx",
    "tensorrt-rtx": "enginewright.plugins.tensorrt_rtx",
    "tensorrt": "enginewright.plugins.tensorrt",
    "cuda": "enginewright.plugins.cuda",
    "stablehlo": "enginewright.plugins.stablehlo",
    "torch-tensorrt": "enginewright.plugins.torch_tensorrt",
    "tvm": "enginewright.plugins.tvm",
}
"""The targets of this project and their packages, in the order in which they are shown."""

MEASURED = "cpu"
"""The target that is run and timed by default, because its kernels come with the project.

Searches, reports and draft models use it, and recipes that name no target export to it.
"""

PROCESSOR = "cpu"
"""The name of this machine's processor among the devices of ``optimize plan``. It isn't the name of a target."""

GROUP = "enginewright.targets"

T = TypeVar("T")


def part(target: str, name: str) -> ModuleType | None:
    """Returns the module ``name`` of a target's package; None for an unknown target, or if the package has no such
    module.

    Raises TargetError if a package outside of the project can't be loaded.
    """
    package = OWN.get(target)
    if package is not None:
        return _loaded(package, name)
    entry = _declared().get(target)
    if entry is None:
        return None
    try:
        importlib.import_module(entry.value)
        return _loaded(entry.value, name)
    except (ImportError, AttributeError, ValueError) as e:
        whose = entry.dist.name if entry.dist is not None else entry.value
        raise TargetError(
            f"{target}: package {whose} declares it as {entry.value}, which can't be loaded: {e}",
            hint=f"Install {whose} again, or take its name out of what you asked for.",
        ) from e


def _loaded(package: str, name: str) -> ModuleType | None:
    """Returns a module of a package; None if it doesn't exist."""
    path = package
    for piece in name.split("."):
        if importlib.util.find_spec(path) is None:
            return None
        path = f"{path}.{piece}"
    return importlib.import_module(path) if importlib.util.find_spec(path) is not None else None


def sections_of(target: str) -> Mapping[str, type[Record]] | None:
    """Returns the sections of a target's manifest besides the common fields, by key; None for an unknown target."""
    ours = target in OWN and importlib.util.find_spec(OWN[target]) is not None
    if not ours and target not in _declared():
        return None
    sections: Mapping[str, type[Record]] = getattr(part(target, "section"), "SECTIONS", {})
    return sections


class Halves(Mapping[str, T], Generic[T]):
    """One half of every target: ``TARGET`` in a module of each target's package, imported at its first use.

    Our targets come first and can't be replaced. Names can be listed and tested without an import.

    Args:
        module: the module of a target's package.
        kind: the type of ``TARGET`` there.
    """

    def __init__(self, module: str, kind: type[T]) -> None:
        self._module, self._kind = module, kind

    def __getitem__(self, name: str) -> T:
        """Returns the half of a target. Raises KeyError for an unknown name, TargetError if its package can't be
        loaded.
        """
        if name not in self:
            raise KeyError(name)
        target = getattr(part(name, self._module), "TARGET", None)
        if not isinstance(target, self._kind):
            where = f"{OWN.get(name) or _declared()[name].value}.{self._module}"
            raise TargetError(
                f"{name}: {where}.TARGET is {type(target).__name__} and not {self._kind.__name__}",
                hint="See docs/build/extending.md for what a target's package has.",
            )
        return target

    def __contains__(self, name: object) -> bool:
        return name in OWN or name in _declared()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*OWN, *sorted(_declared()))))

    def __len__(self) -> int:
        return len(OWN.keys() | _declared().keys())


def _declared() -> dict[str, metadata.EntryPoint]:
    from importlib import metadata  # takes 30 ms: only for who asks for a target that isn't ours

    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
