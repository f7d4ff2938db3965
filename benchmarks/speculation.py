"""The gain of computing likely tokens ahead: decoding speed with ``LLM(speculate=...)`` over plain decoding.

    python benchmarks/speculation.py BUNDLE [--draft BUNDLE] [--rounds 5] [--tokens 128] [--only TASK ...] [--json FILE]
    python benchmarks/speculation.py BUNDLE --row-costs [--json FILE]
    python benchmarks/speculation.py BUNDLE --replay FILE [--json FILE]
    python benchmarks/speculation.py BUNDLE --same-tokens DRAFT [--json FILE]
    python benchmarks/speculation.py BUNDLE --peers int8 [--draft BUNDLE] [--rounds 3] [--json FILE] [--page FILE]

Tasks: "copy" has the model repeat a text, "edit" repeat it with a word changed, "code" continue code that repeats
itself, "chat" write freely; "random" is random tokens, which nothing follows but by chance. One request each, then 24
of "chat", eight at a time, each with a seed of its own. "wrong" is "chat" with a guess before each step that is never
right, and looks like one behind eight tokens that are the same. Each round is of another tenant, so that answers of
earlier rounds aren't known; "chat again" is asked a second time by the same one. A round has both in turn, eight steps
of the one and eight of the other, as a machine's speed changes within a second. Speeds are new tokens over the time
that their requests waited for them: of eight at a time the last one to end would hide what the others gain. The ratio
is of one round's speeds; the median counts. Tokens and log-probabilities are compared: they must be the same.

With ``--row-costs``: what steps of 1 to 16 rows of one request take, by its context, alone and beside seven other
requests. With ``--replay`` nothing of a speed is measured: the tasks run with drafts as long as would pay for another
model, whose row costs are in FILE, and what its steps would then take is added up.

With ``--same-tokens``: how often BUNDLE and another one, DRAFT, draw the same token behind the same text from the same
random numbers: by the inverse of the distribution in the order of token ids, as the sampler does, and by the largest
logit plus noise (Gumbel-max). "At most" is the mean of sum(min(p, q)), which no way to draw exceeds.

With ``--draft`` a second bundle guesses too: ``LLM(speculate=BUNDLE)``.

With ``--peers``: llama.cpp and OpenVINO GenAI with their prompt lookup and without, in turn with ours, each in a
process of its own; one request, greedy, the same tokens as prompts, the same model in a format of as many bits (BUNDLE
must be of a model that examples/fetch_model.py fetches). With ``--draft`` they have draft models too, in the format of
that bundle's recipe. Whose tokens its speculation changed is counted, and who crashed is named with what it said.
``--page`` has the table replaced between marks such as ``<!-- table: benchmarks/speculation.py smollm2 int8 -->``, or
``... smollm2 bf16 draft int8 -->``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from peers.beside import beside
from peers.engines import FORMATS
from peers.loading import REPOSITORY
from peers.machine import commit, machine
from peers.marked_table import line

from enginewright import LLM, SamplingParams
from enginewright.optimizer.bench.speculation import TASKS
from enginewright.plugins.cpu.compile.row_seconds import CONTEXTS, row_seconds
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Pending
from enginewright.runtime.requests.lookup import OWN_KINDS, NgramLookup
from enginewright.runtime.requests.proposers import Proposal
from enginewright.runtime.requests.request import Generation, Request
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.scheduler.drafts import Drafts
from enginewright.runtime.scheduler.step_times import DecodeTimes
from enginewright.runtime.shared.contracts import DRAFT_ROWS, StepInput

TOGETHER = 8
FloatArray = npt.NDArray[np.float64]
AGAIN, WRONG = "chat again", "wrong"
TURN = 8
"""Steps of one LLM before it is the other's turn."""
SECONDS = 12.0
"""The time that is for row costs, for each company."""
EVALUATION_TEXT = REPOSITORY / "optimizer" / "measure" / "evaluation_text.txt"
SCORED, DRAWS = 768, 4
"""Tokens of text, and random numbers at each."""
SHOWN = 1, 2, 3, 4, 6, 8, 12, 16
"""Rows in a table."""
RANDOM = 256
"""Tokens of the random text."""


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--draft", type=Path, help="a bundle that guesses")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--only", nargs="+", help="tasks by name, instead of all")
    parser.add_argument("--row-costs", action="store_true", help="what steps of more rows take")
    parser.add_argument("--replay", type=Path, help="of a file of --row-costs, every bundle's")
    parser.add_argument("--same-tokens", type=Path, help="another bundle with the same tokenizer")
    parser.add_argument("--peers", choices=FORMATS, help="other engines beside ours, with weights of this format")
    parser.add_argument("--page", type=Path, help="with --peers: the page whose table is to be replaced")
    options = parser.parse_args(arguments)
    figures: dict[str, Any]
    if options.row_costs:
        figures = {"row_costs": row_costs(options)}
    elif options.replay:
        figures = {"computed": replayed(options)}
    elif options.same_tokens:
        figures = {"same_tokens": same_tokens(options)}
    else:
        figures = beside(options, prompts(options)) if options.peers else {"tasks": alone(options)}
    if options.json:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        about = {"rounds": options.rounds, "tokens": options.tokens, "machine": machine(), "commit": commit()}
        draft = f", draft {options.draft.name}" if options.draft else ""
        results[f"{options.bundle.name}{draft}"] = about | figures
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def row_costs(options: argparse.Namespace) -> dict[str, dict[int, tuple[float, ...]]]:
    """Gives by company, then by context, seconds of steps of 1, 2, ... rows. Prints milliseconds as Markdown."""
    bundle, costs = Bundle.open(options.bundle), {}
    contexts = tuple(context for context in CONTEXTS if context < bundle.model.context_length)
    for name, others in (("alone", 0), (f"beside {TOGETHER - 1}", TOGETHER - 1)):
        costs[name] = row_seconds(bundle, contexts, SECONDS, others=others, threads=options.threads)
        for context, seconds in costs[name].items():
            first, *more = (f"{1e3 * seconds[rows - 1]:.1f}" for rows in SHOWN)
            print(line((options.bundle.stem, name, f"{context:,}", first, *more)), flush=True)
    return costs


class Replayed(DecodeTimes):
    """Costs that stay as they were measured."""

    def took(self, rows: int, seconds: float) -> None:
        pass


def replayed(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Says by each other bundle's row costs how many times as fast each task of one request would be."""
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    ratios: dict[str, dict[str, float]] = {}
    for name, of in json.loads(options.replay.read_text()).items():
        measured = {int(context): seconds for context, seconds in of["row_costs"]["alone"].items()}
        ratios[name] = {}
        for task, temperature in itertools.product(TASKS, (0.0, 0.8)):
            with LLM(options.bundle, speculate="lookup", memory="512MiB", threads=options.threads) as llm:
                drafts = llm.engine.scheduler.drafts
                assert isinstance(drafts, Drafts)
                drafts.times = costs = Replayed(measured)
                submit, step_seconds = llm.engine.executor.submit, []

                def counted(step: StepInput) -> Pending:
                    step_seconds.append(costs.seconds(len(step.ids)) if len(step.ids) <= DRAFT_ROWS else 0.0)  # noqa: B023
                    return submit(step)  # noqa: B023

                llm.engine.executor.submit = counted  # type: ignore[method-assign]
                (answer,) = llm.generate([TASKS[task]], replace(params, temperature=temperature, seed=1))
                plain = (len(answer.token_ids) - 1) * costs.seconds(1)
            ratios[name][f"{task}, temperature {temperature}"] = plain / sum(step_seconds)
        print(name, ", ".join(f"{task}: {ratio:.2f}" for task, ratio in ratios[name].items()), flush=True)
    return ratios


def same_tokens(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By top_p: the share of tokens that are the same, at temperature 0.8."""
    logits = []
    for path in (options.bundle, options.same_tokens):
        with LLM(path, threads=options.threads, memory="256MiB") as llm:
            text = EVALUATION_TEXT.read_text(encoding="utf-8")
            logits.append(llm.logits(llm.tokenizer.encode(text)[:SCORED]).astype(np.float64) / 0.8)
    by_top_p: dict[str, dict[str, float]] = {}
    for top_p in (1.0, 0.95):
        random = np.random.default_rng(0)
        inverse = gumbel = 0
        most = []
        for pair in zip(*logits, strict=True):
            p, q = (probabilities(one, top_p) for one in pair)
            most.append(float(np.minimum(p, q).sum()))
            with np.errstate(divide="ignore"):
                weights = np.log(p), np.log(q)
            for _ in range(DRAWS):
                uniform, noise = random.random(), -np.log(random.standard_exponential(len(p)))
                one, other = (int(np.searchsorted(np.cumsum(of), uniform * of.sum(), "right")) for of in (p, q))
                inverse += one == other
                gumbel += int((weights[0] + noise).argmax()) == int((weights[1] + noise).argmax())
        count = len(most) * DRAWS
        rates = {"at_most": float(np.mean(most)), "inverse": inverse / count, "gumbel": gumbel / count}
        by_top_p[f"top_p {top_p}"] = rates
        print(f"{options.same_tokens.name}, top_p {top_p}:", {name: round(rate, 3) for name, rate in rates.items()})
    return by_top_p


def probabilities(logits: FloatArray, top_p: float) -> FloatArray:
    """Softmax [V], of the most probable tokens that make ``top_p`` together."""
    shares: FloatArray = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= top_p]] = 0
    shares /= shares.sum()
    return shares


def alone(options: argparse.Namespace) -> dict[str, Any]:
    """Ours, greedy and sampled: the figures of each task."""
    common: dict[str, Any] = {"threads": options.threads, "prefix_cache": False, "memory": "1GiB"}
    common["max_requests"] = TOGETHER
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, logprobs=0)
    figures_of: dict[str, Any] = {}
    way = options.draft or "lookup"
    with LLM(options.bundle, speculate=None, **common) as plain, LLM(options.bundle, speculate=way, **common) as ahead:
        encode = plain.tokenizer.encode
        prompts = {name: [encode(text)] for name, text in TASKS.items()} | {"random": [random_tokens(plain)]}
        prompts[AGAIN] = prompts[WRONG] = prompts["chat"]
        stories = [f"{TASKS['chat']}{i}. " for i in range(3 * TOGETHER)]
        prompts[f"chat, {TOGETHER} at a time"] = [encode(text) for text in stories]
        prompts[f"{WRONG}, {TOGETHER} at a time"] = prompts[f"chat, {TOGETHER} at a time"]
        for name, several in prompts.items():
            if options.only and name not in options.only:
                continue
            for temperature in (0.0, 0.8):
                one = [replace(params, temperature=temperature, seed=1 + i) for i in range(len(several))]
                rounds = [measured(plain, ahead, several, one, name, i) for i in range(options.rounds)]
                figures = {key: median(r[key] for r in rounds) for key in rounds[0]}
                figures_of[f"{name}, temperature {temperature}"] = figures
                share = f"{figures['accepted']:.0f} of {figures['drafted']:.0f} accepted"
                speed = f"{figures['ratio']:>5.2f} times, {figures['tokens_per_second']:,.0f} tokens/s"
                print(f"{name:<19} {temperature}: {speed}; {share}", flush=True)
    return figures_of


def prompts(options: argparse.Namespace) -> dict[str, list[int]]:
    """The tasks that are compared with peers, in the bundle's tokens."""
    with LLM(options.bundle, memory="64MiB", threads=1) as llm:
        return {name: llm.tokenizer.encode(text) for name, text in TASKS.items()} | {"random": random_tokens(llm)}


def random_tokens(llm: LLM) -> list[int]:
    """Random tokens."""
    ids: list[int] = np.random.default_rng(0).integers(10, llm.model.vocab_size, RANDOM).tolist()
    return ids


def measured(
    plain: LLM, ahead: LLM, prompts: list[list[int]], params: list[SamplingParams], task: str, number: int
) -> dict[str, float]:
    """A round by its number: the ratio, and of the speculating one tokens a second, drafted and accepted."""
    tenant = f"{task} {params[0].temperature} {number}"
    if task == AGAIN:
        ahead.generate(prompts, params, tenant=tenant)
    order = (plain, ahead) if number % 2 else (ahead, plain)
    requests = {llm: [request(llm, *one, tenant) for one in zip(prompts, params, strict=True)] for llm in order}
    seconds, tokens = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    with always_wrong(plain.model.vocab_size) if task.startswith(WRONG) else nullcontext():
        while any(llm.engine.has_work() for llm in order):
            for llm in order:
                for _ in range(TURN):
                    if not llm.engine.has_work():
                        break
                    decoding = [one for one in llm.engine.scheduler.running if one.output_length]
                    before = sum(one.output_length for one in decoding)
                    began = time.perf_counter()
                    llm.engine.step()
                    seconds[llm] += (time.perf_counter() - began) * len(decoding)
                    tokens[llm] += sum(one.output_length for one in decoding) - before
    answers = {llm: [(one.tokens, one.token_logprobs) for one in of] for llm, of in requests.items()}
    assert answers[plain] == answers[ahead], "speculation changed a token or a log-probability"
    speeds = {llm: tokens[llm] / seconds[llm] for llm in order}
    figures = {"ratio": speeds[ahead] / speeds[plain], "tokens_per_second": speeds[ahead]}
    figures["drafted"] = float(sum(one.drafted for one in requests[ahead]))
    return figures | {"accepted": float(sum(one.accepted for one in requests[ahead]))}


def request(llm: LLM, prompt: list[int], params: SamplingParams, tenant: str) -> Request:
    """Queues a request."""
    one = Generation(prompt, params, max_tokens=params.max_tokens or 1, options=RequestOptions(tenant))
    llm.engine.add_request(one)
    return one


@contextmanager
def always_wrong(vocabulary: int) -> Iterator[None]:
    """Guesses are of tokens that a model hardly ever gives; they are found as fast as others."""
    original = NgramLookup.next

    def wrong(lookup: NgramLookup, most: int) -> Proposal:
        original(lookup, most)
        return Proposal([vocabulary - 1] * most, OWN_KINDS[8])

    NgramLookup.next = wrong  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        NgramLookup.next = original  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
