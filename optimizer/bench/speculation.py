"""Measures speculative decoding on texts, compared with decoding without it.

The rest of a benchmark runs on random tokens, which have no repetitions that a proposer could use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.info import scheduler_config
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.outputs import RequestOutput
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.targets import MEASURED
from enginewright.runtime.text.tokenizer import Tokenizer

from .result import Speculation, SpeculationSpeed, Spread

TEXT = (
    "The harbour of Saint-Malo lies behind granite walls. In 1534 Jacques Cartier left it with two ships and "
    "sixty-one men, and reached the coast of Newfoundland after twenty days. We shall find a passage, he wrote, or we"
    " shall find that there is none. What he found was a river, wide as a sea, and people who called their village "
    "kanata. Two sons of their chief went back to France with him, and came home as guides in the next summer. They "
    "showed him the way to Stadacona, below a cliff where the water narrows, and from there he went on in boats to a "
    "mountain that he named Mont Royal. The winter was long, and a quarter of his crew died before the people of the "
    "village taught the others to boil the leaves of a white cedar."
)
"""The text to copy. It is longer than the timed answer, because tokens after the end of the copy can't be looked up."""
CODE = """class Vector:
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y, self.z - other.z)

    def __mul__(self, other):
"""
TASKS: Mapping[str, str] = {
    "copy": f"Repeat this text exactly.\n\n{TEXT}\n\nThe text again:\n\n{TEXT[:60]}",
    "edit": f"Replace every 'the' by 'a' in this text.\n\n{TEXT}\n\nThe new text:\n\n{TEXT[:60].replace('The', 'A')}",
    "code": CODE,
    "chat": "Write a short story about a lighthouse keeper and a storm.\n\n",
}
"""Name -> prompt. The answers of the first three contain much of their prompts."""

TOKENS = 128
_MEMORY = 256 << 20


def check_speculation(bundle: Bundle, target: str, speculate: str) -> None:
    """Checks that speculation can be measured.

    Raises RequestError if the target can't do it in the way ``speculate``, and BundleError without a tokenizer.
    """
    scheduler_config(1, None, False, None, speculate)
    if target != MEASURED:
        raise RequestError(
            f"speculate: the target {target} computes no tokens ahead",
            hint=f"Pass --target {MEASURED}.",
        )
    Tokenizer(bundle.tokenizer_files())


def measure_speculation(bundle: Bundle, speculate: str, rounds: int, threads: int) -> Speculation:
    """Times one greedy request for each of ``TASKS``, alternately with and without speculation.

    Each round has its own tenant, so that proposers don't find the answers of earlier rounds.

    Args:
        bundle: the bundle.
        speculate: as for ``LLM``.
        rounds: the number of pairs of timings.
        threads: threads of the kernels.
    """
    common: dict[str, Any] = {"target": MEASURED, "threads": threads, "memory": _MEMORY, "max_requests": 1}
    common["prefix_cache"] = False
    results = []
    with LLM(bundle.path, speculate=None, **common) as plain, LLM(bundle.path, speculate=speculate, **common) as ahead:
        for task, text in TASKS.items():
            prompt = plain.tokenizer.encode(text)
            most = min(TOKENS, plain.model.context_length - len(prompt))
            if most < 2:
                continue  # the context is too short
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            rates: dict[LLM, list[float]] = {plain: [], ahead: []}
            drafted = accepted = 0
            for number in range(rounds):
                for llm in (plain, ahead) if number % 2 else (ahead, plain):
                    (output,) = llm.generate([prompt], params, tenant=f"{task} {number}")
                    rates[llm].append(_rate(output))
                    drafted, accepted = drafted + output.metrics.drafted, accepted + output.metrics.accepted
            ratios = [on / off for on, off in zip(rates[ahead], rates[plain], strict=True)]
            speeds = Spread.from_values(rates[plain]), Spread.from_values(rates[ahead]), Spread.from_values(ratios)
            results.append(SpeculationSpeed(task, *speeds, drafted, accepted))
        return Speculation(speculate, tuple(results), ahead.info()["speculation"])


def _rate(output: RequestOutput) -> float:
    """Returns the tokens per second after the first one."""
    times = output.metrics
    assert times.first_token is not None and times.last_token is not None
    return (len(output.token_ids) - 1) / max(times.last_token - times.first_token, 1e-9)
