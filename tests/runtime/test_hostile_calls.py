"""Anything may be passed anywhere: a call gives a result or a typed error, and requests of others keep their tokens.

Each case makes some hundred calls of the public API, in which one argument or a few are hostile, while a thread serves
requests of its own and compares every answer with what it was alone. What a caller's own object raises is the caller's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginewright as ew
from enginewright.runtime.shared.errors import EnginewrightError

CASES = 40
CALLS = 250


class MineError(Exception):
    """Raised by the caller's own objects."""


def _raise(*_: object, **__: object) -> Any:
    raise MineError


class Hostile:
    """Every method that somebody might call raises."""

    __repr__ = __str__ = __eq__ = __index__ = __len__ = __iter__ = __getitem__ = __float__ = __fspath__ = _raise
    __contains__ = __bool__ = __call__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __hash__ = object.__hash__


class LyingInt(int):
    """Is within any range; its methods raise."""

    __le__ = __lt__ = __ge__ = __gt__ = lambda *_: True  # type: ignore[assignment]
    __repr__ = __str__ = __add__ = __radd__ = __sub__ = _raise  # type: ignore[assignment]
    __hash__ = int.__hash__


class LyingFloat(float):
    __le__ = __lt__ = __ge__ = __gt__ = lambda *_: True  # type: ignore[assignment]
    __repr__ = __str__ = __hash__ = _raise  # type: ignore[assignment]


class LyingStr(str):
    __slots__ = ()
    encode = strip = lower = __repr__ = __str__ = _raise  # type: ignore[assignment]
    __hash__ = str.__hash__


class LyingPath:
    """A path of bytes that no file system has."""

    def __fspath__(self) -> bytes:
        return b"\xff\x00"


class LyingMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return _raise()

    def __iter__(self) -> Iterator[str]:
        return iter(["prompt", "prompt_token_ids", "role", "content", "ttft"])

    def __len__(self) -> int:
        return 1 << 40


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(2000):
        value = [value]
    return value


def _own() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def _breaks() -> Iterator[int]:
    yield 1
    raise MineError


PLAIN: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, False, 0, 1, 2, -1, -(2**31), 2**31, 2**32, 2**63, 2**64, -(2**63) - 1)),
    *(lambda v=v: v for v in (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e-50, 1e308, 3e38, float("nan"), float("inf"))),
    *(lambda v=v: v for v in (-float("inf"), 1j, "", " ", "a", "\ud800", "a\x00b", "\x1b[2J", "é", "𝄞" * 40)),
    *(lambda v=v: v for v in (b"a", bytearray(b"a"), memoryview(b"a"), (), {}, set(), {1}, frozenset("a"), range(3))),
    *(lambda v=v: v for v in (Decimal("NaN"), Decimal(1), Fraction(1, 3), Fraction(10**400), object, int, len, ...)),
    *(lambda v=v: v for v in ("9" * 400, "9" * 5000, "x" * 100_000, "word " * 30_000, "/" + "d" * 300, "../" * 2000)),
    *(lambda v=v: v for v in ("auto", "lookup", "fair", "default", "never", "512MiB", "1e9", "-1", "nan", "cpu")),
    *(lambda v=v: v for v in (10**5000, -(10**5000), [10**5000], {"a": 10**5000}, {10**5000: 1})),
    *(lambda v=v: v for v in ([], [None], [[]], [True], [-1], [2**40], [1.5], ["a"], [b"a"], [[1]], [{}], [1, "a"])),
    *(lambda v=v: v for v in ({3: 4}, {"a": 1}, {"prompt": None}, {"prompt": "\ud800"}, {1: -float("inf")}, {2: 1e9})),
    *(lambda v=v: v for v in ([{"role": "user", "content": "x"}], [{"role": 5}], [{"content": b"x"}], [{}, 5])),
]
MADE: list[Callable[[], Any]] = [
    *(lambda v=v: np.array(v) for v in (1, [], [1.5], [[1]], ["a"], [1, 2], [True], [float("nan")])),
    lambda: np.array([None, "a"], object),
    lambda: np.zeros((2, 3, 4)),
    *(lambda t=t: t(1) for t in (np.float16, np.float32, np.int8, np.uint64, np.bool_, np.str_, np.complex64)),
    lambda: np.float32("nan"),
    lambda: np.datetime64("2026-01-01"),
    *(lambda t=t: t() for t in (Hostile, LyingPath, LyingMapping, object, _deep, _own, _breaks)),
    lambda: LyingInt(3),
    lambda: LyingInt(10**30),
    lambda: LyingFloat("nan"),
    lambda: LyingStr("\ud800"),
    lambda: LyingStr("abc"),
    lambda: [LyingInt(5), LyingInt(10**30)],
    lambda: [Hostile()],
    lambda: {"role": Hostile()},
    lambda: iter([1, 2]),
    lambda: (i for i in "ab"),
    lambda: lambda **_: _raise(),
    lambda: type("T", (), {"__class__": property(_raise)})(),
    lambda: ew.SamplingParams,
    lambda: ew.SamplingParams(max_tokens=1),
    lambda: [ew.SamplingParams(max_tokens=1)],
    lambda: Path("a\x00b"),
    lambda: Path("/dev/null"),
]
VALUES = PLAIN + MADE
_NUMBERS: tuple[Any, ...] = (0, 1, 2, 3, 7, 100, 0.5, 1.0, 1.5, 0.01, 1e-50, 1e-320, 3e38, -1, -0.5, 2**31, 2**63)
_NUMBERS += (np.float32(0.3), np.int64(2), LyingInt(3), LyingFloat("nan"), Fraction(1, 2), 10**400, np.float16(1))
_IDS: tuple[Any, ...] = ([1, 2], [3], [2**31 - 1], [2**31], [10**30], list(range(90)), np.array([4, 5]), (7,), [0])
_TEXT: tuple[Any, ...] = ("a", ["a", "b"], ["a" * 4096], ["a" * 4097], ["x"] * 129, ["é"], ["\ud800"], LyingStr("a"))
LIKELY: dict[str, tuple[Any, ...]] = {
    "logit_bias": (
        {1: 5.0, 2: -float("inf")},
        {2**31 - 1: 1},
        dict.fromkeys(range(60), -10000.0),
        {LyingInt(3): 1},
        {1: 1e4},
    ),
    "allowed_token_ids": _IDS,
    "stop_token_ids": _IDS,
    "stop": _TEXT,
    "bad_words": (*_TEXT, [[1, 2], [3]], [[2**31]], ["w" * 1000] * 1000, ["abc"] * 1000, [[1] * 9000]),
    "early_stopping": (True, "never", LyingStr("never")),
    "tenant": ("a", "others", "x" * 1024, "x" * 1025, "\ud800", "a\x00b", LyingStr("others"), "é"),
    "request_class": ("quick", "batch", "default", None, "none", "\ud800"),
    "priority": (0, 1, -5, 2**31, 2**31 + 1, LyingInt(2), None),
    "layers": ([0], [-1], (1, 0), np.array([0]), [LyingInt(0)], [10**400], [0] * 1000),
    "classes": ({"default": {"ttft": 1e-320}}, {"default": {"ttft": "1us", "tpot": 1e-9}}, {"\ud800": {}}),
    "shares": ({"": 1e-320}, {"": 10**400}, {"": 1e-6}, {"\ud800": 1}, {"": LyingFloat("nan")}),
    "patience": (1e-320, 10**400, "9" * 400 + "s", 1e6, "0.5s"),
    "max_waiting": (0, 1, 10**400, LyingInt(-1)),
    "prefix_folder_days": (float("nan"), -1, 0, float("inf"), 10**400, 1e-320, 5, LyingFloat("nan")),
    "prefix_folder_size": (0, 1, "1KiB", "9" * 400, 10**5000, -1, LyingInt(10**30)),
    "prefix_memory": (0, 1, "1KiB", "9" * 400, 10**5000, -1, LyingInt(10**30), None),
    "offload_size": (0, 1, "1KiB", "9" * 400, 10**5000, -1, LyingInt(10**30)),
    "memory": ("9" * 400, 10**5000, "1MiB", "64KiB", 1, 0, LyingInt(1 << 20), 2**62, 2**63),
    "context": (0, 8, 64, 10**5000, LyingInt(64), -1),
    "anything": ({"a": 10**5000}, LyingStr("x"), float("nan")),
}
PROMPTS: tuple[Any, ...] = (
    "a text",
    "é𝄞",
    "\ud800",
    "",
    [5] * 40,
    [5, 6],
    [10**30],
    [2**31],
    {"prompt": "x"},
    ["a", [1]],
)
PROMPTS += (
    {"prompt_token_ids": [1, 2]},
    {"prompt": LyingStr("ab")},
    LyingStr("ab"),
    [LyingInt(4)],
    np.arange(5),
    [],
    [2**31],
)
SAMPLING = [field.name for field in fields(ew.SamplingParams)]
TERMS = ("tenant", "priority", "request_class")
TALK = [{"role": "user", "content": "hi"}]
OPTIONS = (
    *("target", "threads", "isa", "provider", "context", "memory", "max_requests", "prefill_chunk", "buckets"),
    *("prefix_cache", "speculate", "scheduling", "prefix_folder", "prefix_folder_size", "prefix_folder_days"),
    "prefix_memory",
    *("offload_folder", "offload_size", "verify", "load", "path"),
)
SCHEDULING = ("classes", "shares", "fair", "refuse", "max_waiting", "patience", "offline", "plan")


class Caller:
    """Makes calls by a seed."""

    def __init__(self, llm: ew.LLM, bundle: Path, folder: Path, seed: int) -> None:
        self.llm, self.bundle, self.folder = llm, bundle, folder
        self.rng = np.random.default_rng(seed)
        self.last = ""

    def value(self) -> Any:
        return VALUES[self.rng.integers(len(VALUES))]()

    def some(self, *names: str, most: int = 2) -> dict[str, Any]:
        """Hostile values for one of the names or more."""
        count = min(len(names), 1 + int(self.rng.integers(most) * self.rng.integers(2)))
        return {str(name): self.value_of(str(name)) for name in self.rng.choice(names, count, replace=False)}

    def value_of(self, name: str) -> Any:
        """Often one of a type that is near to the right one, so that it comes far."""
        near = LIKELY.get(name, _NUMBERS if name in SAMPLING or name in OPTIONS else ())
        return near[self.rng.integers(len(near))] if near and self.rng.random() < 0.85 else self.value()

    def params(self) -> Any:
        """Sampling parameters that were taken, or something else in their place."""
        if self.rng.random() < 0.1:
            return self.value()
        settings = {"max_tokens": 3} | self.some(*SAMPLING, most=3)
        return ew.SamplingParams(**settings)

    def call(self) -> None:
        """One; raises what it raises."""
        kinds = [name for name in dir(self) if name.startswith("call_")]
        self.last = str(self.rng.choice(kinds))
        getattr(self, self.last)()

    def prompt(self) -> Any:
        return self.value() if self.rng.random() < 0.3 else PROMPTS[self.rng.integers(len(PROMPTS))]

    def terms(self) -> dict[str, Any]:
        return self.some(*TERMS) if self.rng.random() < 0.5 else {}

    def small(self) -> ew.SamplingParams:
        return ew.SamplingParams(max_tokens=2)

    def call_sampling(self) -> None:
        self.llm.generate([[1, 2, 3]], self.params(), **self.terms())

    call_sampling_too = call_and_again = call_sampling

    def call_generate(self) -> None:
        more = self.some("progress", "use_tqdm", "raise_errors", "sampling_params") if self.rng.random() < 0.3 else {}
        self.llm.generate(self.prompt(), None if "sampling_params" in more else self.small(), **self.terms(), **more)

    def call_terms(self) -> None:
        self.llm.generate([[1, 2, 3]], self.small(), **self.some(*TERMS))

    def call_agenerate(self) -> None:
        asyncio.run(self.llm.agenerate(self.prompt(), self.small(), **self.terms()))

    def call_chat(self) -> None:
        talk = self.value() if self.rng.random() < 0.5 else TALK
        names = ("tools", "documents", "chat_template", "chat_template_kwargs", "continue_final_message", "anything")
        self.llm.chat(talk, self.small(), **self.terms(), **self.some(*names))

    def call_achat(self) -> None:
        asyncio.run(self.llm.achat(self.value(), self.small(), **self.terms()))

    def call_stream(self) -> None:
        list(self.llm.stream(self.prompt(), self.params(), **self.terms()))

    def call_stream_chat(self) -> None:
        list(self.llm.stream_chat(self.value(), self.small(), **self.terms()))

    def call_astream(self) -> None:
        async def collect() -> None:
            async for _ in self.llm.astream(self.prompt(), self.params(), **self.terms()):
                pass

        asyncio.run(collect())

    def call_a_stream_that_is_left(self) -> None:
        pieces = self.llm.stream([1, 2, 3], self.params(), **self.terms())
        next(pieces, None)
        pieces.close()

    def call_logits(self) -> None:
        self.llm.logits(self.prompt())

    def call_hidden_states(self) -> None:
        self.llm.hidden_states(self.prompt(), **self.some("layers"))

    def call_prefixes(self) -> None:
        folder = self.folder / "saved" if self.rng.random() < 0.6 else self.value()
        name = str(self.rng.choice(["save_prefix", "load_prefix"]))
        getattr(self.llm, name)(self.prompt(), folder, **(self.some("tenant") if self.rng.random() < 0.5 else {}))

    def call_delete_prefixes(self) -> None:
        self.llm.delete_prefixes(**self.some("tenant"))

    def call_default_params(self) -> None:
        self.llm.default_params(**self.some(*SAMPLING))

    def call_tokenizer(self) -> None:
        tokenizer = self.llm.tokenizer
        name = str(self.rng.choice(["encode", "decode", "encode_chat", "render_chat", "chat_template"]))
        getattr(tokenizer, name)(self.value())

    def call_open(self) -> None:
        options: dict[str, Any] = {"path": self.bundle, "memory": "1MiB", "threads": 1} | self.some(*OPTIONS)
        with ew.LLM(**options) as llm:
            llm.generate([[1, 2]], self.small())

    def call_scheduling(self) -> None:
        options = self.some(*SCHEDULING)
        if self.rng.random() < 0.2:
            options = {str(self.rng.choice(SCHEDULING)): {"default": self.value(), "": 1}}
        with ew.LLM(self.bundle, memory="1MiB", threads=1, scheduling=options) as llm:
            llm.generate([[1, 2]], self.small())


class Others:
    """Requests that run all the time, each of which has the tokens that it has alone."""

    def __init__(self, llm: ew.LLM) -> None:
        self._llm = llm
        self._prompts = [[i, i + 1, i + 2] * (1 + i % 5) for i in range(1, 9)]
        self._params = [
            ew.SamplingParams(max_tokens=12, temperature=i % 2, seed=i, logprobs=i % 3, ignore_eos=True)
            for i in range(len(self._prompts))
        ]
        self._alone = [llm.generate([p], one)[0] for p, one in zip(self._prompts, self._params, strict=True)]
        self._stopped = threading.Event()
        self.rounds, self.wrong = 0, list[object]()

    def run(self) -> None:
        while not self._stopped.is_set() and not self.wrong:
            try:
                results = self._llm.generate(self._prompts, self._params, tenant="others")
            except BaseException as e:  # noqa: BLE001  nothing may end them
                self.wrong.append(e)
                return
            self.wrong += [(one, of) for one, of in zip(results, self._alone, strict=True) if one != of]
            self.rounds += 1

    def __enter__(self) -> Others:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.mark.parametrize("case", range(CASES))
def test_any_call_gives_a_result_or_a_typed_error(
    case: int, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is taken for the name of a folder is made here
    classes = {"quick": {"ttft": "50ms", "tpot": "20ms"}, "batch": {"priority": 1}}
    options: list[dict[str, Any]] = [{}, {"scheduling": {"classes": classes, "shares": {"a": 2}, "refuse": False}}]
    opened = ew.LLM(
        tiny_bundle, memory="1MiB", threads=1, max_requests=6, prefix_folder=tmp_path / "kept", **options[case % 2]
    )
    with opened as llm, Others(llm) as others:
        caller, done = Caller(llm, tiny_bundle, tmp_path, case), {"ok": 0, "typed": 0, "theirs": 0}
        for number in range(CALLS):
            unforeseen = False
            try:
                caller.call()
                done["ok"] += 1
            except EnginewrightError as e:
                unforeseen = "the engine failed" in str(e) or "it failed in the engine" in str(e)
                done["typed"] += 1
            except MineError:
                done["theirs"] += 1
            except Exception as e:
                raise AssertionError(f"case {case}, call {number}, {caller.last}: {e!r}") from e
            assert not unforeseen and not others.wrong, (number, caller.last, others.wrong)
        assert sum(done.values()) == CALLS and min(done["ok"], done["typed"]) > CALLS // 20, done
    assert not others.wrong and others.rounds
