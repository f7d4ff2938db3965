"""Our speculation beside the peers': by prompt lookup, and with a draft model where one is given."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from enginewright.runtime.bundle.reader import Bundle
from peers.ahead import Texts
from peers.engines import FORMATS, OURS, TITLES, Format
from peers.loading import REPOSITORY, load_module
from peers.marked_table import MarkedTable, line
from peers.prepare import Asked, prepare
from peers.processes import Command, WorkerError, run
from peers.workload import Report, Workload

LOOKUPS = (("llama.cpp", 2), ("llama.cpp", 10), ("openvino", 5), ("openvino", 10))
"""Each with the tokens that it computes ahead: llama-cpp-python's page has 2 for processors and 10 by default,
OpenVINO's samples 5."""
DRAFTS = (("llama.cpp", 3), ("llama.cpp", 5), ("openvino", 3), ("openvino", 5))
"""Engines with draft models, and the tokens that each computes ahead: OpenVINO's default is 5."""

Runs = dict[str, tuple[Command, Path, Workload]]


def beside(options: argparse.Namespace, prompts: Mapping[str, list[int]]) -> dict[str, Any]:
    """Ours and the peers: what each engine is and was told, its figures of each task, and why one is missing.

    Raises SystemExit for a bundle of another model than the peers are given."""
    model = model_of(options.bundle)
    guesser = format_of(options.draft, model) if options.draft else None
    engines = list(dict.fromkeys(name for name, _ in LOOKUPS))
    selection = Asked([model], [one for one in (options.peers, guesser) if one], engines, every_format=True)
    peers, missing = prepare(selection, lambda text: print(text, file=sys.stderr))
    failed = {f"{TITLES[one.engine]} {one.format}".rstrip(): one.reason for one in missing}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.json"
        Texts(prompts, options.tokens).write(path)
        work = Workload(threads=options.threads, texts=str(path))
        paths = {(peer.engine, peer.format): (peer.command, peer.path) for peer in peers}
        ours = Command(Path(sys.executable), "ours"), options.bundle.resolve()
        runs: Runs = {TITLES[OURS]: (*ours, work)}
        if options.draft:
            with_draft = replace(work, draft_model=str(options.draft.resolve()))
            runs[f"{TITLES[OURS]}, draft model"] = (*ours, with_draft)
        for name, ahead in LOOKUPS:
            if one := paths.get((name, options.peers)):
                runs[f"{TITLES[name]}, {ahead} ahead"] = (*one, replace(work, draft=ahead))
        for name, ahead in DRAFTS:
            one, draft = paths.get((name, options.peers)), guesser and paths.get((name, guesser))
            if one and draft:
                drafted = replace(work, draft=ahead, draft_model=str(draft[1]))
                runs[f"{TITLES[name]}, draft model, {ahead} ahead"] = (*one, drafted)
        reports = in_turn(runs, options.rounds, failed)
    figures: dict[str, dict[str, Any]] = {
        name: {"engine": of[0].engine, "settings": of[0].settings, "tasks": medians(of, list(prompts))}
        for name, of in reports.items()
        if of
    }
    for name in (name for name in figures if name.startswith(TITLES[OURS])):
        changed = {task: of["same"] for task, of in figures[name]["tasks"].items() if of["same"] < options.tokens}
        assert not changed, f"{name}: speculation changed a token: {changed}"
    text = table(figures, failed, options.tokens)
    print(text)
    if options.page:
        marked(model, options.peers, guesser).put(options.page, text)
    return {"model": model, "engines": figures, "failed": failed}


def marked(model: str, kind: Format, guesser: Format | None = None) -> MarkedTable:
    """The table of a model in a format, and of a draft model's."""
    return MarkedTable(f"speculation.py {model} {kind}{f' draft {guesser}' if guesser else ''}")


def model_of(bundle: Path) -> str:
    """The name in ``peers.models`` of what a bundle was made from. Raises SystemExit where it is none of them."""
    known = load_module("fetch_model", REPOSITORY / "examples" / "fetch_model.py").MODELS
    source = Bundle.open(bundle).manifest.source.name
    name_of_source: str | None = next((name for name, one in known.items() if one.name == source), None)
    if name_of_source is None:
        names = " or ".join(one.name for one in known.values())
        raise SystemExit(f"{bundle}: made from {source}, which peers aren't given; --peers needs a bundle of {names}")
    return name_of_source


def format_of(draft: Path, model: str) -> Format:
    """The peers' format of the same bits as a draft model's recipe. Raises SystemExit for another model or recipe."""
    if (other := model_of(draft)) != model:
        raise SystemExit(f"--draft {draft}: made from {other}, and BUNDLE from {model}; give one of the same model")
    recipe = str(Bundle.open(draft).manifest.recipe.get("name"))
    for one in FORMATS:
        if one == recipe:
            return one
    raise SystemExit(f"--draft {draft}: recipe {recipe}; peers have {', '.join(FORMATS)}: export it with one of these")


def in_turn(runs: Runs, rounds: int, failed: dict[str, str]) -> dict[str, list[Report]]:
    """Runs rounds, each in another order; the message of a peer that crashed goes to ``failed``. Ours may not crash."""
    reports: dict[str, list[Report]] = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            command, model, work = runs[name]
            try:
                reports[name].append(run(command.line("ahead", model, work)))
            except WorkerError as e:
                if name.startswith(TITLES[OURS]):
                    raise
                failed[name] = f"round {index}: {e}"
    return reports


def medians(rounds: Sequence[Report], tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Gives the medians of each task's figures; ``ratio`` is of one round's speeds, and ``same`` the fewest tokens of
    all rounds."""
    by_task: dict[str, dict[str, float]] = {}
    for task in tasks:
        every = [
            {key.removeprefix(f"{task}."): value for key, value in of.figures.items() if key.startswith(f"{task}.")}
            for of in rounds
        ]
        one = {key: median(of[key] for of in every) for key in every[0]}
        one["ratio"] = median(of["on"] / of["off"] for of in every)
        by_task[task] = one | {"same": min(of["same"] for of in every)}
    return by_task


def table(engines: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], tokens: int) -> str:
    """Markdown: a line for each task and engine; what each was told; and who crashed or is missing."""
    lines = [
        line(("task", "engine", "off, tok/s", "on, tok/s", "ratio", "tokens a step", "accepted", "its own tokens"))
    ]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for task in next(iter(engines.values()))["tasks"]:
        for name, engine in engines.items():
            of = engine["tasks"][task]
            drafted = f" of {of['drafted']:.0f}" if "drafted" in of else ", drafted not counted"
            same = "the same" if of["same"] == tokens else f"others from token {of['same'] + 1:.0f} on"
            speeds = f"{of['off']:,.0f}", f"{of['on']:,.0f}", f"{of['ratio']:.2f}", f"{of['tokens_per_step']:.1f}"
            lines.append(line((task, name, *speeds, f"{of['accepted']:.0f}{drafted}", same)))
    lines.append("")
    lines += (f"- {name}: {engine['engine']}, {engine['settings']}." for name, engine in engines.items())
    return "\n".join(
        [*lines, *(f"- {name} has no results for some or all rounds: {why}" for name, why in failed.items())]
    )
