"""Answers of a given form: what is refused, what a grammar allows, and that it never fails open."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest

import enginewright as ew
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.requests import grammar_process, structured
from enginewright.runtime.requests.logit_rules import LogitRules, sampling_batch
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.requests.structured import Grammar, Grammars, Guided, Masks, StructuredOutputsParams
from enginewright.runtime.tasks import generate
from enginewright.runtime.text.chat_format import ChatFormat
from enginewright.runtime.text.formats.grammar import AnswerRules
from enginewright.runtime.text.formats.notation import Reasoning
from enginewright.runtime.text.formats.table import PLAIN
from tests.runtime.shared.closed_schemas import CLOSED, validator
from tests.waiting import wait_until

from .byte_tokens import byte_tokens_json

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    compiler = Grammars(byte_tokens_json([END]), 256, [END])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def llm(smollm2_bundle: Path) -> Iterator[ew.LLM]:
    with ew.LLM(smollm2_bundle, max_requests=8, context=1024, memory="96MiB") as opened:
        yield opened


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "none is given"),
        ({"json": "{}", "regex": "a"}, "json and regex are given"),
        ({"json": "{"}, r"json: .* isn't JSON"),
        ({"json": "3"}, r"json: 3 isn't taken"),
        ({"json": {"a": {1, 2}}}, r"json: .* isn't JSON"),
        ({"json": False}, "nothing can meet the schema false"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", 3]}, "choice"),
        ({"choice": ["a"] * 10_001}, "choice: 10001 texts"),
        ({"grammar": "a" * ((1 << 20) + 1)}, "grammar: 1,048,577 bytes"),
        ({"grammar": "\ud800"}, "surrogates"),
        ({"json_object": 3}, "json_object"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"structural_tag": '{"structures": [], "triggers": []}'}, "no structure"),
        ({"structural_tag": '{"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}'}, "none of the triggers"),
    ],
)
def test_what_is_no_form_is_refused_by_its_field(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ew.RequestError, match=f"^structured_outputs.*{said}"):
        StructuredOutputsParams(**given)


def test_a_deep_schema_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ew.RequestError, match="levels deep"):
        StructuredOutputsParams(json=deep)


def test_other_fields_of_a_mapping_are_refused() -> None:
    with pytest.raises(ew.RequestError, match="there is no 'regexp'"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(ew.RequestError, match="structured_outputs: 'json' isn't taken"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    assert SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs == StructuredOutputsParams(
        choice=["a"]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {"not": {"type": "string"}}}, r'json: .*"not"'),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, r'json: .*"not"'),
        ({"json": {"type": "string", "format": "regex"}}, "json: Unknown format: regex"),
        ({"json": {"$ref": "https://example.org/a.json"}}, r"json: .*https://example.org/a.json"),
        ({"json": {"type": "array", "minItems": 3, "maxItems": 2}}, r"json: .*minItems \(3\)"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "json: nothing can meet it"),
        ({"json": {"enum": []}}, "json: nothing can meet it"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "json: Unsatisfiable"),
        ({"json": '{"maximum": 1' + "0" * 400 + "}"}, "json: .*number out of range"),
        ({"regex": "(a"}, "regex: invalid regex.* unclosed group"),
        ({"grammar": "start: b"}, 'grammar: unknown name: "b"'),
        ({"grammar": "start: <|nobody|>"}, "grammar: unknown special token"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_that_names_it(
    grammars: Grammars, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ew.RequestError, match=f"^structured_outputs.{said}"):
        grammars.grammar(StructuredOutputsParams(**given))


def test_a_compilation_that_takes_long_is_killed_and_the_next_one_works() -> None:
    grammars = Grammars(byte_tokens_json([END]), 256, [END], seconds=60.0)
    assert grammars.grammar(StructuredOutputsParams(regex="a")).forced(8) == [*b"a"]
    process = grammars._process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # it can't answer in time, also on a busy machine
    grammars._process._seconds = 0.0
    with pytest.raises(ew.RequestError, match="regex: it takes more than 0 s to compile"):
        grammars.grammar(StructuredOutputsParams(regex="(a|b){1,1000}c"))
    assert process.poll() is not None
    grammars._process._seconds = 60.0
    assert grammars.grammar(StructuredOutputsParams(regex="ab")).forced(8) == [*b"ab"]
    process = grammars._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert grammars.grammar(StructuredOutputsParams(regex="cd")).forced(8) == [*b"cd"], "another one is started"
    grammars.close()
    with pytest.raises(ew.CapacityError, match="closed"):
        grammars.grammar(StructuredOutputsParams(regex="ef"))


SLOW = {"type": "integer", "multipleOf": 999983}
"""Takes ten seconds and 400 MB."""


def test_a_form_that_takes_much_memory_is_refused_and_then_refused_at_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = StructuredOutputsParams(json={"type": "integer", "multipleOf": 99991})
    for _ in range(2):
        with pytest.raises(ew.RequestError, match=r"json: compiled it takes \d+ MiB of memory"):
            grammars.grammar(large)
        monkeypatch.setattr(grammars._process, "attempt", None)  # nothing is tried again
    assert (large.kind, large.source()) not in grammars._kept


def test_a_form_that_takes_long_is_stopped_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "SHORT_SECONDS", 0.01)
    grammars = Grammars(byte_tokens_json([END]), 256, [END], seconds=600.0)
    turns = grammars._process.turns
    with turns.turn("a"), ThreadPoolExecutor(2) as pool:
        slow = pool.submit(grammars.grammar, StructuredOutputsParams(json=SLOW), "b")
        wait_until(lambda: turns._free == 0)
        quick = pool.submit(grammars.grammar, StructuredOutputsParams(regex="q"), "c")
        with pytest.raises(ew.OverloadError, match="others wait"):
            slow.result()
        assert quick.result().forced(8) == [*b"q"]
        # While others wait it isn't tried again; else it is.
        inside = [turns.turn("d") for _ in range(2)]
        waiting, blocked = [pool.submit(one.__enter__) for one in inside]
        wait_until(lambda: turns.waiting == 1)
        with pytest.raises(ew.OverloadError, match="others wait"):
            grammars.grammar(StructuredOutputsParams(json=SLOW), "b")
        waiting.result()
        grammars.close()
        with pytest.raises(ew.CapacityError, match="closed"):
            blocked.result()


def test_turns_alternate_among_tenants() -> None:
    """However many one tenant wants, and no tenant has two while another waits for its first."""
    turns = grammar_process.FairTurns(2)
    order: list[str] = []
    go = [threading.Event() for _ in range(2)]

    def take(tenant: str, hold: threading.Event | None = None) -> None:
        with turns.turn(tenant):
            order.append(tenant)
            if hold is not None:
                hold.wait()

    with ThreadPoolExecutor(16) as pool:
        holding = [pool.submit(take, "a", event) for event in go]
        wait_until(lambda: len(order) == 2)
        others = []
        for tenant in "aaaabbc":
            others.append(pool.submit(take, tenant))
            wait_until(lambda: turns.waiting == len(others))
        go[0].set()
        for one in others:
            one.result()
        go[1].set()
        for one in holding:
            one.result()
    assert order[2:] == [*"bcb", *"aaaa"], "one of a's is inside all the time"


def test_compiled_forms_have_a_budget_of_bytes_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "KEPT_BYTES", 4 << 20)
    grammars = Grammars(byte_tokens_json([END]), 256, [END])
    mine = StructuredOutputsParams(regex="mine")
    grammars.grammar(mine, "a\0salt")
    for i in range(30):
        grammars.grammar(StructuredOutputsParams(regex=f"theirs {i}"), "b")
    cache = grammars._kept
    assert cache.bytes <= 4 << 20 and 2 < len(cache) < 30
    assert cache.get((mine.kind, mine.source())) is not None
    running = grammars.grammar(StructuredOutputsParams(choice=["x" * 3000]), "b")
    assert running._compiled is not None and running._compiled.bytes >= 1 << 18
    monkeypatch.setattr(structured, "RUNNING_BYTES", 1 << 20)
    with pytest.raises(ew.OverloadError, match="grammars of running requests take"):
        grammars.grammar(StructuredOutputsParams(regex="another"), "a")
    grammars.close()


@pytest.mark.parametrize("count", [1990, 2010, 10_000])
def test_any_number_of_choices_can_be_followed(grammars: Grammars, count: int) -> None:
    texts = [f"x{i:05d}" for i in range(count)]
    grammar = grammars.grammar(StructuredOutputsParams(choice=texts))
    for byte in texts[-1].encode():
        assert byte in allowed(grammar)
        grammar.push(byte)
    assert grammar.complete and allowed(grammar) == {END} and grammar.error is None


@pytest.mark.parametrize(
    "texts",
    [
        [
            "a.b",
            "a|b",
            "(",
            "\n",
            "\u00e9\u20ac\U0001f600x",
            "\u00e9",
            " a",
            "\\",
            "/",
            "a",
            "aa",
            "\x00",
            "a-b",
            "^$",
            "[a]",
        ],
        ["a" * i for i in range(1, 200)],
        ["ab", "abc", "abd", "b"],
        ["one"],
    ],
)
def test_choices_are_exactly_their_texts(grammars: Grammars, texts: list[str]) -> None:
    grammar = grammars.grammar(StructuredOutputsParams(choice=texts))
    for text in {*texts, *(text[:-1] for text in texts), *(text + "a" for text in texts)}:
        copy = grammar.copy()
        for byte in text.encode():
            if byte not in allowed(copy):
                assert text not in texts
                break
            copy.push(byte)
        else:
            assert copy.complete == (text in texts), text


@pytest.mark.parametrize(
    "given",
    [
        {"choice": ["ab" * 500_000]},
        {
            "json": {
                "anyOf": [{"required": [f"k{i}"], "properties": {f"k{i}": {"type": "integer"}}} for i in range(3000)]
            }
        },
        {"grammar": "start: " + " | ".join(f'"x{i:05d}"' for i in range(2010))},
    ],
    ids=["a-choice-of-1-MB", "3000-of-anyOf", "2010-alternatives"],
)
def test_what_cannot_be_followed_is_refused_before_it_runs(grammars: Grammars, given: dict[str, Any]) -> None:
    with pytest.raises(ew.RequestError, match=f"structured_outputs.{next(iter(given))}: "):
        grammars.grammar(StructuredOutputsParams(**given))


def allowed(grammar: Grammar) -> set[int]:
    (tokens,) = Masks([Guided(grammar, 0, ())], 1).lists()
    return set(tokens.tolist())


def test_a_mask_has_what_may_come_next(grammars: Grammars) -> None:
    grammar = grammars.grammar(StructuredOutputsParams(choice=["red", "rose", 'ro"\n']))
    for token, expected in ((ord("r"), {*b"eo"}), (ord("o"), {*b's"'}), (ord('"'), {*b"\n"}), (ord("\n"), {END})):
        grammar.push(token)
        assert allowed(grammar) == expected
    assert grammar.complete
    grammar.push(ord("x"))
    assert not allowed(grammar), "it never fails open"
    assert grammar.error is not None and "isn't complete" in str(grammar.error)


def test_a_draft_has_its_masks_and_leaves_the_grammar_where_it_was(grammars: Grammars) -> None:
    grammar = grammars.grammar(StructuredOutputsParams(regex="ab[0-9]c"))
    masks = Masks([Guided(grammar, 1, (*b"ab3",))], 6)
    assert masks.rows.tolist() == [-1, 0, 1, 2, 3, -1]
    assert [set(one.tolist()) for one in masks.lists()] == [{*b"a"}, {*b"b"}, {*b"0123456789"}, {*b"c"}]
    wrong = Masks([Guided(grammar, 0, (*b"ax3",))], 4)
    assert [set(one.tolist()) for one in wrong.lists()[:2]] == [{*b"a"}, {*b"b"}]
    assert allowed(grammar) == {*b"a"}
    assert grammar.forced(8) == [*b"ab"]
    other = grammar.copy()
    other.push(ord("a"))
    assert allowed(other) == {*b"b"} and allowed(grammar) == {*b"a"}


@pytest.mark.parametrize(
    "draft",
    [[300], [-5], [ord("a"), 1 << 20], [ord("a"), ord("b"), 257, ord("3")], [END, END], [ord("x")] * 3],
    ids=["beyond the vocabulary", "below 0", "then beyond", "later beyond", "ends", "not allowed"],
)
def test_a_wrong_draft_is_dropped_and_the_answer_goes_on(grammars: Grammars, draft: list[int]) -> None:
    """llguidance stays in an error: it must not be the answer's own state that a draft brings into one."""
    grammar, other = (grammars.grammar(StructuredOutputsParams(regex="ab[0-9]c")) for _ in range(2))
    size = 1 + len(draft)
    masks = Masks([Guided(grammar, 0, draft), Guided(other, size, (*b"ab",))], size + 3)
    lists = [set(one.tolist()) for one in masks.lists()]
    assert lists[0] == {*b"a"} and grammar.error is None
    assert lists[size:] == [{*b"a"}, {*b"b"}, {*b"0123456789"}], "another one's draft in the same step"
    if max(draft) > 256 or min(draft) < 0:
        assert not any(lists[1:size]), "no row behind it is open"
    for token, expected in zip(b"ab7c", ({*b"a"}, {*b"b"}, {*b"0123456789"}, {*b"c"}), strict=True):
        assert allowed(grammar) == expected
        grammar.push(token)
    assert grammar.complete


def test_a_mask_that_can_t_be_computed_ends_its_own_answer_alone(grammars: Grammars) -> None:
    """Also where llguidance raises, as for a wrong place, in place of keeping the error."""
    one, other = (grammars.grammar(StructuredOutputsParams(regex="ab")) for _ in range(2))
    bits = np.full((2, grammars.words), 0xFFFFFFFF, np.uint32)
    grammars.fill([(one, 0, []), (other, 5, [])], bits)
    assert one.error is None and other.error is not None
    assert np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist() == [ord("a")]


@pytest.mark.parametrize("vocab", [256, 1001])
def test_the_sampler_draws_by_bits_as_by_lists(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 7
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    params = [SamplingParams(temperature=t, top_p=p, logprobs=3) for t, p in [(0, 1), (1, 1), (2, 0.7)]]
    batch = sampling_batch([(params[i % 3], i, i) for i in range(rows)])

    class Fixed:
        rows = np.array([0, -1, 2, 1, -1, 2, 0], np.int32)
        bits = np.packbits(rng.random((3, -(-vocab // 32) * 32)) < 0.1, axis=1, bitorder="little").view(np.uint32)
        waited = False

        def wait(self) -> None:
            self.waited = True

        lists = Masks.lists

    batch.masks = masks = Fixed()  # type: ignore[assignment]
    sampler = RowSampler(2)
    by_bits = sampler.sample(logits, batch)
    assert masks.waited
    lists = batch.with_lists()
    assert lists.masks is None
    lists.allowed = None if lists.allowed is None else lists.allowed[lists.allowed < vocab]
    by_lists = sampler.sample(logits, lists) if vocab % 32 == 0 else None
    bits = np.unpackbits(Fixed.bits.view(np.uint8), axis=1, bitorder="little")
    assert by_bits.tokens is not None and by_bits.top_ids is not None
    for row, token in enumerate(by_bits.tokens.tolist()):
        assert Fixed.rows[row] < 0 or bits[Fixed.rows[row], token]
    if by_lists is not None:
        assert by_lists.tokens is not None and by_lists.tokens.tolist() == by_bits.tokens.tolist()
    best = np.argsort(-logits[0])[:3]
    assert by_bits.top_ids[0].tolist() == best.tolist(), "log-probabilities are of all tokens"
    batch.top_allowed = np.ones(rows, np.int32)
    of_allowed = sampler.sample(logits, batch)
    assert of_allowed.top_ids is not None and of_allowed.top_logprobs is not None
    permitted = np.where(bits[0, :vocab], logits[0], -np.inf)
    assert of_allowed.top_ids[0].tolist() == np.argsort(-permitted, kind="stable")[:3].tolist()
    exact = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    np.testing.assert_allclose(of_allowed.top_logprobs[0], exact[of_allowed.top_ids[0]], rtol=1e-5)


def test_a_mask_that_allows_nothing_allows_nothing_as_a_list(grammars: Grammars) -> None:
    failed = grammars.grammar(StructuredOutputsParams(choice=["ab"]))
    failed.push(ord("x"))
    sound = grammars.grammar(StructuredOutputsParams(choice=["ab"]))
    row = SamplingParams(logit_bias={5: 2.0}), 0, 0
    for rules in ((), [LogitRules.from_params(row[0], [1])] * 3):
        batch = sampling_batch([row] * 3, rules, guided=[Guided(failed, 0, ()), Guided(sound, 2, ())])
        logits = np.zeros((3, 256), np.float32)
        for one in (batch, batch.with_lists()):
            tokens = RowSampler(1).sample(logits, one).tokens
            assert tokens is not None and tokens.tolist() == [-1, 5 if rules else 0, ord("a")]


def test_masks_of_another_size_are_refused() -> None:
    batch = sampling_batch([(SamplingParams(), 0, 0)])
    logits = np.zeros((1, 64), np.float32)
    for bits, rows in ((np.zeros((1, 3), np.uint32), [0]), (np.zeros((1, 2), np.uint32), [1]), (np.zeros((1, 2)), [0])):

        class Wrong:
            pass

        wrong: Any = Wrong()
        wrong.bits, wrong.rows, wrong.wait = bits, np.array(rows, np.int32), lambda: None
        batch.masks = wrong
        with pytest.raises(ew.RequestError, match="mask"):
            RowSampler(1).sample(logits, batch)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"[A-Z][a-z]{2,8} is [0-9]{1,3} years old\."}, r"[A-Z][a-z]{2,8} is [0-9]{1,3} years old\."),
    ({"choice": ["yes", "no", "it depends"]}, "yes|no|it depends"),
    ({"grammar": 'start: "<" /[a-z]+/ ">" start? "</>"'}, r"(<[a-z]+>)+(</>)+"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_an_answer_matches_its_pattern(llm: ew.LLM, form: dict[str, Any], pattern: str) -> None:
    params = [
        SamplingParams(max_tokens=120, temperature=t, seed=i, structured_outputs=form, n=1 if t == 0 else 3)
        for i, t in enumerate((0.0, 0.8, 1.5))
    ]
    results = llm.generate(["How old is Anna?"] * 3, params)
    texts = [one.text for result in results for one in (result, *result.others) if one.finish_reason == "stop"]
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Person])
def test_an_answer_meets_its_schema(llm: ew.LLM, schema: Any, compact: bool) -> None:
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
    params = SamplingParams(max_tokens=200, temperature=0.7, seed=1, structured_outputs=form)
    (result,) = llm.generate("Describe Anna, who is 31, as JSON.\n", params)
    assert result.finish_reason == "stop"
    Person.model_validate_json(result.text)
    if schema is not Person:
        jsonschema.validate(json.loads(result.text), SCHEMA)
    assert not compact or not re.search(r"\s", re.sub(r'"[^"]*"', "", result.text))


def test_company_hits_and_drafts_change_nothing(llm: ew.LLM) -> None:
    forms = [{"json": SCHEMA}, {"json_object": True}, {"regex": "[a-f]{5,30}"}, None]
    prompt = "Describe Anna, who is 31.\n"
    params = [
        SamplingParams(max_tokens=40, temperature=t, seed=7, structured_outputs=form, speculate=s)
        for form in forms
        for t, s in ((0.0, True), (0.9, True), (0.9, False))
    ]
    together = llm.generate([prompt] * len(params), params)
    alone = [llm.generate(prompt, one)[0] for one in params]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert any(one.num_cached_tokens for one in alone), "prefixes were found"


def test_a_budget_ends_the_reasoning_alone_and_in_company(tiny_bundle: Path) -> None:
    """Also with tokens computed ahead: the tokens of a request's own answer are all that counts."""
    with ew.LLM(tiny_bundle, threads=1) as llm:
        assert llm.tokenizer is not None
        marks = replace(PLAIN, reasoning=Reasoning("<s>", "<pad>"))
        end, budgets = llm.tokenizer.added_tokens["<pad>"], (0, 1, 7, 30)
        params = [
            SamplingParams(
                max_tokens=60, temperature=t, seed=3, ignore_eos=True, speculate=ahead, structured_outputs=form
            )
            for budget in budgets
            for form in [
                {
                    "grammar": ChatFormat(marks).grammar(
                        llm.tokenizer,
                        None,
                        AnswerRules(choice="none", reasoning_budget=budget),
                        reasoning_open=True,
                    )
                }
            ]
            for t, ahead in ((0.0, True), (0.9, True), (0.9, False))
        ]
        prompt = "abc abc abc abc abc"
        together = [one.token_ids for one in llm.generate([prompt] * len(params), params)]
        assert together == [llm.generate(prompt, one)[0].token_ids for one in params]
    for i, ids in enumerate(together):
        assert list(ids).index(end) <= budgets[i // 3], (i, ids)
    assert [list(ids).index(end) for ids in together[:3]] == [0, 0, 0]
    assert together[1::3] == together[2::3]
    assert max(list(ids).index(end) for ids in together) > 7, (
        "the model writes the mark anyway, and no budget is tested"
    )


def test_beams_have_the_form(llm: ew.LLM) -> None:
    params = SamplingParams(
        max_tokens=60, num_beams=4, n=4, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}
    )
    (result,) = llm.generate("Anna is 31. As JSON: ", params)
    answers = [result, *result.others]
    assert len({one.text for one in answers}) == 4
    for one in answers:
        jsonschema.validate(json.loads(one.text), SCHEMA)
    scores = [one.score for one in answers]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_answers_have_declared_properties_alone(tiny_bundle: Path) -> None:
    """A random model at temperature 1 writes what it may."""
    params = [
        SamplingParams(max_tokens=250, temperature=1.0, seed=seed, structured_outputs={"json": json.dumps(schema)})
        for schema in CLOSED.values()
        for seed in range(3)
    ]
    with ew.LLM(tiny_bundle, max_requests=16) as tiny:
        results = tiny.generate(["JSON: "] * len(params), params)
    finished = 0
    for i, result in enumerate(results):
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "stop":
            finished += 1
            validator([*CLOSED.values()][i // 3]).validate(json.loads(result.text))
    assert finished > len(params) * 2 // 3


def test_an_answer_that_is_cut_off_says_so(llm: ew.LLM) -> None:
    (result,) = llm.generate("Hello", SamplingParams(max_tokens=3, structured_outputs={"json": SCHEMA}))
    assert result.finish_reason == "length"


def test_text_around_structures_is_free(llm: ew.LLM) -> None:
    tag = {
        "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
        "triggers": ["<call"],
    }
    params = SamplingParams(max_tokens=100, structured_outputs={"structural_tag": json.dumps(tag)})
    (result,) = llm.generate("Say hello. <call", params)
    for inside in re.findall("<call>(.*?)</call>", result.text, re.DOTALL):
        jsonschema.validate(json.loads(inside), SCHEMA)
    assert result.text


def test_a_grammar_that_fails_ends_its_own_request_alone(llm: ew.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's mask after an error is the end token alone, which would look like a whole answer."""
    check = Grammar.check

    def fails_late(self: Grammar) -> None:
        check(self)
        if self._kind == "regex" and len(self._matcher.get_captures()) >= 0 and self.pushed > 3:  # type: ignore[attr-defined]
            self._matcher.consume_token(0)  # what may not come: an error that stays
            check(self)

    push = Grammar.push

    def counted(self: Grammar, token: int) -> None:
        self.pushed = getattr(self, "pushed", 0) + 1  # type: ignore[attr-defined]
        push(self, token)

    monkeypatch.setattr(Grammar, "pushed", 0, raising=False)
    monkeypatch.setattr(Grammar, "check", fails_late)
    monkeypatch.setattr(Grammar, "push", counted)
    params = [
        SamplingParams(max_tokens=30, structured_outputs={"regex": "[a-z ]{25,30}"}),
        SamplingParams(max_tokens=30, structured_outputs={"json": SCHEMA}),
        SamplingParams(max_tokens=30),
    ]
    broken, guided, plain = llm.generate(["Anna is"] * 3, params, raise_errors=False)
    assert broken.finish_reason == "error"
    assert "structured_outputs.regex: the answer can't be followed" in str(broken.error)
    assert guided.error is None and plain.error is None
    pools = llm.engine.pools.values()
    wait_until(lambda: all(pool.free_blocks == pool.total_blocks for pool in pools))
    assert all(pool.free_blocks == pool.total_blocks for pool in pools)


SUITE_PACKAGE = "jsonschema==4.26.0"  # its sources contain json-schema-org/JSON-Schema-Test-Suite
SUITE_HASH = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"


@pytest.fixture(scope="session")
def schema_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mandatory cases of draft 2020-12."""
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*command, "--dest", folder, SUITE_PACKAGE], check=True)
    (archive,) = folder.glob("*.tar.gz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == SUITE_HASH
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    (cases,) = folder.glob("*/json/tests/draft2020-12")
    return cases


@pytest.mark.soak
def test_no_invalid_instance_of_the_schema_suite_is_accepted(grammars: Grammars, schema_suite: Path) -> None:
    """Unsupported keywords are refused by name; valid instances may be refused, as keys have one order."""
    refused, accepted, count = [], [], 0
    for file in sorted(schema_suite.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            try:
                grammar = grammars.grammar(StructuredOutputsParams(json=json.dumps(group["schema"])))
            except ew.RequestError as e:
                refused.append(e.message)
                continue
            for case in group["tests"]:
                count += 1
                if not case["valid"] and accepts(grammar, case["data"]):
                    accepted.append((file.stem, group["description"], case["description"]))
    assert accepted == [] and count > 500
    assert all(re.match(r"structured_outputs\.json: \S+ \S+", message) for message in refused), refused


def accepts(grammar: Grammar, data: Any) -> bool:
    """Returns True if an instance can be written, with some whitespace."""
    for separators in ((",", ":"), (", ", ": ")):
        one = grammar.copy()
        for token in json.dumps(data, ensure_ascii=False, separators=separators).encode():
            one.push(token)
        if one.complete:
            return True
    return False


def hard_schemas(count: int) -> Iterator[dict[str, Any]]:
    """Schemas that use much of what there is: nested, recursive, with patterns, formats, ranges and alternatives."""
    rng = random.Random(11)
    kinds: list[Callable[[int], dict[str, Any]]] = [
        lambda depth: {"type": "string", "minLength": rng.randint(0, 4), "maxLength": rng.randint(5, 20)},
        lambda depth: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        lambda depth: {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 2.5, 100])},
        lambda depth: {"type": "boolean"},
        lambda depth: {"enum": rng.sample(["red", "green", 7, None, True, 'a"b', "ü", 2.5], rng.randint(1, 4))},
        lambda depth: {"const": rng.choice(["fixed", 3, None, {"a": [1, "b"]}])},
        lambda depth: {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(ab|c)+$", "^x[a-f]*y$"])},
        lambda depth: {"type": "string", "format": rng.choice(["date", "time", "date-time", "email", "ipv4", "uuid"])},
        lambda depth: {"type": ["integer", "null"]},
        lambda depth: {"type": "array", "items": kind(depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3},
        lambda depth: {
            "type": "array",
            "prefixItems": [kind(depth + 1), kind(depth + 1)],
            "items": False,
            "minItems": 2,
        },
        lambda depth: {"anyOf": [kind(depth + 1), kind(depth + 1)]},
        lambda depth: {"$ref": "#/$defs/node"},
        lambda depth: made_object(depth + 1),
    ]

    def kind(depth: int) -> dict[str, Any]:
        return rng.choice(kinds[:9] if depth > 3 else kinds)(depth)

    def made_object(depth: int) -> dict[str, Any]:
        names = rng.sample(["id", "name", "a b", "größe", "x.y", "items", "next", "0", "$"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: kind(depth) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }

    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    for _ in range(count):
        yield {**made_object(0), "$defs": {"node": node}}


def answers_to_hard_schemas(llm: ew.LLM, count: int) -> int:
    """The number of finished answers; each of these has to be valid."""
    schemas = list(hard_schemas(count))
    params = [
        SamplingParams(max_tokens=150, temperature=i % 3 * 0.6, seed=i, structured_outputs={"json": json.dumps(schema)})
        for i, schema in enumerate(schemas)
    ]
    prompts = [f"JSON that meets the schema {json.dumps(schema)[:600]}:\n" for schema in schemas]
    finished = 0
    for schema, result in zip(schemas, llm.generate(prompts, params), strict=True):
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "stop":
            finished += 1
            formats = jsonschema.Draft202012Validator.FORMAT_CHECKER  # the usual one has draft 3's times
            checker = jsonschema.Draft202012Validator(schema, format_checker=formats)
            checker.validate(json.loads(result.text))
    return finished


def test_finished_answers_to_hard_schemas_are_valid(llm: ew.LLM) -> None:
    assert answers_to_hard_schemas(llm, 12) >= 6


@pytest.mark.soak
def test_finished_answers_to_two_hundred_hard_schemas_are_valid(llm: ew.LLM) -> None:
    assert answers_to_hard_schemas(llm, 200) >= 120


@pytest.mark.soak
def test_a_sample_of_maskbench(smollm2_bundle: Path, repository: Path) -> None:
    import structured as benchmark

    folder = repository / "build" / "bench" / "maskbench"
    if not folder.exists():
        pytest.skip("build/bench/maskbench isn't there: maskbench/data of guidance-ai/jsonschemabench")
    options = argparse.Namespace(bundle=smollm2_bundle, maskbench=folder, schemas=300)
    figures = benchmark.schemas(options)
    assert figures["compiled"] > 200 and not figures["invalid_accepted"]
    assert figures["valid_rejected"] <= figures["instances"] // 200
    assert all(figures["reasons"])


def test_a_failure_of_the_masks_ends_requests_with_a_form_alone(llm: ew.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def unsafe_compute_mask_ptr(self, *given: object) -> None:
            raise MemoryError("no room")

        unsafe_compute_mask_ptr_with_draft_token = unsafe_compute_mask_ptr

    llm.generate("a", SamplingParams(max_tokens=1, structured_outputs={"regex": "a"}))
    grammars = llm._context.shared(generate._Maker)._grammars
    assert grammars is not None
    monkeypatch.setitem(grammars.__dict__, "_pool", Broken())
    params = [
        SamplingParams(max_tokens=5, speculate=False, structured_outputs={"json": SCHEMA}),
        SamplingParams(max_tokens=5),
    ]
    guided, plain = llm.generate(["Anna is"] * 2, params, raise_errors=False)
    assert guided.finish_reason == "error" and "no room" in str(guided.error)
    assert plain.error is None and len(plain.token_ids) == 5


def test_without_llguidance_the_error_says_what_to_install(llm: ew.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ew.MissingDependencyError, match=r"enginewright\[structured\]"):
        llm.generate("a", SamplingParams(structured_outputs={"regex": "a"}))


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ew.RequestError, match="no token that ends"):
        Grammars(byte_tokens_json([]), 256, [])
    assert structured.KINDS[0] == "json"
