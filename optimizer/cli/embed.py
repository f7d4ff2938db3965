"""``optimize embed``: the vectors of the texts of a file."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginewright.runtime.shared.errors import RequestError

from .console import print_json, reported
from .exported import exported
from .options import AsJson, ModelPath, ModelRecipe, NoProgress, Running, grouped
from .progress import stage_bars

if TYPE_CHECKING:
    from enginewright import LLM
    from enginewright.optimizer.embed.texts import TextFile
    from enginewright.runtime.shared.contracts import FloatArray

EPILOG = (
    "Examples:\n\n"
    "  optimize embed minilm.bundle texts.txt -o vectors.npy\n\n"
    "  optimize embed minilm.bundle questions.jsonl --field question --prompt query -o vectors.jsonl\n\n"
    "  optimize embed bge-small-en-v1.5 texts.txt -o vectors.parquet --dimensions 256 --json"
)

_AT_ONCE = 1024
"""The number of texts that are embedded between two writes to the output."""


@reported
@grouped
def command(
    model: ModelPath,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A file with one text per line or, with --field, one JSON object per line."
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .npy, .jsonl or .parquet file, with a row for each text.")
    ],
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help='The field of each JSON object that has the text; default "text" for .jsonl files.'
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model's prompt to put before each text, such as query."),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Cut vectors to this number of dimensions, if the model allows it.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Scale vectors to length 1, or not; default: as the model's files say."
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long, instead of refusing them.")
    ] = (False),
    recipe: ModelRecipe = None,
    running: Running,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Writes the vector of each text of a file.

    After Ctrl-C, the finished vectors are in OUTPUT.part, and the same command continues with the other texts.
    """
    from enginewright import LLM
    from enginewright.optimizer.embed.outputs import check_output, write_vectors
    from enginewright.optimizer.embed.texts import TextFile
    from enginewright.optimizer.embed.unfinished import Unfinished
    from enginewright.runtime.shared.progress import ProgressEvent

    check_output(output)
    texts = TextFile(file, field)
    bundle = exported(model, recipe=recipe, quiet=quiet)
    with LLM(bundle, **vars(running)) as llm, stage_bars(hidden=quiet, counts=True, remaining=True) as show:
        options: dict[str, Any] = {
            "prompt": prompt,
            "dimensions": dimensions,
            "normalize": normalize,
            "truncate": truncate,
        }
        made_from = {"texts": texts.digest, "field": texts.field, "bundle": llm.bundle_hash, **options}
        part = Unfinished(output, made_from)
        start, left = time.perf_counter(), iter(texts)
        first = _embedded(llm, texts, 0, [next(iter(texts))], options)[0]
        part.begin(len(first))
        resumed = part.rows
        try:
            for _ in islice(left, resumed):
                pass
            while some := list(islice(left, _AT_ONCE)):
                show(ProgressEvent("embed", part.rows, texts.count))
                part.add(_embedded(llm, texts, part.rows, some, options))
        except KeyboardInterrupt:
            print(f"{part.rows:,} of {texts.count:,} vectors are in {part.path}", file=sys.stderr)
            raise
        finally:
            part.close()
        show(ProgressEvent("write", texts.count, texts.count))
        seconds = time.perf_counter() - start
        write_vectors(output, texts, part.vectors())
        part.remove()
    count = texts.count - resumed
    if as_json:
        print_json(
            {
                "output": str(output),
                "bundle": made_from["bundle"],
                "texts": texts.count,
                "resumed": resumed,
                "dimensions": len(first),
                "seconds": seconds,
                "texts_per_second": count / seconds,
            }
        )
    else:
        print(f"{output}: {texts.count:,} vectors of {len(first)} numbers, {count / seconds:.1f} texts a second")


def _embedded(llm: LLM, file: TextFile, begin: int, texts: list[str], options: Mapping[str, Any]) -> FloatArray:
    """Returns the vectors of texts of a file. ``begin`` is the index of the first of these texts in the file.

    Raises RequestError naming the line of a text.
    """
    try:
        return llm.embed(texts, progress=False, raise_errors=True, **options)
    except RequestError as e:
        match = re.fullmatch(r"texts\[(\d+)\](:.*)", e.message, re.DOTALL)
        if match is None:
            raise
        raise e.reworded(f"{file.path}:{begin + int(match[1]) + 1}{match[2]}", hint=e.hint) from e
