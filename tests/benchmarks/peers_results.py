"""Results that engines might have measured."""

from __future__ import annotations

from pathlib import Path

from peers.engines import Format
from peers.prepare import Contender
from peers.processes import Command
from peers.rounds import Measured


def contender(engine: str, model: str = "smollm2", kind: Format = "int8") -> Contender:
    return Contender(engine, model, kind, Command(Path("python"), engine), Path(f"{engine}.bin"))


def measured(engine: str, *rounds: dict[str, float], peak: int = 100) -> Measured:
    return Measured(contender(engine), f"{engine} 1.0", "defaults", list(rounds), {"peak": peak})
