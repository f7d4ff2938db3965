"""An adaptive context beside a whole one: quality, a fact found by its depth, speed by length, little memory.

    python benchmarks/adaptive_context.py MODEL.gguf [--parts speed] [--recipe int8] [--best 512,1024] [--json FILE]

Bundles are exported with the same weights, one for each number of chosen keys, and one that looks at everything.

- Quality, at lengths that the model was trained for: the perplexity of the tokens behind the first `--behind` of
  windows as long as its context, of a text that nothing was calibrated on (the reference that every Python brings).
- A needle: a sentence with a number, hidden in such a text at some depth. What counts is the log-probability of the
  number's tokens when it is asked for, and how often each of them is the most likely one.
- The choice (--parts choice): of the source as transformers runs it, the share of attention that is on the chosen
  blocks, and on the needle's when it is asked for, by ways to say how good a block is.
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
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from peers.loading import BUILD
from peers.machine import commit, machine
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from enginewright import LLM, SamplingParams, export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.passes.ops.attention import block_estimates

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
STEPS = 32


def main() -> int:
    """Exports, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--parts", default="quality,needle,speed", help="the others stay in --json as they are")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--best", default="512,1024", help="keys that are chosen, of each bundle")
    parser.add_argument("--whole-layers", type=int, default=2, help="the first ones, which look at everything")
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
    result: dict[str, Any] = {"date": date.today().isoformat(), "commit": commit(), "machine": machine()}
    result |= {"model": options.model.name, "recipe": options.recipe, "whole_layers": options.whole_layers}
    result |= {"command": " ".join(["adaptive_context.py", *sys.argv[1:]])}

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    parts = options.parts.split(",")
    if options.json and options.json.exists():
        earlier = json.loads(options.json.read_text())
        result |= {
            part: earlier[part] for part in ("quality", "needle", "choice", "speed", "offload") if part in earlier
        }
    if {"quality", "needle"} & set(parts):
        bundles = {best: bundle(options.model, options, best) for best in bests}
    if "quality" in parts:
        result["quality"] = [quality(bundles[best], best, text, options) for best in bests]
        save()
    if "needle" in parts:
        result["needle"] = [row for best in bests for row in needles(bundles[best], best, text, options)]
        save()
    if "choice" in parts:
        result["choice"] = choices(text, options)
        save()
    if "speed" in parts:
        long = {best: bundle(longer(options), options, best) for best in bests}
        result["speed"] = speeds(long, options)
        save()
    if "offload" in parts:
        long = {best: bundle(longer(options), options, best) for best in bests if best is not None}
        result["offload"] = [row for best, path in long.items() for row in offloads(best, path, options)]
        save()
    return 0


def recipe(options: argparse.Namespace, best: int | None) -> Recipe:
    """The recipe with that many keys chosen, or with all."""
    chosen = None if best is None else ContextOptions(best=best, whole_layers=options.whole_layers)
    wide = {"adaptive_context": chosen, "budget": BudgetSection(max_kl=20.0)}
    return load_recipe(options.recipe).model_copy(update=wide)


def bundle(source: Any, options: argparse.Namespace, best: int | None) -> Path:
    """The bundle of that source, made unless it is there."""
    kind = "own" if isinstance(source, Path) else "long"
    path: Path = options.folder / f"{kind}-{best or 'all'}-{options.whole_layers}.bundle"
    if not path.exists():
        export(source, path, recipe=recipe(options, best), targets=["cpu"])
    return path


def longer(options: argparse.Namespace) -> Any:
    """A random model of the same shape, for contexts of any length."""
    config = AutoConfig.from_pretrained(options.model.parent, gguf_file=options.model.name)
    config.max_position_embeddings = max(map(int, options.lengths.split(","))) + 1024
    return AutoModelForCausalLM.from_config(config).eval()


def name(best: int | None) -> str:
    """The name of a bundle in printed lines."""
    return "all keys" if best is None else f"best {best}"


def quality(path: Path, best: int | None, text: str, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity of what comes behind the first tokens of some windows."""
    with LLM(path) as llm:
        length = llm.model.context_length - 1
        tokens = llm.tokenizer.encode(text)
        windows = [tokens[i * length : (i + 1) * length] for i in range(min(options.windows, len(tokens) // length))]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        losses = [
            -one.logprob for w in windows for one in llm.generate([w], params)[0].prompt_logprobs[options.behind :]
        ]
    row = {"best": best, "tokens": len(losses), "perplexity": math.exp(mean(losses))}
    print(f"{name(best):<10} perplexity behind {options.behind} tokens: {row['perplexity']:.3f}", flush=True)
    return row


def hidden(
    encode: Callable[[str], list[int]], hay: list[int], length: int, depth: float, i: int
) -> tuple[list[int], str, range]:
    """A prompt of so many tokens that asks for a number, the number, and the places of the sentence that has it."""
    rng = random.Random(f"{length} {depth} {i}")
    number = str(rng.randrange(10**5, 10**6))
    start = rng.randrange(len(hay) - length)
    at = start + int(length * depth)
    fact = encode(f"\nThe secret number of the lighthouse is {number}.\n")
    question = encode("\nThe secret number of the lighthouse is")
    prompt = hay[start:at] + fact + hay[at : start + length - len(fact)] + question
    return prompt, number, range(at - start, at - start + len(fact))


def needles(path: Path, best: int | None, text: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the log-probability of a hidden number, by depth and length of the context."""
    rows = []
    with LLM(path) as llm:
        encode = llm.tokenizer.encode
        hay = encode(text)
        most = llm.model.context_length - 128
        for length in (most // 2, most):
            for depth in DEPTHS:
                known, sure = [], []
                for i in range(options.needles):
                    prompt, number, _ = hidden(encode, hay, length, depth, i)
                    form = {"choice": [f" {number}"]}
                    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, structured_outputs=form)
                    logprobs = llm.generate([prompt], params)[0].logprobs[:-1]  # without the end, which nobody hid
                    known.append(sum(one.logprob for one in logprobs))
                    sure.append(mean(one.top[0][0] == one.token_id for one in logprobs))
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


Estimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Says how good each block of keys [M, 32, D] of one head is for each query [N, D]: [N, M]."""


def of_range(center: float, spread: float) -> Estimate:
    """Makes an estimate of a channel's middle (``center`` of it, the rest the mean) and so much of its range."""

    def estimate(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        least, greatest = keys.amin(1), keys.amax(1)
        middle = center * (least + greatest) / 2 + (1 - center) * keys.mean(1)
        return q @ middle.t() + q.abs() @ (spread * (greatest - least)).t()

    return estimate


WAYS: dict[str, Estimate] = {
    "the bound that Quest has": of_range(1, 0.5),
    "the middle, a quarter of the range": of_range(1, 0.25),
    "the mean": of_range(0, 0),
    "the mean, a quarter of the range": of_range(0, 0.25),
    "ours": lambda q, keys: block_estimates(q[None], keys[None, :, :, None])[0, 0],
    "the largest score itself": lambda q, keys: torch.einsum("nd,mkd->nmk", q, keys).amax(-1),
}


def choices(text: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the attention on the blocks that each method chooses, in layers without a window after the first two."""
    files = {"pretrained_model_name_or_path": options.model.parent, "gguf_file": options.model.name}
    tokenizer, seen = AutoTokenizer.from_pretrained(**files), dict[int, tuple[torch.Tensor, torch.Tensor, float]]()
    places = torch.empty(0)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        window = getattr(module, "sliding_window", None)
        if not window and module.layer_idx >= ContextOptions(best=32).whole_layers:
            seen[module.layer_idx] = query[0][:, places].clone(), key[0].clone(), scaling
        at = torch.arange(query.shape[2])
        near = (at <= at[:, None]) & (at > at[:, None] - window) if window else None
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=near, is_causal=near is None, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register("seen", attend)
    model = AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32, attn_implementation="seen").eval()

    def encode(some: str) -> list[int]:
        ids: list[int] = tokenizer(some, add_special_tokens=False)["input_ids"]
        return ids

    length = min(model.config.max_position_embeddings, 8192) - 128
    shares: dict[tuple[str, int], list[list[float]]] = {}
    for depth in DEPTHS:
        prompt, number, fact = hidden(encode, encode(text), length, depth, 0)
        number_ids = encode(f" {number}")
        whole = [*prompt, *number_ids]
        prose = random.Random(depth).sample(range(len(whole) // 2, len(prompt) - 32), 40)
        places = torch.tensor([*prose, *range(len(prompt) - 1, len(whole) - 1)])
        with torch.no_grad():
            model(input_ids=torch.tensor([whole]), use_cache=False, logits_to_keep=1)
        for (q, k, scaling), best, way in product(seen.values(), map(int, options.best.split(",")), WAYS):
            shares_here = on_chosen(q * scaling, k, places, best // 32, WAYS[way], fact, len(number_ids))
            shares.setdefault((way, best), []).append([shares_here[0][:, : len(prose)].mean().item(), *shares_here[1]])
    rows = []
    for (way, best), values in shares.items():
        covered, of_fact = sum(v[1] for v in values), sum(v[2] for v in values)
        rows.append({"way": way, "best": best, "attention": mean(v[0] for v in values), "needle": covered / of_fact})
        print(f"best {best}, {way}: {rows[-1]['attention']:.1%} of attention, {rows[-1]['needle']:.1%} of the needle's")
    return rows


def on_chosen(
    q: torch.Tensor, k: torch.Tensor, places: torch.Tensor, best: int, estimate: Estimate, fact: range, asked: int
) -> tuple[torch.Tensor, tuple[float, float]]:
    """q [Nq, R, D] of tokens at ``places`` [R], k [Nkv, T, D] -> what is on the blocks that each sees [Nq, R].

    And of the attention that the last ``asked`` of them have on the blocks of ``fact``: what is seen, and all.
    """
    blocks, block_of, group = k.shape[1] // 32, places // 32, len(q) // len(k)
    limits = ContextOptions(best=32)
    block = torch.arange(blocks)
    other = (block >= limits.first // 32) & (block < (block_of - limits.last // 32)[:, None])  # [R, M]
    on, covered, of_fact = [], 0.0, 0.0
    for head, keys in enumerate(k):
        mine = q[head * group : (head + 1) * group]  # [g, R, D]
        scores = (mine @ keys.t()).masked_fill(torch.arange(len(keys)) > places[:, None], -torch.inf)
        weights = scores.softmax(-1)
        by_block = weights[..., : blocks * 32].unflatten(-1, (-1, 32)).sum(-1)  # [g, R, M]
        good = estimate(mine.flatten(0, 1), keys[: blocks * 32].unflatten(0, (-1, 32))).view(by_block.shape)
        good = good.masked_fill(~other, -torch.inf)
        ranks = (good - good.amax(-1, keepdim=True)).amax(0)  # [R, M]
        chosen = torch.zeros_like(other).scatter_(-1, ranks.topk(best, -1).indices, True) | ~other
        on.append(1 - (by_block * ~chosen).sum(-1))
        about = slice(fact.start // 32, fact.stop // 32 + 1)
        covered += float((by_block * chosen)[:, -asked:, about].sum())
        of_fact += float(by_block[:, -asked:, about].sum())
    return torch.cat(on), (covered, of_fact)


def speeds(paths: dict[int | None, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode steps behind each length, and the prompt before them; a ratio is the median of the rounds' ratios."""
    rows = []
    for length in map(int, options.lengths.split(",")):
        seconds: dict[int | None, list[tuple[float, float]]] = {best: [] for best in paths}
        for _ in range(options.rounds):
            for best, path in paths.items():
                seconds[best].append(timed(path, length))
        for best, times in seconds.items():
            ratios = [whole[1] / one[1] for whole, one in zip(seconds[None], times, strict=True)]
            firsts = [whole[0] / one[0] for whole, one in zip(seconds[None], times, strict=True)]
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
        runs: dict[int, list[dict[str, Any]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share in SHARES:
                runs[share].append(little_memory(path, length, share, options.folder))
        assert len({tuple(one["tokens"]) for times in runs.values() for one in times}) == 1
        for share, times in runs.items():
            ratios = [ours["step"] / whole["step"] for whole, ours in zip(runs[1], times, strict=True)]
            firsts = [ours["prompt"] / whole["prompt"] for whole, ours in zip(runs[1], times, strict=True)]
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
    folders = {"offload_folder": folder / "waiting"} if share > 1 else {}
    with LLM(path, context=context, max_requests=1, memory=whole // share, speculate=None, **folders) as llm:
        prompt = [random.Random(length + i).randrange(llm.model.vocab_size) for i in range(length)]
        params = SamplingParams(max_tokens=1 + STEPS, ignore_eos=True, temperature=0)
        began = time.perf_counter()
        pieces = llm.stream(prompt, params)
        tokens = list(next(pieces).token_ids)
        first, before, known = time.perf_counter(), llm.info(), len(tokens)
        for piece in pieces:
            tokens += piece.token_ids
        ended, after = time.perf_counter(), llm.info()
        per_token = {"read": 0.0, "in_memory": 0.0}
        if share > 1:
            per_token = {
                w: (after["kv_offload"][w] - before["kv_offload"][w]) / (len(tokens) - known) for w in per_token
            }
        return {
            "read": per_token["read"],
            "needed": sum(per_token.values()),
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
