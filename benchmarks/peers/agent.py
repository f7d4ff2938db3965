"""An agent's conversation: a long system prompt, then turns, each with what a tool gave back and the answer to it.

Every prompt begins with all that was said before, so an engine that keeps its prefix has little to compute. The
conversation is run once with an engine's prefix cache; then its prompts are asked again one by one, with the cache off.
The same prompts, so that the answers can be compared: a cache should change time, and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

Ask = Callable[[list[int]], tuple[list[int], float]]
"""A prompt's answer, greedy and of so many tokens as the conversation says, and when its first token was there, on
``time.perf_counter``."""

SYSTEM, TOOL, ANSWER, TURNS = 1500, 220, 48, 8
"""Tokens of the system prompt, of what a tool gives back, and of an answer; and how often a tool is asked."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in tokens; ``answer`` is the number of tokens of each answer."""

    system: list[int]
    tools: list[list[int]]
    answer: int = ANSWER

    @classmethod
    def of_text(cls, ids: Sequence[int], system: int = SYSTEM, tool: int = TOOL, turns: int = TURNS) -> Conversation:
        """Cut from the tokens of a text. Raises ValueError if it is too short."""
        if len(ids) < system + tool * turns:
            raise ValueError(f"{len(ids)} tokens, where {system + tool * turns} are needed")
        starts = range(system, system + tool * turns, tool)
        return cls(list(ids[:system]), [list(ids[at : at + tool]) for at in starts])

    @classmethod
    def read(cls, path: str | Path) -> Conversation:
        """Reads what ``write`` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def context(self) -> int:
        """Tokens at its end."""
        return len(self.system) + sum(map(len, self.tools)) + len(self.tools) * self.answer

    def figures(self, cached: Ask, plain: Ask) -> dict[str, float]:
        """Seconds of all turns, with the cache and without, in all and to the first tokens; the turns whose answer
        the cache changed."""
        prompts, answers, with_cache = [], [], [0.0, 0.0]
        prompt = list(self.system)
        for tool in self.tools:
            prompt = prompt + tool
            answer = _timed(cached, prompt, with_cache)
            prompts.append(prompt)
            answers.append(answer)
            prompt = prompt + answer
        without = [0.0, 0.0]
        again = [_timed(plain, prompt, without) for prompt in prompts]
        changed = sum(a != b for a, b in zip(answers, again, strict=True))
        names = ("with", "first_with", "without", "first_without")
        return {**dict(zip(names, with_cache + without, strict=True)), "changed": changed, "turns": len(prompts)}


def english() -> str:
    """Text that every Python brings: the pages of its ``help``."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def _timed(ask: Ask, prompt: list[int], seconds: list[float]) -> list[int]:
    start = time.perf_counter()
    answer, first = ask(prompt)
    seconds[0] += time.perf_counter() - start
    seconds[1] += first - start
    return answer
