"""A result as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginewright.runtime.shared.errors import counted
from peers.engines import ENGINES, OURS, TITLES
from peers.summary import FIGURES, RECURRENCE, Figure
from peers.workload import Workload

SHORT = ("prefill", "decode_1", "decode_16", "peak")
"""Figures that the README shows."""

WIDEST = "AVX-512"
"""The kind of machine that goals were set for."""

KINDS = {
    "ratio": "{title}",
    "bandwidth": "share of read bandwidth, decode of 1",
    "peak": "share of the VNNI peak, products of a prefill",
    "memory": "peak memory over weights and KV cache",
}


def shown(figure: Figure, value: float) -> str:
    """A figure as people read it."""
    if figure.name == "peak":
        return f"{value / 1e6:,.0f}"
    if figure.name == "start":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def markdown(rows: Sequence[Sequence[str]], right: int = 1) -> list[str]:
    """Lines of a table whose first row is its head; columns from ``right`` on are flushed right."""
    head, *body = rows
    rule = ["---" if i < right else "---:" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]


def engine_table(table: Mapping[str, Any], long_prompt: int = Workload.long_prompt) -> list[str]:
    """Engines of a model and format; after each peer's figure ours over it, or where less is better it over ours.

    ``long_prompt``: tokens of the model's long prompt.
    """
    engines = table["engines"]
    figures = [f for f in FIGURES if any(f.name in row["figures"] for row in engines.values())]
    compared = any("kl" in row["figures"] for row in engines.values())
    rows = [["", *(title_of(f, long_prompt) for f in figures), *(["KL from f32"] if compared else [])]]
    for name, row in engines.items():
        cells = [f"{TITLES[name]}, {row['weights']}"]
        for figure in figures:
            value = row["figures"].get(figure.name)
            over = row.get("ratio", {}).get(figure.name)
            cell = "" if value is None else shown(figure, value)
            cells.append(f"{cell} ({over['median']:.2f}x)" if over else cell)
        kl = row["figures"].get("kl")
        rows.append([*cells, *(["" if kl is None else f"{kl:.4f}"] if compared else [])])
    return markdown(rows)


def title_of(figure: Figure, long_prompt: int) -> str:
    """The head of a figure's column."""
    return figure.title.replace(f"{Workload.long_prompt:,}", f"{long_prompt:,}")


def limit_line(table: Mapping[str, Any], long_prompt: int = Workload.long_prompt) -> str:
    """The machine's limits, and the share of them that was reached, as a line."""
    limits = table["limits"]
    parts = []
    if "bandwidth_share" in limits:
        parts.append(
            f"in Enginewright a step of one request reads {limits['read_of_a_step'] / 1e6:,.0f} MB of weights, at "
            f"{limits['bandwidth_share']:.0%} of the {limits['bandwidth_of_weights']:.1f} GB/s of a loop over as much"
        )
    if "peak_share" in limits:
        parts.append(
            f"the products of a prefill reach {limits['peak_share']:.0%} of {limits['peak']:,.0f} G multiply-adds a "
            f"second and take {limits['matmul_share_of_prefill']:.0%} of its kernels' time"
        )
    lengths = {"decode_long": f"{long_prompt:,}", "decode_far": "16,384", "decode_farther": "32,768"}
    if behind := {tokens: limits[f"{name}_share"] for name, tokens in lengths.items() if f"{name}_share" in limits}:
        parts.append(
            f"behind {', '.join(behind)} tokens a step moves weights and cache at "
            f"{', '.join(f'{share:.0%}' for share in behind.values())} of the {limits['bandwidth']:.1f} GB/s of memory"
        )
    if shares := {name: share for name, share in limits.items() if name.startswith(RECURRENCE)}:
        of = {name: name.removeprefix(RECURRENCE).replace("_", " of ") for name in shares}
        each = ", ".join(f"{share:.1%} ({of[name]})" for name, share in shares.items())
        parts.append(f"recurrences and their convolutions take {each} of the kernels' time")
    if "memory" in limits:
        parts.append(
            f"at its peak Enginewright's process has {limits['memory']:.2f} times the bytes of weights and KV cache"
        )
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def goal_table(goals: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """Every goal, what was measured, whether it is met, and if not, why."""
    names = {f.name: f.title.split(", tok/s")[0].split(", MB")[0].split(", s")[0] for f in FIGURES}
    rows = [["model", "weights", "goal", "wanted", "measured", "best peer", "met", "reason"]]
    for goal in goals:
        sign = "at most " if goal["kind"] == "memory" else ""
        measured = "" if goal["measured"] is None else value_of(goal["kind"], goal["measured"])
        met = {True: "yes", False: "no", None: "not measured"}[goal["met"]]
        if goal["kl_no_worse"] is False:
            met += " (our KL is larger)"
        elif goal["met"] is not None and goal["kind"] == "ratio" and goal["kl_no_worse"] is None:
            met += " (KL not compared)"
        rows.append(
            [
                titles.get(goal["model"], goal["model"]),
                goal["format"],
                KINDS[goal["kind"]].format(title=names[goal["figure"]]),
                sign + value_of(goal["kind"], goal["wanted"]),
                measured,
                TITLES.get(goal["peer"] or "", ""),
                met,
                goal["reason"],
            ]
        )
    return markdown(rows, right=8)


def value_of(kind: str, value: float) -> str:
    """A goal's number."""
    return f"{value:.0%}" if kind in ("bandwidth", "peak") else f"{value:.2f}x"


def missing_list(missing: Sequence[Mapping[str, str]]) -> list[str]:
    """The comparisons that are missing, with their reasons."""
    names = [", ".join(filter(None, (TITLES.get(m["engine"]), m["model"], m["format"]))) for m in missing]
    return [f"- {name}: {m['reason']}" for name, m in zip(names, missing, strict=True)]


def describe(result: Mapping[str, Any]) -> str:
    """The machine and the run."""
    machine, measured, work = result["machine"], result["measured"], result["workload"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    return (
        f"{machine['processor']}, {work['threads']} threads, {', '.join(machine['instruction_sets'])}; {caches}; "
        f"{machine['memory_gib']} GiB; {machine['system']}. Measured on {measured['date']} at {measured['commit']}, "
        f"{counted(measured['rounds'], 'round')} in {measured['seconds'] / 60:.0f} minutes"
        + ("." if measured["whole"] else ", stopped in the last: figures are of the rounds that each has.")
        + limits_of(work)
    )


def limits_of(work: Mapping[str, Any]) -> str:
    """The engines that ``--isa`` limited, as a sentence; empty without it."""
    if not (isa := work.get("isa")):
        return ""
    whole, products, free = (
        ", ".join(e.title for e in ENGINES.values() if e.limited == part) for part in ("whole", "products", "")
    )
    return (
        f" Limited to {isa.upper()}: {whole}, and the products of {products}. "
        f"The others use all that the machine has: {free}."
    )


def instructions(result: Mapping[str, Any]) -> str:
    """The widest instructions of a run: AVX-512, or AVX2."""
    if result["workload"].get("isa") == "avx2":
        return "AVX2"
    return WIDEST if any(name.startswith("avx512") for name in result["machine"]["instruction_sets"]) else "AVX2"


def whole(result: Mapping[str, Any]) -> list[str]:
    """All tables. Goals were set for machines with AVX-512, and so are their reasons."""
    lines = [describe(result), ""]
    for entry in result["models"].values():
        long_prompt = entry["about"].get("long_prompt", Workload.long_prompt)
        for kind, table in entry["formats"].items():
            lines += [f"### {entry['title']}, {kind}", "", *engine_table(table, long_prompt), ""]
            if line := limit_line(table, long_prompt):
                lines += [line, ""]
    if result["missing"]:
        lines += ["Not compared:", "", *missing_list(result["missing"]), ""]
    if instructions(result) != WIDEST:
        return lines
    titles = {name: entry["title"].split(" of ")[0] for name, entry in result["models"].items()}
    return [*lines, "### Goals", "", *goal_table(result["goals"], titles)]


def short(result: Mapping[str, Any]) -> list[str]:
    """Writes the README's table: of each model and format some of our figures, with ours over the best peer's."""
    shortened = [figure for figure in FIGURES if figure.name in SHORT]
    rows = [["", *(f.title for f in shortened)]]
    for entry in result["models"].values():
        for kind, table in entry["formats"].items():
            figures = table["engines"].get(OURS, {"figures": {}})["figures"]
            cells = [f"{entry['title']}, {kind}"]
            for figure in shortened:
                value, best = figures.get(figure.name), table["best"].get(figure.name)
                cell = "" if value is None else shown(figure, value)
                cells.append(f"{cell} ({best['ratio']:.2f}x {TITLES[best['engine']]})" if best else cell)
            rows.append(cells)
    return markdown(rows)
