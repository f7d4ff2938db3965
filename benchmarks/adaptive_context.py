"""An adaptive context beside a whole one: quality, a fact found by its depth, speed by length, little memory.

    python benchmarks/adaptive_context.py MODEL.gguf [--parts speed] [--recipe int8] [--best 512,1024] [--json FILE]

Bundles are exported with the same weights, one for each number of chosen keys, and one that looks at everything.

- Quality, at lengths that the model was trained for: the perplexity of the tokens behind the first `--behind` of
  windows as long as its context, of a text that nothing was calibrated on (the reference that every Python brings).
- A needle: a sentence with a number, hidden in such a text at some depth. What counts is the log-probability of the
  number's tokens when it is asked for, and how often each of them is the most likely one.
- A context of which the memory holds a half or a third, where the rest waits in a file (--parts offload):
  decode steps, and how many blocks of a layer each reads. Tokens are the same, and are compared.
- Speed: decode steps of one request by the length behind it, in rounds in turn; and of its prompt. Beyond the model's
  own length it is that of a random model of the same shape, whose positions go further.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import random
import sys
import time
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

from peers.loading import BUILD
from peers.machine import commit, machine
from transformers import AutoConfig, AutoModelForCausalLM

from enginewright import LLM, SamplingParams, export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.framework.kv_options import ContextOptions

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
STEPS = 32


def main() -> int:
    """Exports, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--parts", default="quality,needle,speed", help="the others stay in --json as they are")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--best", default="512,1024", help="keys that are chosen, of each bundle")
    parser.add_argument("--text", type=Path, help="what quality is measured on")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--behind", type=int, default=4096)
    parser.add_argument("--needles", type=int, default=6, help="of each depth")
    parser.add_argument("--lengths", default="4096,8192,16384,32768", help="of the speeds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=BUILD / "adaptive-context")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text() if options.text else "\n\n".join(pydoc_data.topics.topics.values())
    bests = [None, *map(int, options.best.split(","))]
    found: dict[str, Any] = {"date": date.today().isoformat(), "commit": commit(), "machine": machine()}
    found |= {"model": options.model.name, "recipe": options.recipe, "command": " ".join(sys.argv)}

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")

    parts = options.parts.split(",")
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
        found |= {part: kept[part] for part in ("quality", "needle", "speed", "offload") if part in kept}
    if {"quality", "needle"} & set(parts):
        own = {best: bundle(options.model, options, best) for best in bests}
    if "quality" in parts:
        found["quality"] = [quality(own[best], best, text, options) for best in bests]
        save()
    if "needle" in parts:
        found["needle"] = [row for best in bests for row in needles(own[best], best, text, options)]
        save()
    if "speed" in parts:
        long = {best: bundle(longer(options), options, best) for best in bests}
        found["speed"] = speeds(long, options)
        save()
    if "offload" in parts:
        long = {best: bundle(longer(options), options, best) for best in bests if best is not None}
        found["offload"] = [row for best, path in long.items() for row in offloads(best, path, options)]
        save()
    return 0


def recipe(options: argparse.Namespace, best: int | None) -> Recipe:
    """The recipe with that many keys chosen, or with all."""
    chosen = None if best is None else ContextOptions(best=best)
    wide = {"adaptive_context": chosen, "budget": BudgetSection(max_kl=20.0)}
    return load_recipe(options.recipe).model_copy(update=wide)


def bundle(source: Any, options: argparse.Namespace, best: int | None) -> Path:
    """The bundle of that source, made unless it is there."""
    kind = "own" if isinstance(source, Path) else "long"
    path: Path = options.folder / f"{kind}-{best or 'all'}.bundle"
    if not path.exists():
        export(source, path, recipe=recipe(options, best), targets=["cpu"])
    return path


def longer(options: argparse.Namespace) -> Any:
    """A random model of the same shape, for contexts of any length."""
    config = AutoConfig.from_pretrained(options.model.parent, gguf_file=options.model.name)
    config.max_position_embeddings = max(map(int, options.lengths.split(","))) + 1024
    return AutoModelForCausalLM.from_config(config).eval()


def name(best: int | None) -> str:
    """How a bundle is called in what is printed."""
    return "all keys" if best is None else f"best {best}"


def quality(path: Path, best: int | None, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity of what comes behind the first tokens of some windows."""
    with LLM(path) as llm:
        length = llm.model.context_length - 1
        tokens = llm.tokenizer.encode(text)
        windows = [tokens[i * length : (i + 1) * length] for i in range(min(options.windows, len(tokens) // length))]
        given = SamplingParams(max_tokens=1, prompt_logprobs=0)
        losses = [
            -one.logprob for w in windows for one in llm.generate([w], given)[0].prompt_logprobs[options.behind :]
        ]
    row = {"best": best, "tokens": len(losses), "perplexity": math.exp(mean(losses))}
    print(f"{name(best):<10} perplexity behind {options.behind} tokens: {row['perplexity']:.3f}", flush=True)
    return row


def needles(path: Path, best: int | None, text: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """How well a hidden number is known, by depth and length of the context."""
    rows = []
    with LLM(path) as llm:
        encode = llm.tokenizer.encode
        hay = encode(text)
        most = llm.model.context_length - 128
        for length in (most // 2, most):
            for depth in DEPTHS:
                known, sure = [], []
                for i in range(options.needles):
                    rng = random.Random(f"{length} {depth} {i}")
                    number = str(rng.randrange(10**5, 10**6))
                    start = rng.randrange(len(hay) - length)
                    at = start + int(length * depth)
                    fact = encode(f"\nThe secret number of the lighthouse is {number}.\n")
                    question = encode("\nThe secret number of the lighthouse is")
                    prompt = hay[start:at] + fact + hay[at : start + length - len(fact)] + question
                    form = {"choice": [f" {number}"]}
                    given = SamplingParams(max_tokens=16, temperature=0, logprobs=1, structured_outputs=form)
                    said = llm.generate([prompt], given)[0].logprobs[:-1]  # without the end, which nobody hid
                    known.append(sum(one.logprob for one in said))
                    sure.append(mean(one.top[0][0] == one.token_id for one in said))
                row = {
                    "best": best,
                    "length": length,
                    "depth": depth,
                    "logprob": mean(known),
                    "tokens_right": mean(sure),
                }
                rows.append(row)
                print(f"{name(best):<10} needle at {depth:.0%} of {length}: log-probability {row['logprob']:.2f}, "
                      f"{row['tokens_right']:.0%} of its tokens first", flush=True)  # fmt: skip
    return rows


def speeds(paths: dict[int | None, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps behind each length, and the prompt before them; a ratio is the median of the rounds' ratios."""
    rows = []
    for length in map(int, options.lengths.split(",")):
        taken: dict[int | None, list[tuple[float, float]]] = {best: [] for best in paths}
        for _ in range(options.rounds):
            for best, path in paths.items():
                taken[best].append(timed(path, length))
        for best, times in taken.items():
            ratios = [whole[1] / own[1] for whole, own in zip(taken[None], times, strict=True)]
            firsts = [whole[0] / own[0] for whole, own in zip(taken[None], times, strict=True)]
            row = {"best": best, "length": length, "prompts": [t[0] for t in times], "steps": [t[1] for t in times]}
            row |= {"prompt_ratio": median(firsts), "step_ratio": median(ratios)}
            rows.append(row)
            print(f"{name(best):<10} behind {length:>6}: {median(row['steps']) * 1e3:.2f} ms a token "
                  f"({row['step_ratio']:.2f} times as fast), its prompt {median(row['prompts']):.1f} s "
                  f"({row['prompt_ratio']:.2f})", flush=True)  # fmt: skip
    return rows


SHARES = (1, 2, 3)


def offloads(best: int, path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps with memory for a share of the context; a ratio is the median of the rounds' ratios."""
    rows = []
    for length in map(int, options.lengths.split(",")):
        taken: dict[int, list[dict[str, Any]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share in SHARES:
                taken[share].append(little_memory(path, length, share, options.folder))
        assert len({tuple(one["tokens"]) for times in taken.values() for one in times}) == 1
        for share, times in taken.items():
            ratios = [own["step"] / whole["step"] for whole, own in zip(taken[1], times, strict=True)]
            firsts = [own["prompt"] / whole["prompt"] for whole, own in zip(taken[1], times, strict=True)]
            row = {"best": best, "length": length, "share": share, "memory": times[0]["memory"]}
            row |= {"steps": [t["step"] for t in times], "prompts": [t["prompt"] for t in times]}
            row |= {"step_ratio": median(ratios), "prompt_ratio": median(firsts), "read": times[0]["read"]}
            row |= {"needed": times[0]["needed"]}
            rows.append(row)
            print(
                f"{name(best):<10} behind {length:>6}, memory of 1/{share}: {median(row['steps']) * 1e3:.2f} ms "
                f"({row['step_ratio']:.2f} times), {row['read']:.0f} of {row['needed']:.0f} blocks read in each; its "
                f"prompt {median(row['prompts']):.1f} s ({row['prompt_ratio']:.2f} times)",
                flush=True,
            )
    return rows


def little_memory(path: Path, length: int, share: int, folder: Path) -> dict[str, Any]:
    """Seconds of a prompt and of a decode step, and the blocks of a layer that a step needs and reads."""
    context = length + 2 * STEPS
    with LLM(path, context=context, max_requests=1) as llm:
        whole = llm.info()["kv_cache_bytes"]
    given = {"offload_folder": folder / "waiting"} if share > 1 else {}
    with LLM(path, context=context, max_requests=1, memory=whole // share, speculate=None, **given) as llm:
        prompt = [random.Random(length + i).randrange(llm.model.vocab_size) for i in range(length)]
        params = SamplingParams(max_tokens=1 + STEPS, ignore_eos=True, temperature=0)
        began = time.perf_counter()
        pieces = llm.stream(prompt, params)
        tokens = list(next(pieces).token_ids)
        first, before, known = time.perf_counter(), llm.info(), len(tokens)
        for piece in pieces:
            tokens += piece.token_ids
        ended, after = time.perf_counter(), llm.info()
        found = {"read": 0.0, "in_memory": 0.0}
        if share > 1:
            found = {w: (after["kv_offload"][w] - before["kv_offload"][w]) / (len(tokens) - known) for w in found}
        return {
            "read": found["read"],
            "needed": sum(found.values()),
            "prompt": first - began,
            "step": (ended - first) / (len(tokens) - known),
            "memory": after["kv_cache_bytes"],
            "tokens": tokens,
        }


def timed(path: Path, length: int) -> tuple[float, float]:
    """Seconds of a prompt, and of a decode step behind it: the prompt is found in the prefix cache then."""
    with LLM(path, memory=length * 40000 + (256 << 20), speculate=None) as llm:
        prompt = [random.Random(length + i).randrange(llm.model.vocab_size) for i in range(length)]

        def seconds(count: int) -> float:
            begin = time.perf_counter()
            llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True, temperature=0))
            return time.perf_counter() - begin

        first = seconds(1)
        steps = [seconds(1 + STEPS) - seconds(1) for _ in range(3)]
        return first, median(steps) / STEPS


if __name__ == "__main__":
    sys.exit(main())
