"""Options that several commands share: what the parser sees of a group of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from enginewright.optimizer.cli.options import Running, Serving, grouped


@dataclass(frozen=True)
class Size:
    """A group."""

    width: Annotated[int, typer.Option("--width", "-w", help="So wide.")] = 2
    height: Annotated[int | None, typer.Option(help="So high.")] = None


def app_of(seen: dict[str, Any]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @grouped
    def command(
        name: Annotated[str, typer.Argument(metavar="NAME")],
        *,
        size: Size,
        quiet: Annotated[bool, typer.Option()] = False,
    ) -> None:
        """Keeps the options."""
        seen.update(name=name, size=size, quiet=quiet)

    return app


def test_a_group_s_fields_are_options_where_it_stands_and_come_as_one():
    seen: dict[str, Any] = {}
    assert CliRunner().invoke(app_of(seen), ["a", "-w", "5", "--quiet"]).exit_code == 0
    assert seen == {"name": "a", "size": Size(5, None), "quiet": True}
    output = CliRunner().invoke(app_of(seen), ["--help"]).output
    places = [output.index(word) for word in ("Keeps the options.", "NAME", "--width", "--height", "--quiet")]
    assert places[0] > 0 and places[2:] == sorted(places[2:]) and "So wide." in output


def test_an_option_of_no_group_is_refused():
    result = CliRunner().invoke(app_of({}), ["a", "--size", "5"])
    assert result.exit_code == 2 and "--size" in result.output


def test_what_is_served_has_the_names_of_the_class():
    options = Serving(target="cpu", threads=2, speculate="off", scheduling="fair").given()
    assert options["speculate"] is None and options["scheduling"] == "fair" and options["threads"] == 2
    assert list(options)[: len(vars(Running()))] == list(vars(Running()))
