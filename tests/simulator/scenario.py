"""A scenario: what is served, by what, and what goes wrong. A seed gives one; it can be kept as JSON and made smaller.

Seeds are swarms (Groce et al., ISSTA 2012): each leaves most features out, so that those that it has come often and
meet each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from enginewright.runtime.requests.sampling import sample_seed

from .model import LETTERS, POISON, RECURRENT

Kind = Literal["generate", "score", "hidden", "load", "save", "delete"]


@dataclass(frozen=True)
class Ask:
    """A call of a client.

    Attributes:
        at: the tick in which it comes: a tick is a step of the engine.
        kind: "load", "save" and "delete" are ``load_prefix``, ``save_prefix`` and ``delete_prefixes``.
        form: one of ``grammars.FORMS``; "" for none.
        abort: ticks after which the client gives it up; -1 for never.
        deaf: pieces after which its listener raises; -1 for never.
        folder: of "load" and "save", which folder.
        other fields: as in ``SamplingParams``.
    """

    at: int
    kind: Kind = "generate"
    prompt: tuple[int, ...] = (97,)
    new_tokens: int = 4
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    beams: int = 1
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    form: str = ""
    logprobs: int = -1
    prompt_logprobs: bool = False
    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition: bool = False
    frequency: bool = False
    ignore_eos: bool = False
    tenant: str = ""
    priority: int = 0
    request_class: str = ""
    speculate: bool = True
    abort: int = -1
    deaf: int = -1
    folder: int = 0

    def seed_of(self, sample: int) -> int:
        """The seed of one of its samples."""
        return sample_seed(self.seed, sample)

    @property
    def most_tokens(self) -> int:
        """Most tokens that one of its sequences has."""
        return len(self.prompt) + self.new_tokens


@dataclass(frozen=True)
class Setup:
    """An engine, what runs its steps, and its machine.

    Attributes:
        blocks, windows: of each group of keys and values; a model without attention has none.
        states: of each recurrent group, how many states there are.
        layout: of the caches: "shared" blocks, "plain" ones, "phases" (plain, one phase a step), or "slots".
        buckets: whether steps are padded to a plan's sizes.
        in_flight, chains, owners, verifies, masks: as in ``ExecutorCaps``.
        runs_seconds: as in ``SchedulerConfig``, on executors that take steps with several runs; 0 for others.
        draft: the draft model: "" for none; "right", "mixed" or "wrong".
        scheduling: see ``SCHEDULING``.
        disk: whether there is a ``prefix_folder``.
        host: memory for copies of evicted blocks, as a share of the pools; 0 for none.
        disk_fails, disk_seconds: of 16 reads or writes how many fail; and what a read takes.
        habit: see ``Model``.
        late, late_masks: of 16 steps or masks, how many are computed as late as possible.
        seconds: of a step: each, for each row that decodes, token of a prompt, and token that is seen.
        noise: share by which a step takes more or less.
    """

    seed: int = 0
    blocks: tuple[int, ...] = (24,)
    windows: tuple[int, ...] = (0,)
    states: tuple[int, ...] = ()
    block_size: int = 8
    layout: Literal["shared", "plain", "phases", "slots"] = "shared"
    buckets: bool = False
    in_flight: int = 1
    chains: bool = False
    owners: int = 1
    verifies: bool = False
    masks: bool = True
    runs_seconds: float = 0.0
    max_requests: int = 4
    prefill_tokens: int = 32
    prefill_chunk: int = 0
    prefix_cache: bool = True
    speculate: bool = False
    draft: str = ""
    scheduling: str = ""
    disk: bool = False
    disk_fails: int = 0
    disk_seconds: float = 1e-4
    habit: int = 8
    late: int = 8
    late_masks: int = 8
    seconds: tuple[float, float, float, float] = (3e-3, 5e-4, 4e-4, 1e-6)
    noise: float = 0.05
    host: float = 0.0

    @property
    def all_windows(self) -> tuple[int, ...]:
        """The window of each group of keys and values; then RECURRENT for each recurrent one."""
        return *self.windows, *(RECURRENT for _ in self.states)

    @property
    def all_blocks(self) -> tuple[int, ...]:
        """The blocks of each group."""
        return *self.blocks, *self.states


@dataclass(frozen=True)
class Trouble:
    """A helper raises.

    Attributes:
        helper: see ``troubles.HELPERS``.
        call: which of its calls raises, from 0 on.
        often: whether later ones do, too.
    """

    helper: str
    call: int
    often: bool = False


@dataclass(frozen=True)
class Scenario:
    """A scenario as the module describes it.

    Attributes:
        faults: the number of a step, and its fault; see ``SimulatedExecutor``.
    """

    setup: Setup
    asks: tuple[Ask, ...]
    faults: tuple[tuple[int, str], ...] = ()
    troubles: tuple[Trouble, ...] = ()
    profile: str = ""

    def to_json(self) -> dict[str, Any]:
        """Only what isn't a default."""
        return {
            "profile": self.profile,
            "setup": _said(self.setup),
            "asks": [_said(ask) for ask in self.asks],
            "faults": [list(one) for one in self.faults],
            "troubles": [_said(one) for one in self.troubles],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scenario:
        """Reads the output of ``to_json``."""
        return cls(
            Setup(**_tuples(data["setup"])),
            tuple(Ask(**_tuples(one)) for one in data["asks"]),
            _tuples(data["faults"]),
            tuple(Trouble(**one) for one in data["troubles"]),
            data["profile"],
        )

    def __str__(self) -> str:
        return json.dumps(self.to_json(), indent=1)


def _said(record: Any) -> dict[str, Any]:
    """Fields that aren't as their defaults."""
    plain = asdict(record)
    return {one.name: plain[one.name] for one in fields(record) if one.name == "at" or plain[one.name] != one.default}


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


PROFILES = {
    "mixed": 5,
    "pipeline": 4,
    "estimator": 2,
    "guided": 3,
    "beams": 4,
    "prefixes": 4,
    "offload": 1,
    "slots": 2,
    "drafts": 3,
    "ranks": 1,
    "faults": 2,
    "helpers": 2,
}
"""The subject of a seed -> its frequency: see ``_Maker``."""

SCHEDULING: dict[str, dict[str, Any]] = {
    "priority": {},
    "fair": {"fair": True},
    "shares": {"shares": {"a": 3.0}},
    "classes": {
        "classes": {"chat": {"ttft": 0.1, "tpot": 0.01}, "slow": {"ttft": 1.0}, "batch": {"priority": 1}},
        "refuse": False,
    },
    "strict": {"classes": {"chat": {"ttft": 0.1, "tpot": 0.01}, "batch": {"priority": 1}}, "max_waiting": 3},
    "offline": {"offline": True},
}
"""Options of ``Scheduling``, by the names that setups have."""

_OF_STEPS = ("error", "dies")


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    profile = rng.choices(list(PROFILES), list(PROFILES.values()))[0]
    return _Maker(seed, rng, profile).make()


@dataclass
class _Maker:
    seed: int
    rng: random.Random
    profile: str
    stems: list[tuple[int, ...]] = field(default_factory=list)

    def make(self) -> Scenario:
        setup = getattr(self, f"_for_{self.profile}", self._any)()
        setup = replace(setup, seed=self.seed & 0xFFFFFFFF)
        rng = self.rng
        longest = self._longest(setup)
        many = longest > 100
        letters = LETTERS[: rng.choice((2, 4, 16))]
        self.stems = [
            tuple(rng.choice(letters) for _ in range(rng.randint(4, max(4, longest // 2))))
            for _ in range(rng.randint(1, 3))
        ]
        asks = []
        at = 0
        if self.profile == "estimator":
            asks, at = self._only_prompts(setup, longest)
        for _ in range(rng.randint(1, 2) if many else rng.randint(2, 6)):
            at += rng.choice((0, 0, 0, 1, 2, 5, 12))
            asks.append(self._ask(setup, at, longest))
        if self.profile == "pipeline" and setup.scheduling and rng.random() < 0.6:
            asks += self._urgent(at, longest)
        asks += self._calls(setup, asks)
        asks.sort(key=lambda one: one.at)
        faults = self._faults(setup, at)
        troubles = self._troubles() if self.profile == "helpers" else ()
        setup = self._with_chains(setup)
        setup = self._with_host(self._with_states(setup, max(ask.beams for ask in asks)))
        setup, asks = self._with_runs(setup, asks)
        return Scenario(setup, tuple(asks), faults, troubles, self.profile)

    # Setups

    def _any(self) -> Setup:
        rng = self.rng
        windows = rng.choice(((0,), (0,), (0,), (9,), (0, 6), (0, 13, 6), (5, 0)))
        size = rng.choice((4, 8, 8))
        layout = rng.choice(("shared", "shared", "shared", "shared", "plain", "phases"))
        blocks = tuple(rng.randint(9, 26) * 8 // size for _ in windows)
        verifies = rng.random() < 0.5
        return Setup(
            blocks=blocks,
            windows=windows if layout == "shared" else (0,) * len(windows),
            block_size=size,
            layout=layout,
            in_flight=rng.choice((1, 1, 1, 2, 3)),
            verifies=verifies,
            masks=rng.random() < 0.8,
            max_requests=rng.choice((1, 2, 4, 4, 8)),
            prefill_tokens=rng.choice((5, 16, 32, 64)),
            prefill_chunk=rng.choice((0, 0, 0, 4, 7)),
            prefix_cache=rng.random() < 0.75,
            speculate=verifies and rng.random() < 0.7,
            scheduling=rng.choice(("", "", "", *SCHEDULING)),
            habit=rng.choice((0, 8, 12, 14)),
            late=rng.choice((0, 8, 16)),
            late_masks=rng.choice((0, 8, 16)),
            seconds=(
                rng.choice((0.0, 1e-3, 4e-3)),
                rng.choice((1e-5, 5e-4)),
                rng.choice((1e-4, 4e-4)),
                rng.choice((0.0, 1e-6)),
            ),
            noise=rng.choice((0.0, 0.05, 0.5)),
        )

    def _for_pipeline(self) -> Setup:
        setup = self._any()
        return replace(
            setup,
            in_flight=self.rng.choice((2, 2, 3, 4)),
            max_requests=self.rng.choice((1, 2, 4, 8)),
            scheduling=self.rng.choice(("", "priority", "priority", "fair", "classes")),
        )

    def _for_estimator(self) -> Setup:
        setup = self._any()
        return replace(setup, scheduling=self.rng.choice(tuple(SCHEDULING)), layout="shared", in_flight=1, noise=0.05)

    def _for_guided(self) -> Setup:
        setup = self._any()
        return replace(setup, verifies=True, speculate=True, in_flight=1, habit=12)

    def _for_beams(self) -> Setup:
        setup = self._any()
        return replace(setup, layout="shared", masks=True, max_requests=8, in_flight=self.rng.choice((1, 1, 2)))

    def _for_prefixes(self) -> Setup:
        setup = self._any()
        rng = self.rng
        return replace(
            setup,
            layout="shared",
            prefix_cache=True,
            disk=rng.random() < 0.6,
            disk_fails=rng.choice((0, 0, 2, 8)),
            disk_seconds=rng.choice((1e-6, 1e-4, 1e-2)),
        )

    def _for_offload(self) -> Setup:
        return replace(self._any(), layout="shared", in_flight=1)

    def _for_slots(self) -> Setup:
        setup, rng = self._any(), self.rng
        kind = rng.choice(("slots", "slots", "phases", "plain", "shared"))
        size = 64 if kind == "slots" else setup.block_size
        blocks = (rng.randint(2, 5),) * len(setup.windows) if kind == "slots" else setup.blocks
        return replace(
            setup,
            layout=kind,
            windows=setup.windows if kind == "shared" else (0,) * len(setup.windows),
            block_size=size,
            blocks=blocks,
            buckets=rng.random() < 0.7,
            in_flight=1,
        )

    def _for_drafts(self) -> Setup:
        setup, rng = self._any(), self.rng
        return replace(
            setup,
            verifies=True,
            speculate=True,
            draft=rng.choice(("", "right", "mixed", "wrong")),
            in_flight=1,
            habit=rng.choice((8, 12, 15)),
        )

    def _for_ranks(self) -> Setup:
        setup, rng = self._any(), self.rng
        windows = rng.choice(((0,), (0, 90)))
        return replace(
            setup,
            layout="shared",
            windows=windows,
            blocks=(rng.choice((16, 24)),) * len(windows),
            block_size=128,
            owners=2,
            in_flight=rng.choice((1, 2)),
            prefill_tokens=512,
            prefill_chunk=0,
        )

    def _with_chains(self, setup: Setup) -> Setup:
        """Has the steps of some executors follow each other without the host. It draws by itself, as below.

        Most of them have no drafts, with which the scheduler leaves that out.
        """
        rng = random.Random(self.seed ^ 0xC4A15)
        if setup.layout not in ("shared", "plain") or setup.owners > 1 or setup.buckets or self.profile == "offload":
            return setup
        if rng.random() < 0.65:
            return setup
        speculate = setup.speculate and (self.profile == "drafts" or rng.random() < 0.2)
        return replace(setup, chains=True, in_flight=2, speculate=speculate)

    def _with_states(self, setup: Setup, beams: int) -> Setup:
        """Gives some models recurrent layers and a folder, and takes other layers away from some of those.

        It draws by itself: what else a seed says is the same with these layers and without.
        """
        rng = random.Random(self.seed ^ 0x57A7E)
        if setup.layout != "shared" or setup.owners > 1 or setup.buckets or self.profile == "offload":
            return setup
        if rng.random() < 0.6:
            return setup
        many = 2 * setup.max_requests
        states = tuple(
            max(beams, rng.choice((many, many, many + 8, setup.max_requests, setup.max_requests + 1, 2)))
            for _ in range(rng.choice((1, 1, 2)))
        )
        setup = replace(setup, states=states, **{"blocks": (), "windows": ()} if rng.random() < 0.15 else {})
        if not setup.prefix_cache or rng.random() < 0.5:
            return setup
        return replace(setup, disk=True, disk_fails=rng.choice((0, 0, 0, 2)), disk_seconds=rng.choice((1e-6, 1e-4)))

    def _with_host(self, setup: Setup) -> Setup:
        """Gives some executors main memory for copies of blocks. It draws by itself, as above."""
        rng = random.Random(self.seed ^ 0x4057)
        if setup.layout != "shared" or not setup.prefix_cache or self.profile == "offload" or rng.random() < 0.7:
            return setup
        return replace(setup, host=rng.choice((0.3, 1.0, 3.0)))

    def _with_runs(self, setup: Setup, asks: list[Ask]) -> tuple[Setup, list[Ask]]:
        """Has the steps of some executors run several times, and few of their asks want log-probabilities, which keep
        steps from that. It draws by itself, as above.
        """
        rng = random.Random(self.seed ^ 0x9045)
        if setup.in_flight > 1 or setup.buckets or setup.states or rng.random() < 0.4:
            return setup, asks
        speculate = setup.speculate and (self.profile == "drafts" or rng.random() < 0.5)
        setup = replace(setup, runs_seconds=rng.choice((1e-2, 1e9, 1e9)), speculate=speculate)
        return setup, [ask if rng.random() < 0.2 else replace(ask, logprobs=-1) for ask in asks]

    # Requests

    def _longest(self, setup: Setup) -> int:
        """Most tokens of a request, so that each fits alone."""
        if setup.layout == "slots":
            return 60
        if setup.owners > 1:
            return 900
        return min(56, min(setup.blocks) * setup.block_size - setup.block_size)

    def _prompt(self, longest: int) -> tuple[int, ...]:
        rng = self.rng
        stem = rng.choice(self.stems)
        cut = stem[: rng.randint(1, len(stem))] if rng.random() < 0.5 else stem
        more = rng.randint(0, max(0, longest - len(cut)) // (1 if rng.random() < 0.2 else 3))
        return (*cut, *(rng.choice(LETTERS) for _ in range(more)))[:longest] or (97,)

    def _ask(self, setup: Setup, at: int, longest: int) -> Ask:
        rng = self.rng
        prompt = self._prompt(longest - 4)
        new = rng.randint(1, max(1, min(longest - len(prompt), rng.choice((3, 8, 20)))))
        ask = Ask(
            at,
            prompt=prompt,
            new_tokens=new,
            temperature=rng.choice((0.0, 0.0, 1.0)),
            seed=rng.randrange(1 << 32),
            logprobs=rng.choice((-1, 0, 0, 2)),
            tenant=rng.choice(("", "", "a", "b")),
            priority=rng.choice((0, 0, 0, 1, 2)),
            abort=rng.randint(0, 20) if rng.random() < 0.15 else -1,
            deaf=rng.randint(0, 6) if rng.random() < 0.04 else -1,
            speculate=rng.random() < 0.9,
            ignore_eos=rng.random() < 0.3,
        )
        if setup.scheduling in ("classes", "strict"):
            ask = replace(ask, request_class=rng.choice(tuple(SCHEDULING[setup.scheduling]["classes"])))
        kind = rng.random()
        if (self.profile == "guided" and kind < 0.7) or kind < 0.08:
            ask = self._with_form(ask)
        if self._may_beam(setup) and (rng.random() < (0.6 if self.profile == "beams" else 0.06)):
            return self._with_beams(setup, ask, longest)
        if ask.temperature and rng.random() < 0.2:
            ask = replace(ask, n=rng.randint(2, 3))
        if rng.random() < 0.12:
            ask = self._with_rules(ask)
        if rng.random() < 0.06:
            ask = replace(ask, prompt_logprobs=True, logprobs=1)
        elif rng.random() < 0.05:
            ask = Ask(at, rng.choice(("score", "hidden")), prompt, tenant=ask.tenant, abort=ask.abort)
        if rng.random() < (0.1 if self.profile == "faults" else 0.01):
            place = rng.randrange(len(ask.prompt))
            ask = replace(ask, prompt=(*ask.prompt[:place], POISON, *ask.prompt[place + 1 :]))
        return ask

    @staticmethod
    def _may_beam(setup: Setup) -> bool:
        return setup.layout == "shared" and setup.owners == 1 and setup.max_requests > 1

    def _with_form(self, ask: Ask) -> Ask:
        form = self.rng.choice(("words", "letters", "copy", "json", "digit", "steep", "steep"))
        if form == "steep" and len(ask.prompt) >= 8:  # what looks like a repetition leads to where it is steep
            stem = ask.prompt[: len(ask.prompt) // 2 - 1]
            ask = replace(ask, prompt=(*stem, 104, 104, *stem))
        return replace(ask, form=form, new_tokens=max(ask.new_tokens, self.rng.choice((1, 8, 16))))

    def _with_beams(self, setup: Setup, ask: Ask, longest: int) -> Ask:
        rng = self.rng
        beams = rng.randint(2, min(4, setup.max_requests))
        room = min(blocks * setup.block_size for blocks in setup.blocks) // beams - setup.block_size
        prompt = ask.prompt[: max(1, room // 2)]
        ask = replace(
            ask,
            prompt=prompt,
            beams=beams,
            temperature=0.0,
            new_tokens=max(1, min(room - len(prompt), rng.choice((3, 8, 14)))),
            early_stopping=rng.choice((False, True, "never")),
            length_penalty=rng.choice((1.0, 0.0, 2.0)),
            form="",
            logprobs=-1,
            deaf=-1,
        )
        if setup.masks and rng.random() < 0.6:
            form = rng.choice(("words", "letters", "copy", "json", "digit"))
            ask = replace(ask, form=form)
        return ask

    def _with_rules(self, ask: Ask) -> Ask:
        rng = self.rng
        rule = rng.randrange(5)
        if rule == 0:
            return replace(ask, min_tokens=rng.randint(1, ask.new_tokens))
        if rule == 1:
            return replace(ask, allowed=tuple(rng.sample(LETTERS, rng.choice((1, 3)))))
        if rule == 2:
            words = tuple(tuple(rng.choice(LETTERS[:4]) for _ in range(rng.randint(1, 2))) for _ in range(3))
            return replace(ask, bad_words=words)
        return replace(ask, repetition=True) if rule == 3 else replace(ask, frequency=True)

    def _only_prompts(self, setup: Setup, longest: int) -> tuple[list[Ask], int]:
        """Many requests of one token; then answers; then both."""
        rng = self.rng
        asks, at = list[Ask](), 0
        for _ in range(rng.randint(12, 14)):
            asks.append(Ask(at, prompt=self._prompt(longest // 2), new_tokens=1, seed=rng.randrange(1 << 32)))
            at += rng.choice((1, 1, 2))
        at += 3
        room = longest - 10
        asks.append(Ask(at, prompt=self._prompt(8), new_tokens=max(1, min(44, room)), ignore_eos=True))
        at += 18
        for _ in range(rng.randint(4, 10)):
            asks.append(Ask(at, prompt=self._prompt(longest // 2), new_tokens=1, seed=rng.randrange(1 << 32)))
            at += 1
        return asks, at

    def _urgent(self, last: int, longest: int) -> list[Ask]:
        """Requests of one step that go before all others."""
        rng = self.rng
        return [
            Ask(rng.randint(2, last + 20), prompt=self._prompt(longest // 3), new_tokens=1, priority=-1)
            for _ in range(rng.randint(1, 5))
        ]

    def _calls(self, setup: Setup, asks: list[Ask]) -> list[Ask]:
        """Prefixes that are written to folders and read from them."""
        rng = self.rng
        often = {"prefixes": 0.7, "beams": 0.6}.get(self.profile, 0.1)
        if setup.layout != "shared" or not setup.prefix_cache or rng.random() > often:
            return []
        calls = list[Ask]()
        last = max(ask.at for ask in asks)
        for _ in range(rng.randint(1, 2)):
            ask = rng.choice(asks)
            prompt = ask.prompt if POISON not in ask.prompt else (97,) * 20
            at = rng.randint(0, last)
            calls.append(Ask(at, "save", prompt, 1, tenant=ask.tenant, folder=rng.randrange(2)))
        for _ in range(rng.randint(1, 5)):
            saved = rng.choice(calls)
            at = saved.at + rng.randint(1, 30)
            calls.append(Ask(at, "load", saved.prompt, 1, tenant=saved.tenant, folder=saved.folder))
        if rng.random() < 0.2:
            calls.append(Ask(rng.randint(0, last + 10), "delete", tenant=rng.choice(("", "a"))))
        return calls

    # What goes wrong

    def _faults(self, setup: Setup, last: int) -> tuple[tuple[int, str], ...]:
        rng = self.rng
        if self.profile == "offload":
            names: tuple[str, ...] = ("lost", "lost", "lost", "full")
            count = rng.randint(1, 5)
        elif self.profile == "faults":
            names, count = _OF_STEPS, rng.randint(1, 2)
        else:
            return ()
        return tuple(sorted((rng.randint(0, last + 25), rng.choice(names)) for _ in range(count)))

    def _troubles(self) -> tuple[Trouble, ...]:
        from .troubles import HELPERS

        rng = self.rng
        return tuple(
            Trouble(rng.choice(tuple(HELPERS)), rng.choice((0, 1, 3, 8)), rng.random() < 0.4)
            for _ in range(rng.randint(1, 3))
        )
