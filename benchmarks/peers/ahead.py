"""Texts that every engine continues twice, greedily: with tokens that it computes ahead, and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

LAST = 3
"""Most tokens at the end of a text that OpenVINO looks up, as in its own sample."""


@dataclass(frozen=True)
class Answer:
    """``seconds`` from the first token to the last; ``steps`` of the model in that time; ``drafted``: tokens that were
    computed ahead, None where the engine doesn't count them."""

    tokens: list[int]
    seconds: float
    steps: int
    drafted: int | None = None


Ask = Callable[[list[int]], Answer]


@dataclass(frozen=True)
class Texts:
    """Prompts by name, in tokens, and how many tokens each answer has."""

    prompts: Mapping[str, list[int]]
    tokens: int

    @classmethod
    def read(cls, path: str | Path) -> Texts:
        """Reads what ``write`` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def context(self) -> int:
        """Tokens of the longest, with its answer."""
        return max(map(len, self.prompts.values())) + self.tokens

    def figures(self, plain: Ask, ahead: Ask) -> dict[str, float]:
        """Measures of each text: tokens a second ``off`` and ``on``; tokens that a step gives; ``same``: tokens of the
        answer before the first that differs; ``accepted``: those that no step of their own was needed for; ``drafted``,
        where that is known. Both are warm after the first."""
        warm = next(iter(self.prompts.values()))
        plain(warm), ahead(warm)
        values: dict[str, float] = {}
        for name, prompt in self.prompts.items():
            off, on = plain(prompt), ahead(prompt)
            if not len(off.tokens) == len(on.tokens) == self.tokens:
                raise ValueError(f"{name}: {len(off.tokens)} and {len(on.tokens)} tokens of {self.tokens}")
            more = self.tokens - 1
            differs = [a != b for a, b in zip(off.tokens, on.tokens, strict=True)]
            of = {"off": more / off.seconds, "on": more / on.seconds, "tokens_per_step": more / on.steps}
            of["same"] = differs.index(True) if any(differs) else self.tokens
            of["accepted"] = more - on.steps
            if on.drafted is not None:
                of["drafted"] = on.drafted
            values |= {f"{name}.{key}": float(value) for key, value in of.items()}
        return values
