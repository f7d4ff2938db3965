"""The cost of structured answers, and checks that they are valid: MaskBench, a guided batch, drafts, a slow
compilation.

    python benchmarks/structured.py BUNDLE [--parts schemas batch drafts slow] [--maskbench FOLDER] [--json FILE]

- schemas: schemas and instances of MaskBench (guidance-ai/jsonschemabench, its folder maskbench/data, which has no
  licence and is never shipped): which compile, what the others are refused for, whether an invalid instance is
  accepted, and what compiling and a mask take. ``--schemas 300`` takes so many, evenly spread; 0 all.
- batch: 16 requests with a JSON schema, and 16 without one that write as many tokens, in turn.
- drafts: one request at a time with schemas of MaskBench, with tokens computed ahead and without, in turn. Again with
  compact JSON.
- slow: the times between a plain request's tokens while another one's schema compiles for seconds, and without that.

Parts after the first need a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import numpy as np
from peers.machine import commit, machine

import enginewright as ew
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.requests.structured import Grammars, Guided, Masks, StructuredOutputsParams
from enginewright.runtime.shared.json_schema import hold_schema
from enginewright.runtime.text.tokenizer import Tokenizer

PARTS = ("schemas", "batch", "drafts", "slow")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3, "maxItems": 5},
        "about": {"type": "string", "minLength": 60, "maxLength": 200},
    },
    "required": ["name", "age", "city", "languages", "about"],
    "additionalProperties": False,
}
NAMES = ("Anna", "Boris", "Chen", "Dalia", "Emre", "Fatou", "Goran", "Hana")
SLOWEST = "JsonSchemaStore---jreleaser-1.7.0.json"
"""The schema of MaskBench that takes longest to compile."""


@dataclass
class Outcome:
    """The result of a set of schemas.

    Attributes:
        compiled, refused: numbers of schemas; ``reasons`` counts the refused ones by the first words of the error.
        instances: instances tried; ``rejected`` counts valid ones that were rejected, ``accepted`` names invalid ones
            that were accepted. An instance with properties that its schema doesn't declare isn't counted as rejected.
        compile_ms, mask_us: all times of compilations and of masks.
    """

    compiled: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    instances: int = 0
    rejected: int = 0
    accepted: list[str] = field(default_factory=list)
    tokens: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Its numbers, with the middle, the 99th percentile and the worst of each time."""
        return {
            "compiled": self.compiled,
            "refused": self.refused,
            "reasons": dict(self.reasons.most_common(20)),
            "instances": self.instances,
            "valid_rejected": self.rejected,
            "invalid_accepted": self.accepted,
            "tokens": self.tokens,
            "compile_ms": _spread(self.compile_ms),
            "mask_us": _spread(self.mask_us),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "worst": round(max(values), 2)}


def try_schemas(
    cases: Iterator[tuple[str, Any, Sequence[tuple[Any, bool]]]], tokenizer: Tokenizer, grammars: Grammars
) -> Outcome:
    """Compiles each schema, and follows its instances token by token, with a mask before each.

    Args:
        cases: a name, a schema, and its instances, each with whether it is valid.
        tokenizer, grammars: of one model.
    """
    outcome = Outcome()
    for name, schema, instances in cases:
        began = time.perf_counter()
        try:
            grammar = grammars.grammar(StructuredOutputsParams(json=json.dumps(schema)))
        except ew.RequestError as e:
            outcome.refused += 1
            outcome.reasons[e.message.partition(": ")[2][:60]] += 1
            continue
        outcome.compiled += 1
        outcome.compile_ms.append((time.perf_counter() - began) * 1e3)
        for data, valid in instances:
            outcome.instances += 1
            text = json.dumps(data, ensure_ascii=False)
            try:
                ids = tokenizer.encode(text, add_special_tokens=False)
            except ew.RequestError:  # it has lone surrogates, which no tokens have
                continue
            one, fits = grammar.copy(), True
            for token in ids:
                began = time.perf_counter()
                masks = Masks([Guided(one, 0, ())], 1)
                masks.wait()
                outcome.mask_us.append((time.perf_counter() - began) * 1e6)
                outcome.tokens += 1
                if not masks.bits[0, token // 32] >> np.uint32(token % 32) & 1:
                    fits = False
                    break
                one.push(token)
            fits = fits and one.complete
            if fits and not valid:
                outcome.accepted.append(name)
            outcome.rejected += valid and not fits and _fits_held(schema, data)
    return outcome


def _fits_held(schema: Any, data: Any) -> bool:
    """Returns True if an instance meets the schema that answers are held to, whose objects are closed."""
    held = hold_schema(schema, "schema", lenient=False).schema
    try:
        return bool(jsonschema.Draft202012Validator(held).is_valid(data))
    except re.error:  # a pattern in a dialect that Python doesn't have
        return True


def maskbench(folder: Path, count: int) -> Iterator[tuple[str, Any, Sequence[tuple[Any, bool]]]]:
    """Yields ``count`` of MaskBench's schemas, evenly spread, or all for 0, with their instances."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} has no schemas; take maskbench/data of guidance-ai/jsonschemabench")
    for file in files[:: max(len(files) // count, 1)][:count] if count else files:
        document = json.loads(file.read_text(encoding="utf-8"))
        yield file.stem, document["schema"], [(one["data"], one["valid"]) for one in document.get("tests", [])]


def schemas(options: argparse.Namespace) -> dict[str, Any]:
    """MaskBench."""
    bundle = Bundle.open(options.bundle)
    tokenizer = Tokenizer(bundle.tokenizer_files())
    grammars = Grammars(tokenizer.to_json(), bundle.model.vocab_size, bundle.model.eos_token_ids)
    grammars.grammar(StructuredOutputsParams(regex="a"))  # starts what is started once
    try:
        return try_schemas(maskbench(options.maskbench, options.schemas), tokenizer, grammars).to_json()
    finally:
        grammars.close()


def batch(options: argparse.Namespace) -> dict[str, Any]:
    """Guided requests and plain ones, which write as many tokens."""
    prompts = [_chat(f"Describe {NAMES[i % len(NAMES)]}, who lives in town {i}, as JSON.") for i in range(16)]
    form = StructuredOutputsParams(json=SCHEMA)
    rows = []
    with ew.LLM(options.bundle, max_requests=16, prefix_cache=False) as llm:
        for number in range(options.rounds + 1):
            guided = [
                ew.SamplingParams(max_tokens=160, temperature=0.7, seed=i + 100 * number, structured_outputs=form)
                for i in range(16)
            ]
            first, seconds = _timed(llm, prompts, guided)
            lengths = [len(one.token_ids) for one in first]
            plain = [
                ew.SamplingParams(max_tokens=n, temperature=0.7, seed=i + 100 * number, ignore_eos=True)
                for i, n in enumerate(lengths)
            ]
            _, plain_seconds = _timed(llm, prompts, plain)
            if number % 2:  # who comes first gains nothing by it
                _, seconds = _timed(llm, prompts, guided)
            finished = sum(one.finish_reason == "stop" for one in first)
            row = {"tokens": sum(lengths), "guided": seconds, "plain": plain_seconds, "finished": finished}
            rows += [row] * (number > 0)
    return {
        "rounds": rows,
        "guided_tokens_per_second": median(row["tokens"] / row["guided"] for row in rows),
        "of_plain": median(row["plain"] / row["guided"] for row in rows),
    }


def _timed(
    llm: ew.LLM, prompts: Sequence[str], params: Sequence[ew.SamplingParams]
) -> tuple[list[ew.RequestOutput], float]:
    began = time.perf_counter()
    results = llm.generate(prompts, params, progress=False)
    return results, time.perf_counter() - began


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def drafts(options: argparse.Namespace) -> dict[str, Any]:
    """One request at a time, with what is computed ahead and without."""
    cases = random.Random(7).sample(list(maskbench(options.maskbench, 0)), 400)
    return {
        "mix": _with_drafts(options, cases, compact=False),
        "compact": _with_drafts(options, cases, compact=True),
    }


def _with_drafts(options: argparse.Namespace, cases: Sequence[Any], *, compact: bool) -> dict[str, Any]:
    seconds, tokens, ratios = {True: 0.0, False: 0.0}, 0, []
    with ew.LLM(options.bundle, prefix_cache=False) as llm:
        done = 0
        for name, schema, _ in cases:
            if done == options.requests:
                break
            text = json.dumps(schema)
            if len(text) > 2000:
                continue
            form = StructuredOutputsParams(json=text, disable_any_whitespace=compact)
            prompt = _chat(f"Write JSON of this schema: {text}")
            params = [
                ew.SamplingParams(max_tokens=120, temperature=0.5, seed=3, structured_outputs=form, speculate=ahead)
                for ahead in (True, False)
            ]
            try:
                llm.generate(prompt, ew.SamplingParams(max_tokens=1, structured_outputs=form), progress=False)
            except ew.RequestError:
                continue
            took = {}
            for one in params if done % 2 else reversed(params):
                # A tenant of its own, as answers are looked up in a tenant's past ones.
                (output,) = llm.generate([prompt], one, tenant=f"{name} {one.speculate}", progress=False)
                metrics = output.metrics
                assert metrics.first_token is not None and metrics.last_token is not None
                took[one.speculate] = metrics.last_token - metrics.first_token, output.token_ids
            if took[True][1] != took[False][1]:
                raise SystemExit(f"{name}: drafts changed the tokens")
            if len(took[True][1]) < 10:
                continue
            done += 1
            tokens += len(took[True][1])
            for ahead, (spent, _) in took.items():
                seconds[ahead] += spent
            ratios.append(took[False][0] / took[True][0])
        described = llm.info()["speculation"]
    return {
        "requests": done,
        "tokens": tokens,
        "with_drafts": tokens / seconds[True],
        "without": tokens / seconds[False],
        "gain": seconds[False] / seconds[True],
        "median_gain": median(ratios),
        "sources": described["sources"],
    }


def slow(options: argparse.Namespace) -> dict[str, Any]:
    """The longest time between two tokens of plain requests, while a form compiles and while none does."""
    times: dict[str, Any] = {}
    slowest = json.dumps(json.loads((options.maskbench / SLOWEST).read_text(encoding="utf-8"))["schema"])
    with ew.LLM(options.bundle, max_requests=4) as llm:
        llm.generate("a", ew.SamplingParams(max_tokens=2, structured_outputs={"regex": "a"}), progress=False)

        def longest(also: bool) -> dict[str, float]:
            took: list[float] = []

            def compile_slowly() -> None:
                began = time.perf_counter()
                llm.generate("a", ew.SamplingParams(max_tokens=1, structured_outputs={"json": slowest}), progress=False)
                took.append(time.perf_counter() - began)

            other = threading.Thread(target=compile_slowly)
            gaps = []
            last = time.perf_counter()
            for i, _ in enumerate(
                llm.stream(_chat("Count to 1000."), ew.SamplingParams(max_tokens=900, ignore_eos=True, speculate=False))
            ):
                now = time.perf_counter()
                gaps += [now - last] * (i > 8)
                last = now
                if also and i == 8:
                    other.start()
            if also:
                other.join()
            p50, p99 = np.percentile(gaps, [50, 99])
            row = {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "worst_ms": max(gaps) * 1e3}
            return row | ({"compiling_seconds": took[0]} if took else {})

        times["without"] = longest(False)
        times["while_one_compiles"] = longest(True)
    return times


PART = {"schemas": schemas, "batch": batch, "drafts": drafts, "slow": slow}


def main(arguments: list[str] | None = None) -> int:
    """Measures the parts, and prints and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--maskbench", type=Path, default=Path("build/bench/maskbench"), help="its folder maskbench/data"
    )
    parser.add_argument("--schemas", type=int, default=300, help="of MaskBench; 0 is all")
    parser.add_argument("--requests", type=int, default=40, help="of the part drafts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "measured": {
            "date": date.today().isoformat(),
            "commit": commit(),
            "model": Bundle.open(options.bundle).model.name,
            "load_before": os.getloadavg(),
        },
        "machine": machine(),
    }
    for part in options.parts:
        result[part] = PART[part](options)
        print(part, json.dumps(result[part], indent=1))
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
