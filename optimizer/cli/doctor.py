"""``optimize doctor``: lists the targets of a bundle that this machine can run, and reasons for the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .check_engine import show_check
from .console import print_json, reported, stdout_console
from .options import AsJson, Trust

if TYPE_CHECKING:
    from enginewright.plugins.doctor.examine import Examination
    from enginewright.plugins.doctor.machine import Machine

EPILOG = (
    "Ends with 0 if a target of the bundle runs here (of those named with --target: all of them), else with 15. With "
    "--run it ends with 11 if a stage fails.\n\n"
    "Examples:\n\n"
    "  optimize doctor\n\n"
    "  optimize doctor smollm2.bundle\n\n"
    "  optimize doctor smollm2.bundle --target tensorrt-rtx && echo ready\n\n"
    "  optimize doctor smollm2.bundle --json\n\n"
    "  optimize doctor smollm2.bundle --run --target cuda --trust code --json > report.json\n\n"
    "  optimize doctor --run --target cuda"
)

_STYLES = {"runs": "green", "needs-build": "yellow", "can't": "red"}


@reported
def command(
    bundle: Annotated[
        Path | None,
        typer.Argument(metavar="[BUNDLE]", help="A bundle; without it, only the machine is examined."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Examine only this target; may be repeated.")
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Run a GPU target, compare its tokens with the cpu target's, and print a report to send us. Without "
            "BUNDLE, a tiny model is exported.",
        ),
    ] = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Shows which targets of a bundle this machine can run, and what is missing for the others."""
    if run:
        if len(target or ()) > 1:
            raise typer.BadParameter("--run takes one --target")
        show_check(next(iter(target or ()), None), bundle, trust=trust, as_json=as_json)
        return
    from enginewright.plugins.doctor.examine import examine
    from enginewright.plugins.doctor.machine import look_at_machine
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.shared.errors import TargetError

    named = target or []
    opened = Bundle.open(bundle) if bundle is not None else None
    examination = examine(look_at_machine(), opened, named)
    if as_json:
        model = {} if opened is None else {"bundle": {"path": str(bundle), "model": opened.model.name}}
        print_json(examination.to_json() | model)
    else:
        _print(examination)
    if not examination.succeeds(named):
        raise typer.Exit(TargetError.exit_code)


def _print(examination: Examination) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    for label, value in _lines(examination.machine):
        console.print(f"{label:<16}{value}", markup=False, soft_wrap=True)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why, and what to do", overflow="fold")
    for finding in examination.findings:
        lines = Text("\n".join(finding.reasons or finding.on))
        for todo in finding.todo:
            lines.append(f"\n{todo}", style="dim")
        table.add_row(finding.target, Text(finding.verdict, style=_STYLES[finding.verdict]), lines)
    console.print(table)


def _lines(machine: Machine) -> list[tuple[str, str]]:
    from enginewright.plugins.doctor.machine import PACKAGES
    from enginewright.runtime.shared.memory import format_bytes

    sets = ", ".join(machine.instruction_sets) or "none that kernels are for"
    memory = f"{format_bytes(machine.free_bytes)} free of {format_bytes(machine.memory_bytes)}"
    lines = [("machine", machine.system), ("processor", machine.processor), ("kernels", sets)]
    lines += [("cores", str(machine.cores)), ("memory", memory), ("python", machine.python)]
    for package in PACKAGES:
        version = machine.packages.get(package, "not installed")
        if package == "onnxruntime" and machine.providers:
            version += f" ({', '.join(machine.providers)})"
        if package == "torch" and package in machine.packages:
            version += f" (CUDA {machine.torch_cuda})" if machine.torch_cuda else " (without CUDA)"
        lines.append((package, version))
    driver = f"{machine.driver or 'unknown version'}, CUDA up to {machine.cuda}" if machine.cuda else "none"
    lines.append(("driver", driver))
    lines += [
        ("GPU", f"{gpu.name}, compute capability {gpu.capability}, {format_bytes(gpu.memory_bytes)}")
        for gpu in machine.gpus
    ]
    return lines if machine.gpus else [*lines, ("GPU", machine.gpu_problem)]
