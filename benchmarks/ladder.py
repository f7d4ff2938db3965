"""The gain of each optimization step for one model, from transformers' eager without a KV cache to speculation.

    python benchmarks/ladder.py FOLDER [--rounds 3] [--json FILE] [--page benchmarks/notes/ladder.md] [--bundles WHERE]

FOLDER is the model as transformers reads it (SmolLM2, say); bundles are exported into WHERE if they aren't there, or
were made by other code. Each rung is measured in a process of its own, in turn with the others: tokens a second of one
request, 128 tokens behind a prompt of 256; bytes of weights; and the KL divergence from the source in 32-bit floats.
``--prepare`` exports and measures nothing. A rung that can't be switched here is left out, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from claims_page import chart
from peers.ahead import Texts
from peers.loading import BUILD
from peers.machine import commit, machine
from peers.marked_table import line
from peers.prepare import export
from peers.processes import Command, run
from peers.workload import Report, Workload
from speculation import TASKS

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.text.tokenizer import Tokenizer

UNFUSED = """name = "unfused"
description = "Exact 32-bit floats, each op by itself."
[weights]
default = { storage = "f32" }
[kv_cache]
dtype = "f32"
[passes]
fuse_qkv = false
fuse_gate_up = false
fuse_add_norm = false
fuse_linear_activation = false
fuse_linear_residual = false
fuse_norm_quantize = false
fuse_rope_kv_write = false
"""
PROMPT, STEPS, TOGETHER = 256, 128, 16
TASK = "copy"
"""The task of ``speculation``: the one that computing tokens ahead fits."""

LEFT_OUT = {
    "tiled attention": "the cpu target's kernels have it, and no recipe changes that; `benchmarks/claims.py --parts\n"
    "  attention` measures tiles beside all scores written down by torch, for whole prompts"
}
"""Rungs that can't be switched here, and why."""


@dataclass(frozen=True)
class Rung:
    """A step.

    Attributes:
        name, about: what is new in it.
        how: "uncached" or "cached" of transformers; "one", "together" or "ahead" of a bundle.
        bundle: its name, which is its recipe's too.
        alone: one request behind PROMPT random tokens, so that it can be compared with others of that kind.
    """

    name: str
    about: str
    how: str
    bundle: str = ""
    alone: bool = True


RUNGS = (
    Rung("no KV cache", "transformers' eager in bf16; each token computes all before it again", "uncached"),
    Rung("KV cache", "the same with transformers' cache", "cached"),
    Rung("f32, unfused", "our compiler and kernels, 32-bit floats, each op by itself", "one", "unfused"),
    Rung(
        "f32, fused",
        "recipe `f32`: one product for q, k, v, one for gate and up; residuals in products, rotation in cache writes",
        "one",
        "f32",
    ),
    Rung("bf16", "recipe `bf16`", "one", "bf16"),
    Rung("int8", "recipe `int8`", "one", "int8"),
    Rung("int4", "recipe `int4`", "one", "int4"),
    Rung(f"{TOGETHER} requests", "`int4`, paged KV cache, all requests in one batch", "together", "int4", alone=False),
    Rung("speculation", "`int4`, one request that copies a text", "ahead", "int4", alone=False),
)
EAGER = RUNGS[1]
AIM = 10
"""Times the speed of EAGER, at one request."""


def main(arguments: list[str] | None = None) -> int:
    """Exports, measures, prints, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundles", type=Path, default=BUILD / "ladder", help="where the bundles are, or go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prepare", action="store_true", help="export what is missing, but measure nothing")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--page", type=Path, help="where the page goes; its chart lies beside it")
    options = parser.parse_args(arguments)
    options.bundles.mkdir(parents=True, exist_ok=True)
    (options.bundles / "unfused.toml").write_text(UNFUSED, encoding="utf-8")
    for name in dict.fromkeys(rung.bundle for rung in RUNGS if rung.bundle):
        recipe = str(options.bundles / "unfused.toml") if name == "unfused" else name
        export(options.folder.resolve(), options.bundles / f"{name}.bundle", recipe, None)
    if options.prepare:
        return 0
    figures = {
        "rungs": measured(options),
        "left_out": LEFT_OUT,
        "rounds": options.rounds,
        "threads": options.threads,
        "transformers": metadata.version("transformers"),
        "machine": machine(),
        "commit": commit(),
    }
    text = page(figures)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.page:
        options.page.write_text(text, encoding="utf-8")
        options.page.with_name("ladder.svg").write_text(drawing(figures), encoding="utf-8")
    return 0


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measures each rung: tokens a second of each round, and of the best one, since what else runs only slows; bytes of
    weights, KL divergence (of the first round), and of a bundle the steps of its program."""
    rungs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        reference, texts = Path(scratch) / "reference.npz", Path(scratch) / "texts.json"
        run(eager("reference", options, Workload(threads=options.threads), reference))
        files = Bundle.open(options.bundles / "int4.bundle").tokenizer_files()
        Texts({TASK: Tokenizer(files).encode(TASKS[TASK])}, STEPS).write(texts)
        for index in range(options.rounds):
            for rung in RUNGS[index % len(RUNGS) :] + RUNGS[: index % len(RUNGS)]:
                work = Workload(
                    prompt=PROMPT,
                    short_prompt=PROMPT,
                    steps=STEPS,
                    batches=(TOGETHER if rung.how == "together" else 1,),
                    threads=options.threads,
                    seed=index,
                    texts=str(texts),
                )
                figures = rungs.setdefault(rung.name, {"rounds": []})
                figures["rounds"].append(
                    MEASURE[rung.how](options, rung, work, figures, reference if not index else None)
                )
                print(f"{index} {rung.name}: {figures['rounds'][-1]:,.1f} tokens/s", file=sys.stderr, flush=True)
    return {rung.name: rungs[rung.name] | {"tokens_per_second": max(rungs[rung.name]["rounds"])} for rung in RUNGS}


def eager(how: str, options: argparse.Namespace, work: Workload, reference: Path | None) -> list[str]:
    """The command that runs transformers."""
    arguments = [how, str(options.folder.resolve()), work.to_json(), str(reference or "")]
    return [sys.executable, "-m", "peers.workers.eager", *arguments]


Figures = dict[str, Any]


def of_eager(options: argparse.Namespace, rung: Rung, work: Workload, record: Figures, reference: Path | None) -> float:
    """Tokens a second; the rest goes into ``record``."""
    report = run(eager(rung.how, options, work, reference))
    record |= {"bytes": report.bytes["weights"]} | ({"kl": report.figures["kl"]} if reference else {})
    return report.figures["decode_1"]


def of_bundle(
    options: argparse.Namespace, rung: Rung, work: Workload, record: Figures, reference: Path | None
) -> float:
    """Measures tokens a second of a bundle; the rest goes into ``record``.

    Several requests compute the bits of one, so their KL divergence isn't measured again.
    """
    bundle, ours = options.bundles / f"{rung.bundle}.bundle", Command(Path(sys.executable), "ours")
    report = run(ours.line("speed", bundle, work))
    record |= {"bytes": report.bytes["weights"], "steps": len(Bundle.open(bundle).program("cpu").steps)}
    if reference and rung.alone:
        record["kl"] = run(ours.line("logits", bundle, work, "--reference", str(reference))).figures["kl"]
    return report.figures[f"decode_{work.batches[0]}"]


def of_speculation(
    options: argparse.Namespace, rung: Rung, work: Workload, record: Figures, reference: Path | None
) -> float:
    """Measures tokens a second with speculation, and asserts equal tokens; speeds without it go into ``record``."""
    report: Report = run(
        Command(Path(sys.executable), "ours").line("ahead", options.bundles / f"{rung.bundle}.bundle", work)
    )
    assert report.figures[f"{TASK}.same"] == STEPS, "speculation changed a token"
    record.setdefault("plain_rounds", []).append(report.figures[f"{TASK}.off"])
    return report.figures[f"{TASK}.on"]


MEASURE: dict[str, Callable[[argparse.Namespace, Rung, Workload, Figures, Path | None], float]] = {
    "uncached": of_eager,
    "cached": of_eager,
    "one": of_bundle,
    "together": of_bundle,
    "ahead": of_speculation,
}


def drawing(figures: Mapping[str, Any]) -> str:
    """The chart, as SVG."""
    speeds = {rung.name: figures["rungs"][rung.name]["tokens_per_second"] for rung in RUNGS}
    return chart([(name, speed, f"{speed:,.0f} tokens/s") for name, speed in speeds.items()])


def page(figures: Mapping[str, Any]) -> str:
    """benchmarks/notes/ladder.md."""
    rungs = figures["rungs"]
    base, before = rungs[EAGER.name]["tokens_per_second"], 0.0
    rows = []
    for rung in RUNGS:
        of = rungs[rung.name]
        speed = of["tokens_per_second"]
        weights = of.get("bytes", rungs[last_alone(rung)]["bytes"])
        kl = f"{of['kl']:.2g}" if "kl" in of else f"as {last_alone(rung)}"
        against = of_the_one_before(rung, of, speed, before)
        cells = (rung.name, rung.about, f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}", against)
        rows.append(line((*cells, f"{speed / base:,.2f}" if rung.alone else "", f"{weights / 1e6:,.0f}", kl)))
        before = speed
    times = {rung: rungs[rung.name]["tokens_per_second"] / base for rung in RUNGS if rung.alone}
    reaching = [
        f"{rung.name} with {more:.1f} (KL {rungs[rung.name]['kl']:.2g})" for rung, more in times.items() if more >= AIM
    ]
    aim = f"reached by {' and '.join(reaching)}" if reaching else f"not reached: {max(times.values()):.1f} is the most"
    left_out = "\n".join(f"- {name}: {why}." for name, why in figures["left_out"].items())
    steps = {name: rungs[name]["steps"] for name in ("f32, unfused", "f32, fused")}
    plain = max(rungs["speculation"]["plain_rounds"])
    return f"""# The ladder

One model, one optimization after another. This page is made by
`python benchmarks/ladder.py FOLDER --page benchmarks/notes/ladder.md`. SmolLM2-135M-Instruct on
{figures["machine"]["processor"]}, {figures["threads"]} threads, transformers
{figures["transformers"]}; the best of {figures["rounds"]} rounds in turn, each rung in a process of its own.

![Tokens a second](ladder.svg)

| rung | what is new | tokens a second | times the one before | times eager with a cache | weights, MB | KL, nats |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}

Tokens a second are of one request: {STEPS} tokens behind a prompt of {PROMPT} random ones, the prompt's own time not
counted. Two rungs are something else and have no figure beside eager: "{TOGETHER} requests" is all of {TOGETHER} such
requests together, and "speculation" copies a text, where it fits; its "times" is against the same task without it
({plain:,.0f} tokens a second). KL is the divergence from the source in 32-bit floats, on average of 512 tokens of text
that every Python brings. Requests in a batch and tokens that are computed ahead have the
[same bits](../../docs/inside/numerics.md).

Without a cache one step in eight is timed, over the same lengths. Fusions make {steps["f32, fused"]:,} steps of a
program of {steps["f32, unfused"]:,}.

The aim, {AIM} times eager with a cache at one request, is {aim}.

Left out, as it can't be switched here:

{left_out}
"""


def last_alone(rung: Rung) -> str:
    """The rung whose bits, and weights, it has."""
    return next(one.name for one in RUNGS if one.alone and one.bundle == rung.bundle)


def of_the_one_before(rung: Rung, of: Mapping[str, Any], speed: float, before: float) -> str:
    """Says, where a rung is speculation, what it gives of the same task without it."""
    if "plain_rounds" in of:
        return f"{speed / max(of['plain_rounds']):,.2f}"
    return f"{speed / before:,.2f}" if before else ""


if __name__ == "__main__":
    sys.exit(main())
