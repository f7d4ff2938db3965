"""``optimize verify``: checks that a bundle is intact, computes what its source does, and is as good as an older
build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginewright.runtime.shared.errors import counted

from .console import comparison_lines, print_json, reported, stdout_console
from .options import AsJson, BundlePath, Provider, Threads, Trust, known_targets
from .progress import stage_bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from enginewright.optimizer.build_budget import Check
    from enginewright.optimizer.check_bundle import BundleCheck
    from enginewright.optimizer.compare_builds import BuildComparison

EXIT_OVER_BUDGET = 16
"""The exit code if a bundle is worse than the model of --against, by more than the budget allows."""
EXIT_INCONCLUSIVE = 18
"""The exit code if no check failed, but a timed one has no result because of other work on the machine."""
RENAMED = {"--prompts": "--prompt"}
MOST_PROMPTS = 5
"""The most changed prompts, and the most differing files, that are shown in a terminal."""
EPILOG = (
    "Examples:\n\n"
    "  optimize verify smollm2.bundle\n\n"
    "  optimize verify smollm2.bundle --source SmolLM2-135M-Instruct\n\n"
    "  optimize verify new.bundle --against released.bundle --budget budget.toml --junit verify.xml\n\n"
    "  optimize verify smollm2.bundle --source SmolLM2-135M-Instruct --target cpu --json --quiet"
)


@reported
def command(
    bundle: BundlePath,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", "-s", metavar="MODEL", help="Compare with the source model: its folder, GGUF file or Hub id."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="FOLDER[=WEIGHT]",
            help="An adapter that the export merged into --source; may be repeated.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="BUNDLE|MODEL",
            help="Compare with an older build or a source model. Exits with 16 if the bundle is worse, with 18 if "
            "times vary too much to tell.",
        ),
    ] = None,
    budget: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file with limits: how much worse than --against the bundle may be."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompt",
            metavar="FILE",
            help="A file of prompts to compare on: one in each line, or JSONL. Default: built-in prompts.",
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the checks of --against as JUnit's XML.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", callback=known_targets, help="Examine only this target; may be repeated."),
    ] = None,
    provider: Provider = None,
    trust: Trust = None,
    threads: Threads = 0,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress, and nothing if all is well.")
    ] = False,
) -> None:
    """Checks a bundle's hashes and programs. With --source, it also compares the targets' results with the source.

    With --against, it compares predictions, size, speed and memory with an older build or a source.
    Code in the bundle, which some targets need, runs only with --trust.
    Comparing with a source needs the extra: pip install 'enginewright\\[export]'.
    """
    of_against = {"--budget": budget, "--prompt": prompts, "--junit": junit, "--threads": threads or None}
    _check_against(against, of_against, target or ())
    from enginewright.optimizer.capture.hub_id import find_here
    from enginewright.optimizer.check_bundle import check_bundle

    if against is not None:
        find_here(against, option="against")  # fails before the bundle is read
    with stage_bars(hidden=quiet) as show:
        check = check_bundle(
            bundle,
            source=source,
            lora=lora or None,
            targets=target or None,
            provider=provider,
            trust=trust,
            progress=show,
        )
        compared = None
        if against is not None:
            from enginewright.optimizer.compare_builds import compare_builds
            from enginewright.optimizer.measure.texts import BUILT_IN

            compared = compare_builds(
                bundle,
                against,
                budget=budget,
                prompts=prompts or BUILT_IN,
                target=target[0] if target else None,
                provider=provider,
                trust=trust,
                threads=threads,
                progress=show,
            )
    if compared is not None and junit is not None:
        from enginewright.optimizer.compare_builds import write_junit

        write_junit(compared, junit)
    well = compared is None or not (compared.failed or compared.inconclusive)
    if as_json:
        print_json(check.to_json() | ({} if compared is None else {"against": compared.to_json()}))
    elif not quiet or not well:
        _print_check(check, hint=compared is None)
        if compared is not None:
            console = stdout_console()
            if not console.is_terminal:
                console.width = 140
            _print_comparison(compared, console, budget)
    if compared is not None and not well:
        raise typer.Exit(EXIT_OVER_BUDGET if compared.failed else EXIT_INCONCLUSIVE)


def _check_against(against: Path | None, of_against: Mapping[str, object], targets: Sequence[str]) -> None:
    """Raises an error for options of --against without it, and for --against with several targets.

    ``of_against``: option -> its value.
    """
    if against is None:
        if lonely := [name for name, value in of_against.items() if value is not None]:
            raise typer.BadParameter("it is for --against, which is not given", param_hint=lonely[0])
    elif len(targets) > 1:
        raise typer.BadParameter("--against compares one target", param_hint="--target")


def _print_check(found: BundleCheck, *, hint: bool) -> None:
    from enginewright.runtime.shared.memory import format_bytes

    typer.echo(f"{found.path}: {found.files} files, {format_bytes(found.bytes)}: all hashes are right")
    if found.outdated is not None:
        typer.echo(found.outdated)
    for one in found.targets:
        if one.why_not is not None:
            typer.echo(f"target {one.target}: not run here: {one.why_not}")
            continue
        typer.echo(f"target {one.target}: its program is sound ({_how(one.runs_with)})")
        if one.comparison is not None:
            typer.echo(comparison_lines(asdict(one.comparison)))
    if found.source is None and hint:
        typer.echo("What it computes was not looked at: pass --source MODEL for that.")


def _how(runs_with: dict[str, str | int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in runs_with.items() if key != "target")


def _print_comparison(found: BuildComparison, console: Console, budget: Path | None) -> None:
    """Prints the checks as a table, the reasons of failed ones, and the verdict."""

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def say_rest(count: int) -> None:
        if count > MOST_PROMPTS:
            say(f"  and {count - MOST_PROMPTS} more")

    say(f"\n{found.bundle} against the {found.kind} {found.against}, on target {found.target}")
    if found.equal_files:
        say("within the budget: all files are equal, so neither bundle was run, and nothing was timed")
        return
    prompts = f"{found.prompts} prompts and their answers" if found.prompts > 1 else "a prompt and its answer"
    if found.task is not None:
        prompts = counted(found.prompts, "text")
    say(f"{found.tokens:,} tokens of {prompts}; budget: {budget or 'the default'}\n")
    console.print(_table(found.checks))
    if found.layers:
        say("\nKL by what each layer gets, nats a token:")
        shown = [f"{'logits' if one.layer is None else one.layer} {one.kl_mean:.2g}" for one in found.layers]
        say(f"  {', '.join(shown)}")
    if found.changed:
        say(f"\n{len(found.changed)} of {found.prompts} prompts have tokens that changed:")
        for one in found.changed[:MOST_PROMPTS]:
            say(
                f"  {one.where}: {one.changed} of {one.tokens} tokens; at token {one.first} {one.expected} became "
                f"{one.found}"
            )
        say_rest(len(found.changed))
    if found.files:
        say("\nfiles that differ, A the older:")
        for line in found.files[:MOST_PROMPTS]:
            say(f"  {line}")
        say_rest(len(found.files))
    say(f"\n{_verdict(found)}")


def _table(checks: Sequence[Check]) -> Table:
    """Returns the table of checks: what was measured, what is allowed, and the results."""
    from rich.table import Table
    from rich.text import Text

    from enginewright.optimizer.build_budget import limit_of, number

    table = Table(box=None, pad_edge=False)
    for heading in ("check", "measured", "allowed", "result", ""):
        table.add_column(heading, overflow="fold")
    styles = {"passed": "green", "failed": "bold red", "inconclusive": "yellow", "not compared": "dim"}
    for check in checks:
        measured = "" if check.measured is None else number(check.measured)
        cells = (check.name, measured, limit_of(check), check.outcome, check.detail)
        table.add_row(*(Text(cell, styles[check.outcome] if cell == check.outcome else "") for cell in cells))
    return table


def _verdict(found: BuildComparison) -> str:
    if found.failed:
        names = ", ".join(check.name for check in found.failed)
        compared = sum(check.outcome != "not compared" for check in found.checks)
        return f"over the budget: {len(found.failed)} of {compared} checks: {names}"
    if found.inconclusive:
        names = ", ".join(check.name for check in found.inconclusive)
        return f"inconclusive: times vary too much on this machine: {names}; all else is within the budget"
    return "within the budget"
