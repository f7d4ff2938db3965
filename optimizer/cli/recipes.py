"""``optimize recipes``: lists the built-in recipes."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import print_json, reported
from .options import AsJson

EPILOG = "Examples:\n\n  optimize recipes\n\n  optimize recipes int8 > mine.toml\n\n  optimize recipes --json"


@reported
def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe's TOML; without it, list all recipes.")
    ] = None,
    show: Annotated[str | None, typer.Option("--show", metavar="NAME", help="The same as the argument NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the built-in recipes, or prints one as a start for your own."""
    from enginewright.optimizer.recipes.recipe import list_recipes, load_recipe, recipe_text

    if name is not None and show is not None:
        raise typer.BadParameter("give one recipe, as the argument or with --show")
    show = show if name is None else name
    if show is not None:
        if as_json:
            print_json(load_recipe(show).model_dump(mode="json"))
        else:
            typer.echo(recipe_text(show), nl=False)
        return
    recipes = list_recipes()
    if as_json:
        print_json([recipe.model_dump(mode="json") for recipe in recipes])
        return
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        typer.echo(f"{recipe.name:<{width}}  {recipe.description}")
