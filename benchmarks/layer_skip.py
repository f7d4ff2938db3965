"""Could a model guess its own tokens, with some of its layers left out? What that could gain, before anybody builds it.

    python benchmarks/layer_skip.py MODEL --bundles BUNDLE ... [--rows FILE] [--searched FILE] [--json FILE]

MODEL, a folder of Hugging Face, guesses for itself without some of its attentions and MLPs (Zhang et al. 2023, "Draft &
Verify"; Elhoushi et al. 2024, "LayerSkip"). They are left out one by one: each time the one without which most tokens
are the full model's, greedily, on a part of the evaluation text. Behind the first round only the best candidates of the
round before are tried again, and a few others. Attention sees the full model's keys and values of all tokens but the
last one, as a first guessed token does; further guesses see keys of guesses too, so what is found is a bit too good.
It is judged on another part of the text, and on the model's own answer to a question.

Then, for each bundle, what a step without these takes, from the times of the program's steps on this machine, what
steps of more rows take, measured or from a FILE of ``speculation.py --row-costs``, and the tokens a second over plain
decoding that follow for the best length of a draft: (1 + a + ... + a^k) / (k c + v), with the share a of equal tokens,
the cost c of a guess and v of k+1 rows, in plain steps. Beside it, by the same formula, drafts of other bundles.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from draft_beside_target import drawn
from peers.machine import commit, machine
from speculation import EVALUATION_TEXT
from transformers import AttentionInterface, AutoModelForCausalLM

from enginewright import LLM, SamplingParams
from enginewright.optimizer.bench.speculation import TASKS
from enginewright.optimizer.report.step_runner import StepRunner
from enginewright.optimizer.tune.row_seconds import row_seconds
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.step_costs import StepSizes

SEARCHED, JUDGED, ANSWERED = 320, 768, 128
"""Tokens of text for the search, others of it, and of the model's own answer."""
BEST, EVERY = 12, 8
"""Of the candidates of a round, how many are tried again in the next; of the others, every eighth is."""
DRAWS, TEMPERATURE = 4, 0.8
CONTEXTS = (64, 1024)
PROFILED = 15
"""Steps, of which the median counts."""

Sublayer = tuple[str, int]
"""attention or mlp, and the layer's number"""


class Cut:
    """A model's layers on one text, with any of the sublayers left out.

    Args:
        model: of transformers, with layers as Llama's.
        ids: tokens of the text.

    Attributes:
        sublayers: all, in order.
        hidden: what the first layer reads, [T, D].
        chosen: the full model's logits, [T, V].
    """

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self._model, self._layers = model, model.model.layers
        self.sublayers: list[Sublayer] = [(kind, i) for i in range(len(self._layers)) for kind in ("attention", "mlp")]
        self._keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        AttentionInterface.register("first_guess", self._attend)
        model.set_attn_implementation("first_guess")
        found: list[Any] = []
        hook = self._layers[0].register_forward_pre_hook(lambda _, a, k: found.append((a, k)), with_kwargs=True)
        self.logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        hook.remove()
        ((self.hidden,), options), *_ = found
        self._places = options["position_embeddings"]

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        """Of the tokens before, keys and values are the full model's, whose pass comes first; of itself its own."""
        repeats = query.shape[1] // key.shape[1]
        key, value = (one[0].repeat_interleave(repeats, 0) for one in (key, value))
        all_keys, all_values = self._keys.setdefault(module.layer_idx, (key, value))
        scores = query[0] @ all_keys.transpose(1, 2) * scaling  # [heads, T, T]
        scores.diagonal(dim1=1, dim2=2).copy_((query[0] * key).sum(-1) * scaling)
        weights = (scores + self._mask).softmax(-1)
        own = weights.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        return (weights @ all_values + own * (value - all_values)).transpose(0, 1)[None], None

    def after(self, sublayer: Sublayer, hidden: torch.Tensor) -> torch.Tensor:
        kind, number = sublayer
        layer = self._layers[number]
        if kind == "mlp":
            found: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            return found
        read = layer.input_layernorm(hidden)
        found = hidden + layer.self_attn(read, position_embeddings=self._places, attention_mask=None)[0]
        return found

    def without(self, removed: Sequence[Sublayer], begin: int = 0, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [T, V]; from sublayer ``begin`` on, which reads ``hidden``."""
        hidden = self.hidden if hidden is None else hidden
        for one in self.sublayers[begin:]:
            if one not in removed:
                hidden = self.after(one, hidden)
        logits: torch.Tensor = self._model.lm_head(self._model.model.norm(hidden))[0]
        return logits

    def removed_in_turn(self) -> list[Sublayer]:
        """Half of the sublayers, those first without which most tokens are the full model's."""
        wanted, removed = self.logits.argmax(-1), list[Sublayer]()
        candidates = self.sublayers
        while len(removed) < len(self.sublayers) // 2:
            scores: dict[Sublayer, float] = {}
            hidden = self.hidden
            for at, one in enumerate(self.sublayers):
                if one in removed:
                    continue
                if one in candidates:
                    logits = self.without(removed, at + 1, hidden)
                    scores[one] = float((logits.argmax(-1) == wanted).float().mean())
                hidden = self.after(one, hidden)
            best = sorted(scores, key=lambda one: -scores[one])
            removed.append(best[0])
            print(len(removed), best[0], round(scores[best[0]], 3), file=sys.stderr, flush=True)
            candidates = best[1 : BEST + 1]
            rest = [one for one in self.sublayers if one not in removed and one not in candidates]
            candidates += rest[len(removed) % EVERY :: EVERY]
        return removed


def shares(full: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> dict[str, float]:
    """Of equal tokens, of logits [T, V]: greedy, and drawn with the same random numbers."""
    random = np.random.default_rng(0).random((len(full), DRAWS))
    equal = 0
    for uniforms, *pair in zip(random, full, other, strict=True):
        sums = [np.cumsum(np.exp((one.astype(np.float64) - one.max()) / TEMPERATURE)) for one in pair]
        drawn, guessed = (np.searchsorted(of, uniforms * of[-1], "right") for of in sums)
        equal += int((drawn == guessed).sum())
    greedy = float((full.argmax(-1) == other.argmax(-1)).mean())
    return {"greedy": greedy, f"temperature {TEMPERATURE}": equal / random.size}


def sublayer_seconds(bundle: Bundle, context: int) -> dict[str, float]:
    """Of a decode step of one request: each attention's and each mlp's part, and that of the rest, head and all that
    is outside of kernels."""
    runner = StepRunner(bundle, [StepSizes((1,), (context,))])
    runner.fill_caches()
    step = drawn(runner.step(StepSizes((1,), (context,))))
    whole, kernels = [], []
    for _ in range(PROFILED):
        began = time.perf_counter()
        kernels.append(runner.program.profile(step)[1])
        whole.append(time.perf_counter() - began)
    seconds = np.median(kernels[2:], axis=0)
    found = {"attention": 0.0, "mlp": 0.0}
    layers = set[str]()
    for one, took in zip(runner.lowered.steps, seconds, strict=True):
        where = one.where.split(" + ", maxsplit=1)[0].split(".")
        if "layers" in where:
            layers.add(where[where.index("layers") + 1])
            found["mlp" if {"mlp", "post_attention_layernorm"} & {*where} else "attention"] += float(took)
    rest = median(whole[2:]) - sum(found.values())
    return {kind: of / len(layers) for kind, of in found.items()} | {"rest": rest, "step": median(whole[2:])}


def size(bundle: Bundle) -> int:
    """Bytes of its weights."""
    return sum(bundle.tensor(use.name).bytes for use in bundle.program("cpu").weights)


def gain(share: float, each: float, rows: Sequence[float]) -> tuple[float, int]:
    """Tokens a second over plain decoding, and for which length of a draft.

    Args:
        share: the probability of a guessed token to be right behind right ones.
        each: what a guess costs, in plain steps.
        rows: seconds of steps of 1, 2, ... rows.
    """
    best = 0.0, 0
    for length in range(1, len(rows)):
        expected = sum(share**at for at in range(length + 1))
        best = max(best, (expected / (length * each + rows[length] / rows[0]), length))
    return best


def search(path: Path, text: Sequence[int], read: Mapping[str, list[int]], behind: Mapping[str, int]) -> dict[str, Any]:
    """Which sublayers are left out in turn, and of each number the shares of equal tokens in the texts that are
    ``read``, from a place on."""
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        order = Cut(model, text).removed_in_turn()
        judged: list[dict[str, dict[str, float]]] = [{} for _ in order]
        for name, tokens in read.items():
            cut = Cut(model, tokens)
            full = cut.logits[behind[name] :].numpy()
            for count, found in enumerate(judged, 1):
                found[name] = shares(full, cut.without(order[:count])[behind[name] :].numpy())
    return {"removed": [f"{kind} {number}" for kind, number in order], "equal": judged}


def skip(options: argparse.Namespace) -> dict[str, Any]:
    """See the module. Prints a table of every bundle."""
    bundles = {path.stem: Bundle.open(path) for path in options.bundles}
    read: dict[str, list[int]] = {}
    everything: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
    for path in options.bundles:
        with LLM(path, memory="512MiB") as llm:
            ids = llm.tokenizer.encode(EVALUATION_TEXT.read_text(encoding="utf-8"))[: SEARCHED + JUDGED]
            question = llm.tokenizer.encode(TASKS["chat"])
            if not read:
                params = SamplingParams(max_tokens=ANSWERED, ignore_eos=True)
                answer = [*question, *llm.generate([question], params)[0].token_ids]
                read = {"text": ids[SEARCHED:], "own answer": answer}
            everything[path.stem] = {name: llm.logits(tokens) for name, tokens in read.items()}
    behind = {"text": 0, "own answer": len(question) - 1}
    if options.searched:
        results = {key: json.loads(options.searched.read_text())["skip"][key] for key in ("removed", "equal")}
    else:
        results = search(options.model, ids[:SEARCHED], read, behind)
    if options.json:
        options.json.write_text(json.dumps({"skip": results}))
    order, judged = [one.split()[0] for one in results["removed"]], results["equal"]
    rows = json.loads(options.rows.read_text()) if options.rows else {}
    for stem, bundle in bundles.items():
        if (key := f"{stem}.bundle") in rows:
            costs = {int(context): of for context, of in rows[key]["row_costs"]["alone"].items()}
        else:
            costs = row_seconds(bundle, CONTEXTS, 12.0)
        drafts = {
            other: {n: shares(logits[behind[n] :], others[n][behind[n] :]) for n, logits in everything[stem].items()}
            for other, others in everything.items()
            if f"{other}.bundle" in rows and size(bundles[other]) < size(bundle)
        }
        results[stem] = of = {}
        for context in CONTEXTS:
            parts = sublayer_seconds(bundle, context)
            each = [1 - sum(parts[kind] for kind in order[: n + 1]) / parts["step"] for n in range(len(order))]
            of[context] = {"seconds": parts, "rows": costs[context], "cost": each, "gains": [], "drafts": {}}
            for count, found in enumerate(judged):
                by = {
                    f"{n}, {way}": gain(a, each[count], costs[context])
                    for n, w in found.items()
                    for way, a in w.items()
                }
                of[context]["gains"].append(by)
            for other, equal in drafts.items():
                cost = rows[f"{other}.bundle"]["row_costs"]["alone"][str(context)][0] / costs[context][0]
                gains = {f"{n}, {way}": gain(a, cost, costs[context]) for n, w in equal.items() for way, a in w.items()}
                of[context]["drafts"][other] = {"cost": cost, "equal": equal, "gains": gains}
            print(stem, context, {k: round(1e3 * v, 3) for k, v in parts.items()})
            for way in of[context]["gains"][0]:
                at = max(range(len(order)), key=lambda n: of[context]["gains"][n][way][0])
                best = of[context]["gains"][at][way]
                other_ways = {o: round(d["gains"][way][0], 2) for o, d in of[context]["drafts"].items()}
                print(
                    f"  {way}: {best[0]:.2f} without {at + 1}, drafts of {best[1]}, cost {each[at]:.2f}; {other_ways}"
                )
    return {"skip": results}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bundles", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=Path, help="of speculation.py --row-costs")
    parser.add_argument("--searched", type=Path, help="figures of an earlier run, whose search is taken")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    found = skip(options)
    if options.json:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        results |= {"machine": machine(), "commit": commit()} | found
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
