"""``optimize loadtest``: sends the requests of many clients to a server, and measures the answers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import print_found, reported
from .options import AsJson, NoProgress, grouped, named_value
from .progress import stage_bars

EPILOG = (
    "Examples:\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --clients 16\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --rate 5 --seconds 60 --ttft 500ms --tpot 50ms\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --rate 5 --arrivals bursts --prompt lognormal:200:0.8\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --clients 8 --turns 4 --shared-prefix 500 --leave 0.1\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --trace requests.jsonl --plot load.svg --json > load.json\n\n"
    "  optimize loadtest https://models.example.org/v1 --remote --api-key @key.txt --model chat --rate 2\n\n"
    "  optimize loadtest http://127.0.0.1:8000 --embed --texts 1-32 --prompt 16-128 --clients 8\n\n"
    "  optimize loadtest smollm2.bundle --clients 4"
)


@dataclass(frozen=True)
class Asking:
    """The options that say where requests are sent, and as what."""

    api: Annotated[str, typer.Option(metavar="chat|completions", help="The endpoint of OpenAI's API.")] = "chat"
    embed: Annotated[bool, typer.Option("--embed", help="Request embeddings of texts instead.")] = False
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model's name; default: the server's first.")] = (
        None
    )
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY|@FILE", help="An API key, or @ and the file with the key.")
    ] = None
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Allow a server on another machine; its owner must permit this load."),
    ] = False
    timeout: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time without data from the server after which a request counts as failed."),
    ] = "120s"
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A field of all request bodies, such as temperature=0.7 (default 0); may be repeated.",
        ),
    ] = None


@dataclass(frozen=True)
class Coming:
    """The options that decide when requests are sent."""

    clients: Annotated[
        int | None,
        typer.Option("--clients", "-c", help="Closed loop: number of clients that each wait for an answer; default 4."),
    ] = None
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second, without waiting for answers.")] = (
        None
    )
    arrivals: Annotated[
        str,
        typer.Option(metavar="poisson|constant|bursts", help="Distribution of arrival times in an open loop."),
    ] = "poisson"
    burst: Annotated[
        str,
        typer.Option(
            metavar="FACTORxTIME/TIME", help="Bursts; 5x4s/20s means 5 times the rate for 4 of every 20 seconds."
        ),
    ] = "5x4s/20s"
    trace: Annotated[
        Path | None, typer.Option(help="A file of requests with times: JSONL, Mooncake's format, or Azure's CSV.")
    ] = None
    speed: Annotated[float, typer.Option(help="Replay a trace faster by this factor.")] = 1.0
    requests: Annotated[
        int | None,
        typer.Option(help="Number of conversations; default: 100, or all of a trace."),
    ] = None
    seconds: Annotated[float | None, typer.Option(help="Send no requests after this number of seconds.")] = None
    think: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time between an answer and the next turn; default 0.")
    ] = None
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0


@dataclass(frozen=True)
class Saying:
    """The shape of requests; with --classes, the defaults of each class."""

    prompt: Annotated[
        str, typer.Option(metavar="LENGTH", help="Tokens per prompt: 128, 20-200, lognormal:MEDIAN:SIGMA, or a file.")
    ] = "128"
    answer: Annotated[str, typer.Option(metavar="LENGTH", help="Maximum tokens of an answer.")] = "64"
    turns: Annotated[str, typer.Option(metavar="LENGTH", help="Turns per conversation.")] = "1"
    texts: Annotated[
        str, typer.Option(metavar="LENGTH", help="With --embed, texts per request; --prompt sets their length.")
    ] = "1"
    shared_prefix: Annotated[int, typer.Option(help="Tokens in the shared prefix of prompts.")] = 0
    prefixes: Annotated[int, typer.Option(help="Number of different shared prefixes.")] = 1
    leave: Annotated[float, typer.Option(help="Share of clients that disconnect during an answer, such as 0.1.")] = 0.0
    ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Goal for the time to the first token.")] = None
    tpot: Annotated[str | None, typer.Option(metavar="TIME", help="Goal for the time of each further token.")] = None
    end_to_end: Annotated[str | None, typer.Option(metavar="TIME", help="Goal for the time to the end.")] = None
    classes: Annotated[Path | None, typer.Option(help="A TOML file with classes of requests.")] = None


@reported
@grouped
def command(
    server: Annotated[
        str, typer.Argument(metavar="URL|BUNDLE", help="A server's address; or a bundle to serve during the test.")
    ],
    *,
    asking: Asking,
    coming: Coming,
    saying: Saying,
    plot: Annotated[Path | None, typer.Option(help="Draw the times into this SVG file.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write one JSON line per request into this file.")] = None,
    as_json: AsJson = False,
    quiet: NoProgress = False,
) -> None:
    """Sends the requests of many clients to a server, and measures the times of each request.

    The server must have OpenAI's API, like those of Enginewright, vLLM and llama.cpp.
    """
    from enginewright.optimizer.bench.plot import check_folder
    from enginewright.optimizer.loadtest.own_server import served
    from enginewright.optimizer.loadtest.plot import write_svg
    from enginewright.optimizer.loadtest.result import result_of
    from enginewright.optimizer.loadtest.run import LoadRun
    from enginewright.optimizer.loadtest.text import print_load
    from enginewright.optimizer.loadtest.workload import Workload

    for path in (plot, records):
        if path is not None:
            check_folder(path)
    with contextlib.ExitStack() as stack:
        values = _options(asking, coming, saying)
        url = server
        if "://" not in server and Path(server).exists():
            _made("http://127.0.0.1", values)  # what is wrong with the options is told before a server starts
            url = stack.enter_context(served(Path(server)))
        options = _made(url, values)
        workload = Workload(options)
        show = stack.enter_context(stage_bars(hidden=quiet, counts=True))
        run = asyncio.run(LoadRun(options, workload, show).run())
    result = result_of(run, options, workload)
    if plot is not None:
        write_svg(result, plot)
    if records is not None:
        result.write_records(records)
    print_found(result, print_load, as_json=as_json, plot=plot)
    if run.interrupted:
        raise KeyboardInterrupt


def _made(url: str, given: dict[str, Any]) -> Any:
    from enginewright.optimizer.loadtest.options import LoadOptions

    options = LoadOptions(url=url, **given)
    options.check()
    return options


def _options(asking: Asking, coming: Coming, saying: Saying) -> dict[str, Any]:
    """Returns the fields of LoadOptions except the address. Raises RequestError or BadParameter."""
    from enginewright.optimizer.loadtest.options import Goals, RequestClass, parse_burst, parse_lengths, read_classes
    from enginewright.optimizer.plan.options import parse_seconds

    for name, value, known in (
        ("--api", asking.api, ("chat", "completions")),
        ("--arrivals", coming.arrivals, ("poisson", "constant", "bursts")),
    ):
        if value not in known:
            raise typer.BadParameter(f"{name}: {value!r} isn't one of {', '.join(known)}")
    times = {name: getattr(saying, name) for name in ("ttft", "tpot", "end_to_end")}
    one = RequestClass(
        prompt=parse_lengths(saying.prompt, "prompt"),
        answer=parse_lengths(saying.answer, "answer"),
        turns=parse_lengths(saying.turns, "turns"),
        texts=parse_lengths(saying.texts, "texts"),
        leave=saying.leave,
        goals=Goals(**{name: parse_seconds(text, name) for name, text in times.items() if text is not None}),
        body=dict(named_value("--param", text, "ignore_eos=true") for text in asking.param or ()),
    )
    return {
        **{name: getattr(asking, name) for name in ("model", "remote")},
        "api": "embeddings" if asking.embed else asking.api,
        "api_key": _key(asking.api_key),
        "timeout": parse_seconds(asking.timeout, "timeout"),
        **{
            name: getattr(coming, name)
            for name in ("clients", "rate", "arrivals", "trace", "speed", "requests", "seconds", "seed")
        },
        "burst": parse_burst(coming.burst),
        "think": 0.0 if coming.think is None else parse_seconds(coming.think, "think"),
        "shared_prefix": saying.shared_prefix,
        "prefixes": saying.prefixes,
        "classes": (one,) if saying.classes is None else read_classes(saying.classes, one),
    }


def _key(text: str | None) -> str | None:
    if text is None:
        return None
    key = text
    if text.startswith("@"):
        try:
            key = Path(text[1:]).read_text().strip()
        except (OSError, ValueError) as e:
            raise typer.BadParameter(f"--api-key: {text[1:]}: {getattr(e, 'strerror', None) or e}") from e
    if not key or not key.isascii() or not key.isprintable():
        raise typer.BadParameter("--api-key: it is empty, or has characters that a header can't have")
    return key
