"""What a target needs of a machine, compared with what is there: nothing is opened. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from enginewright.plugins.cuda.section import CudaSection, number_of
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.onnxruntime.library import NAME as OPERATORS
from enginewright.plugins.stablehlo.section import IreeSection, StableHloSection
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.plugins.triton.tiles import machine_code_runs
from enginewright.plugins.tvm.section import TvmSection, best_level
from enginewright.plugins.xla.library import NAME as HANDLERS

from ..bundle.manifest import TargetManifest
from ..kv_cache.cache_groups import format_bytes
from .cuda_driver import Gpu
from .machine import Machine
from .onnx_session import OLDEST, PROVIDERS, is_older
from .pjrt_library import INSTALL as INSTALL_JAXLIB
from .pjrt_library import TESTED, is_tested
from .tensorrt_checks import FLAVOURS, Problem, build_problem, choose_gpu, gpu_problem, library_problem


@dataclass(frozen=True)
class Checked:
    """What is in the way of a target on a machine, and what it runs on, or would."""

    problems: tuple[Problem, ...] = ()
    on: tuple[str, ...] = ()


Check = Callable[[Machine, TargetManifest | None], Checked]
"""Of a machine, for a bundle's target, or for any bundle's (None)."""


def check_cpu(machine: Machine, target: TargetManifest | None) -> Checked:
    if not machine.instruction_sets:
        why = machine.problems.get("enginewright", "it has no kernels for this processor")
        hint = "Install a wheel of enginewright for this machine, or build it here: pip install enginewright"
        return Checked((Problem(f"the extension module doesn't load: {why}", hint, missing=True),))
    return Checked(on=(f"{machine.instruction_sets[0]} kernels, {_counted(machine.cores, 'core')}",))


def check_onnx(machine: Machine, target: TargetManifest | None) -> Checked:
    io = target.section(LinearIo) if target is not None else None
    needed = OLDEST if io is None else io.onnxruntime
    found = machine.packages.get("onnxruntime")
    install = f"Install it with: pip install 'onnxruntime>={needed}', or enginewright[onnx], or [onnx-gpu] for a GPU"
    if found is None:
        return Checked((Problem("onnxruntime is not installed", install, missing=True),))
    if why := machine.problems.get("onnxruntime"):
        return Checked((Problem(why, f"Install it anew: pip install --force-reinstall 'onnxruntime>={needed}'"),))
    if is_older(found, needed):
        return Checked((Problem(f"it needs onnxruntime {needed} or newer, and {found} is installed", install),))
    known = [name for name, provider in PROVIDERS.items() if provider.full_name in machine.providers]
    on = f"onnxruntime {found}, providers {', '.join(known) or 'unknown'}"
    return Checked(on=(on, *_variant(io, machine), *_idle_gpu(machine)))


def check_tvm(machine: Machine, target: TargetManifest | None) -> Checked:
    section = target.section(TvmSection) if target is not None else None
    found = machine.packages.get("tvm")
    if found is None:
        hint = "Install it with: pip install 'enginewright[tvm]'"
        return Checked((Problem("TVM (apache-tvm) is not installed", hint, missing=True),))
    if section is None:
        return Checked(on=(f"TVM {found}",))
    if problem := tvm_problem(section, found):
        return Checked((problem,))
    level = best_level(section.levels, machine.features)
    if level is None:
        return Checked((level_problem(section),))
    ours = f", products and attention by {section.kernels}'s kernels" if section.kernels else ""
    files = (f"CUDA source for {', '.join(section.cuda)}, which nothing here runs",) if section.cuda else ()
    return Checked(on=(f"TVM {found}, kernels for x86-64-{level}{ours}", *files))


def tvm_problem(section: TvmSection, found: str) -> Problem | None:
    """Libraries of another TVM than is installed."""
    if found == section.version:
        return None
    hint = f"Install that one: pip install 'apache-tvm=={section.version}'; or export the bundle again."
    return Problem(f"its libraries were made by TVM {section.version}, and {found} is installed", hint)


def level_problem(section: TvmSection) -> Problem:
    """Libraries for other processors."""
    names = " and ".join(f"x86-64-{name}" for name in section.levels)
    hint = "Export again with a level that it has in the recipe's [tvm] levels, or take --target cpu."
    return Problem(f"its libraries are for {names}, whose instructions this processor doesn't have", hint)


def _idle_gpu(machine: Machine) -> tuple[str, ...]:
    """What to install for onnxruntime to use the GPU that is there."""
    if not machine.gpus or PROVIDERS["cuda"].full_name in machine.providers:
        return ()
    return (
        f"{machine.gpus[0].name} isn't used: that needs provider cuda (pip uninstall onnxruntime, then pip install "
        "'enginewright[onnx-gpu]')",
    )


def _variant(io: LinearIo | None, machine: Machine) -> tuple[str, ...]:
    """Which of several files runs on a CPU, and why it isn't the fastest."""
    if io is None or len(io.variants) == 1:
        return ()
    taken = io.fastest(operators=machine.onnx_operators)
    runs = f"on a CPU its variant {taken} runs"
    return (runs if taken == io.variants[-1] else f"{runs}: variant kernels needs {OPERATORS}, which is missing",)


def check_tensorrt(name: str) -> Check:
    flavour = FLAVOURS[name]

    def check(machine: Machine, target: TargetManifest | None) -> Checked:
        section = target.section(TensorRtSection) if target is not None else None
        found = machine.packages.get(flavour.module)
        capabilities, what = flavour.capabilities, f"{flavour.name}'s engines"
        library = library_problem(flavour, found, "")
        if section is not None and target is not None:
            capabilities, what = section.compute_capabilities, "the engines"
            library = library_problem(flavour, found, section.version)
            if target.state == "needs-build" and section.paged is not None:
                capabilities, what = section.paged.kernel_capabilities, "the attention kernels"
                library = build_problem(flavour, found, section.paged.library)
        old = driver_problem(machine, f"{flavour.name} {found}", machine.cuda_of.get(flavour.module, ""))
        problems = [library, old, gpu_problem(machine.gpus, machine.gpu_problem, capabilities, what)]
        gpu = choose_gpu(machine.gpus, capabilities)
        on = [] if found is None else [f"{flavour.name} {found}"]
        on += [] if gpu is None else [f"{gpu.name} ({gpu.capability}), {format_bytes(gpu.memory_bytes)}"]
        return Checked(tuple(p for p in problems if p is not None), (", ".join(on),) if on else ())

    return check


def torch_problems(machine: Machine, extra: str) -> list[Problem]:
    """What is in the way of PyTorch on a GPU, apart from the GPU. ``extra``: of enginewright, that installs it."""
    torch, built_for = machine.packages.get("torch"), machine.torch_cuda
    if torch is None:
        hint = f"Install a build of PyTorch with CUDA: pip install 'enginewright[{extra}]', or see pytorch.org"
        return [Problem("PyTorch is not installed", hint, missing=True)]
    if not built_for:
        hint = "Install a build of PyTorch with CUDA: see pytorch.org"
        return [Problem(f"PyTorch {torch} is a build without CUDA", hint)]
    return [problem] if (problem := driver_problem(machine, f"PyTorch {torch}", built_for)) is not None else []


def driver_problem(machine: Machine, what: str, built_for: str) -> Problem | None:
    """A driver that is too old for ``what``, built for that CUDA: within a major version older ones will do."""
    major = built_for.partition(".")[0]
    if not machine.cuda or not major or int(machine.cuda.partition(".")[0]) >= int(major):
        return None
    driver = f"NVIDIA's driver {machine.driver}".rstrip()
    return Problem(
        f"{what} is built for CUDA {built_for}, and {driver} runs CUDA {machine.cuda} at most",
        f"Install a newer driver, or {what.partition(' ')[0]} for CUDA {machine.cuda.partition('.')[0]}.",
    )


def check_cuda(machine: Machine, target: TargetManifest | None) -> Checked:
    section = target.section(CudaSection) if target is not None else None
    problems = torch_problems(machine, "cuda")  # Triton compiles kernels for an export; a bundle has them
    fitting = [gpu for gpu in machine.gpus if section is None or section.kernels_for(gpu.capability) is not None]
    if not fitting:
        known = section.compute_capabilities if section is not None else ()
        if (problem := gpu_problem(machine.gpus, machine.gpu_problem, known, "the kernels")) is not None:
            problems.append(problem)
    on = [f"PyTorch {machine.packages['torch']}"] if "torch" in machine.packages else []
    on += [f"{gpu.name} ({gpu.capability}), {format_bytes(gpu.memory_bytes)}" for gpu in fitting[:1]]
    said = (", ".join(on),) if on else ()
    return Checked(tuple(problems), said + (_as_ptx(machine, section, fitting[0]) if section and fitting else ()))


def _as_ptx(machine: Machine, section: CudaSection, gpu: Gpu) -> tuple[str, ...]:
    """Why a GPU's driver translates a bundle's kernels from PTX, if it does: that takes time at the first start."""
    made_for = section.kernels_for(gpu.capability)
    assert made_for is not None
    if not machine_code_runs(number_of(made_for), number_of(gpu.capability)):
        return (f"kernels as PTX of {made_for}, which the driver translates: export with --gpu {gpu.capability}",)
    by = section.assemblers.get(made_for, "")
    if by and machine.cuda and int(by.partition(".")[0]) > int(machine.cuda.partition(".")[0]):
        said = f"its machine code is of CUDA {by}, and the driver runs CUDA {machine.cuda}"
        return (f"kernels as PTX, which the driver translates: {said}",)
    return ()


def check_stablehlo(machine: Machine, target: TargetManifest | None) -> Checked:
    """XLA runs it, or IREE where the bundle has modules for that."""
    section = target.section(StableHloSection) if target is not None else None
    problem, on = _xla(machine, section)
    iree, ahead = _iree(machine, section)
    if problem is None:
        return Checked(on=(on, *ahead, *(() if iree is None else (f"not by IREE: {iree.message}",))))
    if section is None or section.iree is None or not section.iree.levels:
        return Checked((problem,))
    if iree is None:
        return Checked(on=(*ahead, f"not by XLA: {problem.message}"))
    return Checked((problem, iree))


def _xla(machine: Machine, section: StableHloSection | None) -> tuple[Problem | None, str]:
    """(what is in the way of jaxlib, what it is)."""
    found = machine.packages.get("jaxlib")
    if found is None:
        return Problem("jaxlib is not installed", INSTALL_JAXLIB, missing=True), ""
    if not is_tested(found):
        hint = f"Install that one: pip install 'jaxlib=={TESTED}.*'"
        return Problem(f"it runs on jaxlib {TESTED}, and {found} is installed", hint), ""
    if section is not None and section.kernels and not machine.xla_handlers:
        problem = f"its modules call our kernels, and {HANDLERS} is missing"
        return Problem(problem, "Install enginewright with pip, or build it in the source tree."), ""
    return None, f"jaxlib {found}, providers {', '.join(('cpu', *machine.pjrt_plugins))}"


def _iree(machine: Machine, section: StableHloSection | None) -> tuple[Problem | None, tuple[str, ...]]:
    """(what is in the way of a bundle's modules for IREE, what they run on)."""
    found = machine.packages.get("iree")
    if section is None or section.iree is None:
        return None, (f"IREE {found}, provider iree",) if found and section is None else ()
    files = section.iree.cuda
    on = (f"modules of IREE for CUDA {', '.join(files)}, which nothing here runs",) if files else ()
    if not section.iree.levels:
        return None, on
    level = best_level(section.iree.levels, machine.features)
    problem = iree_problem(section.iree, found) or (iree_level_problem(section.iree) if level is None else None)
    return (problem, on) if problem else (None, (f"IREE {found}, provider iree, for x86-64-{level}", *on))


def iree_problem(section: IreeSection, found: str | None) -> Problem | None:
    """Modules of another IREE than is installed."""
    if found == section.version:
        return None
    hint = f"Install that one: pip install 'iree-base-runtime=={section.version}'; or export the bundle again."
    if found is None:
        return Problem("IREE's runtime (iree-base-runtime) is not installed", hint, missing=True)
    return Problem(f"its modules for IREE were made by version {section.version}, and {found} is installed", hint)


def iree_level_problem(section: IreeSection) -> Problem:
    """Modules for other processors."""
    names = " and ".join(f"x86-64-{name}" for name in section.levels)
    hint = "Export again with a level that it has in the recipe's [stablehlo] iree, or take provider cpu."
    return Problem(f"its modules for IREE are for {names}, whose instructions this processor doesn't have", hint)


def check_torch_tensorrt(machine: Machine, target: TargetManifest | None) -> Checked:
    torch, library = machine.packages.get("torch"), machine.packages.get("torch_tensorrt")
    problems = torch_problems(machine, "torch-tensorrt")
    if library is None:
        hint = "Install it with: pip install 'enginewright[torch-tensorrt]'"
        problems.append(Problem("torch_tensorrt is not installed", hint, missing=True))
    if (no_gpu := gpu_problem(machine.gpus, machine.gpu_problem, ())) is not None:
        problems.append(no_gpu)
    on = [] if torch is None else [f"PyTorch {torch}"]
    on += [] if library is None else [f"torch_tensorrt {library}"]
    return Checked(tuple(problems), (", ".join(on),) if on else ())


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
