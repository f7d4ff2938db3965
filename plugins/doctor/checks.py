"""Problems that prevent a target from running on a machine, and checks that several targets share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import (
    EnginewrightError,
    MissingDependencyError,
    TargetError,
)

from ..gpu.cuda_driver import InstalledGpu
from .machine import Machine


def is_older(found: str, smallest: str) -> bool:
    """Returns True if the release ``found`` is older than the release ``smallest``."""
    return _numbers(found) < _numbers(smallest)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version's release, (1, 24, 0) for "1.24.0rc1"."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[a-z+]", version)[0]))


@dataclass(frozen=True)
class Problem:
    """A reason why an engine can't run, with a remedy (``hint``). ``missing``: True if a package is missing."""

    message: str
    hint: str
    missing: bool = False

    def error(self) -> EnginewrightError:
        """Returns the problem as an error."""
        return (MissingDependencyError if self.missing else TargetError)(self.message, hint=self.hint)


def gpu_problem(
    gpus: Sequence[InstalledGpu], why_none: str, capabilities: Sequence[str], what: str = "the engines"
) -> Problem | None:
    """Returns the problem of a machine without a suitable GPU; None if there is one.

    Args:
        gpus: the machine's GPUs.
        why_none: the reason why there are none, if it is known.
        capabilities: suitable compute capabilities; () for any.
        what: the things that need the GPU, for the message.
    """
    if not gpus:
        needed = f" of compute capability {_listed(capabilities)}" if capabilities else ""
        return Problem(
            f"it needs an NVIDIA GPU{needed}, and {why_none or 'there is none'}",
            "Run it on a machine with such a GPU and NVIDIA's driver.",
        )
    if capabilities and choose_gpu(gpus, capabilities) is None:
        here = ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
        here_only = ", ".join(dict.fromkeys(gpu.capability for gpu in gpus))
        return Problem(
            f"{what} are for compute capability {_listed(capabilities)}, and the GPU here is another: {here}",
            f"Export again for it (--gpu {here_only}), or run the bundle on such a GPU.",
        )
    return None


def choose_gpu(gpus: Sequence[InstalledGpu], capabilities: Sequence[str]) -> InstalledGpu | None:
    """Returns the first GPU with one of these compute capabilities ("8.9"), or the first of all if there are none; None
    if no GPU fits.
    """
    return next((gpu for gpu in gpus if not capabilities or gpu.capability in capabilities), None)


def _listed(names: Sequence[str]) -> str:
    """Joins names as in "8.0, 8.6 or 8.9"."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


@dataclass(frozen=True)
class Checked:
    """A target's problems on a machine, and the devices that it runs on, or would."""

    problems: tuple[Problem, ...] = ()
    on: tuple[str, ...] = ()


Check = Callable[[Machine, TargetManifest | None], Checked]
"""A function that compares a machine with the requirements of a bundle's target; None as target means those of any
bundle.
"""


def torch_problems(machine: Machine, extra: str) -> list[Problem]:
    """Returns the problems of running PyTorch on a GPU, except for those of the GPU itself.

    ``extra``: the extra of enginewright that installs PyTorch.
    """
    torch, built_for = machine.packages.get("torch"), machine.torch_cuda
    if torch is None:
        hint = f"Install a build of PyTorch with CUDA: pip install 'enginewright[{extra}]', or see pytorch.org"
        return [Problem("PyTorch is not installed", hint, missing=True)]
    if not built_for:
        hint = "Install a build of PyTorch with CUDA: see pytorch.org"
        return [Problem(f"PyTorch {torch} is a build without CUDA", hint)]
    return [problem] if (problem := driver_problem(machine, f"PyTorch {torch}", built_for)) is not None else []


def driver_problem(machine: Machine, what: str, built_for: str) -> Problem | None:
    """Returns the problem if the driver is too old for ``what``; None if it isn't.

    ``built_for`` is the CUDA version for which it was built. Within a major version, older drivers are accepted.
    """
    major = built_for.partition(".")[0]
    if not machine.cuda or not major or int(machine.cuda.partition(".")[0]) >= int(major):
        return None
    driver = f"NVIDIA's driver {machine.driver}".rstrip()
    return Problem(
        f"{what} is built for CUDA {built_for}, and {driver} runs CUDA {machine.cuda} at most",
        f"Install a newer driver, or {what.partition(' ')[0]} for CUDA {machine.cuda.partition('.')[0]}.",
    )
