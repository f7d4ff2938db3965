"""Runs canitoolcall's fixtures, answers of many models with what they mean, through our parsers and grammars.

    python benchmarks/tool_calls.py [--folder FOLDER] [--json FILE]

Each fixture's answer is parsed at once, token by token, and cut by canitoolcall's own strategies and at random; what
comes out is compared with what the fixture expects by canitoolcall's own checks. Answers that chat templates rendered
are given to llguidance too, with the grammar of their tools.

A fixture has the ids that its model's tokenizer gave. Those tokenizers aren't here, so each has another: bytes, and the
model's control tokens. Which of an answer's markers are control tokens is known from the ids: where the answer has more
markers than the ids have control tokens, from how many other ids stand between these.

pip downloads canitoolcall into an environment of its own in ``--folder``. None of it is shipped. Exits with 1 where an
answer is misread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tokenizers
from conformance import REPOSITORY, environment
from peers.machine import commit, machine

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.chat_format import FORMATS, ChatFormat
from enginewright.runtime.text.formats.notation import Reasoning
from enginewright.runtime.text.tokenizer import Tokenizer

PACKAGES = ("canitoolcall==0.1.1",)
BY_NAME = {one.name: one for one in FORMATS}
FAMILIES = {
    "qwen3-hermes": [("", "hermes")],
    "qwen3-xml": [("", "qwen3-xml")],
    "gpt-oss": [("", "harmony")],
    "gemma4": [("", "gemma4")],
    "glm": [("4.5", "glm-4.5"), ("", "glm-4.7")],
    "kimi": [("K3", None), ("", "kimi-k2")],
    "llama": [("Llama-4", "llama-pythonic"), ("", "llama-json")],
    "mistral": [("v0.3", "mistral-v3"), ("", "mistral")],
    "deepseek": [
        *(("V3.2", "deepseek-dsml"), ("V4.1", "deepseek-v4.1"), ("V4", "deepseek-v4")),
        *(("V3.1", "deepseek-v3.1"), ("", "deepseek-v3")),
    ],
}
"""Family -> a part of the model's name, and its format; the first that fits. None: we have no such format."""

CONTROL = {
    "deepseek": [("", 128_793)],
    "glm": [("GLM-5", 154_820), ("", 151_329)],
    "gpt-oss": [("", 199_998)],
    "kimi": [("", 163_584)],
    "llama": [("Llama-4", 200_000), ("", 128_000)],
    "qwen3-hermes": [("", 151_643)],
    "qwen3-xml": [("Coder", 151_643), ("", 248_044)],
}
"""Family -> a part of the model's name, and the least id of its control tokens."""
GEMMA_CONTROL = frozenset((46, 47, 48, 49, 50, 51, 52, 98, 99, 100, 101, 105, 106))

POLICIES = {
    "llama/l4-truncated-missing-close-bracket": "calls that are whole stay calls, where the answer broke off within a "
    "later one; the fixture wants none in this format, and wants them in others",
}
"""Fixtures that we read otherwise on purpose."""
NO_TOKENS_IN_TEXT = "a grammar writes text in ordinary tokens; this answer has a marker's token in a text"
GRAMMAR_POLICIES = {
    "llama/l3-json-answer-not-a-call": "where a tool is strict, an answer that begins with { is a call",
    "kimi/k26-marker-terminator-in-string": NO_TOKENS_IN_TEXT,
    "qwen3-xml/q38-tool-call-token-in-arguments": NO_TOKENS_IN_TEXT,
}

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Runs all fixtures, prints what came of them, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "conformance")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "tool_calls.json")
    options = parser.parse_args(arguments)
    python = environment("canitoolcall", PACKAGES, options)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    sys.path.append(str(packages))  # behind our own
    fixtures = Fixtures(packages / "canitoolcall" / "_data" / "fixtures")
    tests = [fixtures.test(one) for one in fixtures.all]
    held = [row for one in fixtures.all if (row := fixtures.held(one)) is not None]
    results: Row = {"of": PACKAGES[0], "machine": machine(), "enginewright": metadata.version("enginewright")}
    results |= {"commit": commit()}
    for name, rows in (("parsed", tests), ("grammar", held)):
        counts = Counter(row["outcome"] for row in rows)
        families = {}
        for row in rows:
            families.setdefault(row["name"].partition("/")[0], Counter())[row["outcome"]] += 1
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
        for row in rows:
            if row["outcome"] == "failed":
                print(f"  {row['name']}: {row['reason'][:300]}")
        others = [row for row in rows if row["outcome"] != "passed"]
        results[name] = {"counts": counts, "families": families, "others": others}
    options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 1 if any(row["outcome"] == "failed" for row in (*tests, *held)) else 0


class Fixtures:
    """All fixtures, with a tokenizer for each.

    Attributes:
        all: in the files' order.
    """

    def __init__(self, folder: Path) -> None:
        from canitoolcall.fixtures import load_fixtures

        self.all: list[Any] = list(load_fixtures([folder]))
        self._families = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/family.json")}
        self._named: dict[tuple[str, int], str] = {}  # model, id -> the marker that it is
        for one in self.all:
            control = [token for token in one.output_token_ids or () if self._is_control(one, token)]
            markers = self._markers(one)
            if len(control) == len(markers):
                self._named |= {(self._model(one), token): ids[0] for token, ids in zip(control, markers, strict=True)}

    def test(self, one: Any) -> Row:
        """Tests a fixture and returns its outcome."""
        from canitoolcall.checks import run_checks
        from canitoolcall.chunking import DEFAULT_STRATEGIES, split
        from canitoolcall.results import Observation, ParsedToolCall, ParseResult

        name = self._format(one)
        if name is None:
            return {"name": one.id, "outcome": "not applicable", "reason": "a format that the table doesn't have"}
        chosen, tokenizer, ids, prompt = self._made(one, name)
        tools = [dict(tool) for tool in one.tools]
        whole = chosen.parse(tokenizer, ids, tools=tools, prompt_ids=prompt)
        special = set(tokenizer.added_tokens.values())
        ways: list[Sequence[Sequence[int]]] = [split(ids, strategy, special=special) for strategy in DEFAULT_STRATEGIES]
        draw = random.Random(one.id)
        for _ in range(20):
            places = sorted(draw.sample(range(len(ids) + 1), min(len(ids), 9)))
            ways.append([ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)])
        for pieces in ways:
            parser = chosen.parser(tokenizer, tools=tools, prompt_ids=prompt)
            deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
            parsed = [
                "".join(d.content for d in deltas),
                "".join(d.reasoning for d in deltas),
                *("".join(d.arguments for d in deltas if d.call == i) for i in range(len(whole.calls))),
            ]
            same = [whole.content or "", whole.reasoning or "", *(call.arguments for call in whole.calls)]
            if parser.message != whole or parsed != same:
                return {"name": one.id, "outcome": "failed", "reason": f"streamed isn't unstreamed: {parser.message}"}
        calls = tuple(ParsedToolCall(call.name, call.arguments) for call in whole.calls if call.complete)
        result = ParseResult(content=whole.content, reasoning_content=whole.reasoning, tool_calls=calls)
        rows = run_checks(one, None, Observation(nonstream=result, streams={}))
        wrong = [f"{row.check}: {row.detail}" for row in rows if row.status.value != "pass"]
        if not wrong:
            return {"name": one.id, "outcome": "passed"}
        if all(row.status.value in ("pass", "soft_pass") for row in rows):
            return {"name": one.id, "outcome": "passed but for space around text", "reason": "; ".join(wrong)}
        if one.id in POLICIES:
            return {"name": one.id, "outcome": "policy differs", "reason": POLICIES[one.id]}
        return {"name": one.id, "outcome": "failed", "reason": "; ".join(wrong)}

    def held(self, one: Any) -> Row | None:
        """Tests if the grammar of a fixture's tools accepts an answer that a template rendered; None for other
        fixtures.
        """
        from llguidance import LLMatcher, LLTokenizer

        name = self._format(one)
        kind = one.provenance["kind"] if isinstance(one.provenance, dict) else one.provenance.kind
        if (
            name is None
            or one.expected is None
            or kind != "template_render"
            or {"malformed", "truncated"} & set(one.tags)
        ):
            return None
        chosen, tokenizer, ids, prompt = self._made(one, name)
        grammar = chosen.grammar(tokenizer, [dict(tool) for tool in one.tools], strict=True, prompt_ids=prompt)
        if grammar is None:
            return None
        tokens = LLTokenizer(tokenizer.to_json(), eos_token=[tokenizer.added_tokens["<end>"]])
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
        count = matcher.try_consume_tokens(list(ids))
        if count == len(ids) and matcher.is_accepting():
            return {"name": one.id, "outcome": "passed"}
        policy = GRAMMAR_POLICIES.get(one.id) or (NO_TOKENS_IN_TEXT if "marker-in-arguments" in one.tags else None)
        if policy is not None:
            return {"name": one.id, "outcome": "policy differs", "reason": policy}
        text = tokenizer.decode(ids[: count + 1], skip_special_tokens=False)
        return {"name": one.id, "outcome": "failed", "reason": f"refused behind {text[-80:]!r}"}

    def _model(self, one: Any) -> str:
        name: str = one.tokenizer.repo if one.tokenizer else one.models[0]
        return name

    def _format(self, one: Any) -> str | None:
        return next(name for part, name in FAMILIES[one.family] if part in one.models[0])

    def _is_control(self, one: Any, token: int) -> bool:
        if one.family == "gemma4":
            return token in GEMMA_CONTROL
        if one.family == "mistral":
            return token < (20 if "v0.3" in one.models[0] else 1000)
        return token >= next(least for part, least in CONTROL[one.family] if part in one.models[0])

    def _markers(self, one: Any) -> list[re.Match[str]]:
        """Finds the markers in an answer's text that may be control tokens."""
        names = set(self._families[one.family]["markers"]) | {"<|tool_call_argument_begin|>", '<|"|>'}
        names = {name for name in names if "function" not in name and "parameter" not in name}
        if one.family == "deepseek":
            names = {name for name in names if "DSML" not in name} | {"<think>", "</think>", "｜DSML｜"}
            names |= {f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")}
        return list(re.finditer("|".join(map(re.escape, sorted(names, key=len, reverse=True))), one.raw_output))

    def _parts(self, one: Any) -> list[tuple[str, bool]]:
        """An answer's text, in parts that are control tokens and parts that aren't."""
        ids, markers = list(one.output_token_ids or ()), self._markers(one)
        places = [i for i, token in enumerate(ids) if self._is_control(one, token)]
        chosen = markers
        if len(places) != len(markers):
            chosen = _aligned(
                one.raw_output, markers, places, len(ids), [self._named.get((self._model(one), ids[i])) for i in places]
            )
        parts, at = [], 0
        for marker in chosen:
            parts += [(one.raw_output[at : marker.start()], False), (marker[0], True)]
            at = marker.end()
        return [*parts, (one.raw_output[at:], False)]

    def _made(self, one: Any, name: str) -> tuple[ChatFormat, Tokenizer, list[int], list[int]]:
        spelling = BY_NAME[name]
        if one.models[0].endswith("Magistral-Small-2506"):  # whose markers of reasoning are text
            spelling = replace(spelling, reasoning=Reasoning("<think>", "</think>"))
        parts = self._parts(one)
        model = self._model(one)
        markers = {text for text, is_token in parts if is_token}
        markers |= {marker for (known, _), marker in self._named.items() if known == model}
        special = one.family not in ("qwen3-hermes", "qwen3-xml", "glm")
        tokenizer = _byte_tokenizer(tuple(sorted(markers)), special)
        ids: list[int] = []
        for text, is_token in parts:
            ids += [tokenizer.added_tokens[text]] if is_token else text.encode()
        prompt = one.generation_prompt
        if prompt is None:
            models = self._families[one.family]["reference_models"]
            prompt = next((m.get("default_generation_prompt") for m in models if m["repo"] == one.models[0]), "")
        return ChatFormat(spelling), tokenizer, ids, tokenizer.encode(prompt or "", add_special_tokens=False)


def _aligned(
    text: str, markers: Sequence[re.Match[str]], places: Sequence[int], count: int, names: Sequence[str | None]
) -> list[re.Match[str]]:
    """The markers of a text that stand at these places of its ids: those with about 3.8 letters for each id between."""
    gaps = [b - a - 1 for a, b in zip([-1, *places], [*places, count], strict=True)]

    @cache
    def best(first: int, k: int, at: int) -> tuple[float, tuple[int, ...]]:
        if k == len(places):
            return abs((len(text) - at) / 3.8 - gaps[k]), ()
        least: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for j in range(first, len(markers)):
            letters = markers[j].start() - at
            if (letters == 0) != (gaps[k] == 0) or names[k] not in (None, markers[j][0]):
                continue
            cost, rest = best(j + 1, k + 1, markers[j].end())
            least = min(least, (cost + abs(letters / 3.8 - gaps[k]), (j, *rest)))
        return least

    chosen = best(0, 0, 0)[1]
    assert len(chosen) == len(places), text
    return [markers[j] for j in chosen]


@cache
def _byte_tokenizer(markers: tuple[str, ...], special: bool) -> Tokenizer:
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(b) if b in shown else chr(next(others)) for b in range(256)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: b for b, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
    add: Callable[[list[tokenizers.AddedToken]], int] = backend.add_special_tokens if special else backend.add_tokens
    add([tokenizers.AddedToken(one, special=special, normalized=False) for one in markers])
    return Tokenizer(TokenizerFiles(backend.to_str(), None, {"eos_token": "<end>"}))


if __name__ == "__main__":
    sys.exit(main())
