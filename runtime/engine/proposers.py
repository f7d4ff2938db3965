"""The table of proposers, and ``open_proposers``, which makes the list that ``LLM`` passes to its engine."""

from __future__ import annotations

from collections.abc import Callable

from ..requests.lookup import ForcedTokens, OwnText, PastAnswers
from ..requests.proposers import Proposer
from .draft_model import open_draft
from .proposer_setup import ProposerSetup

PROPOSERS: dict[str, Callable[[ProposerSetup], Proposer | None]] = {
    ForcedTokens.name: lambda setup: ForcedTokens(),
    OwnText.name: lambda setup: OwnText(),
    PastAnswers.name: lambda setup: PastAnswers(),
    "model": open_draft,
}
"""Name of a proposer -> the function that opens it, or returns None if the settings don't ask for it.

Of equal proposals, that of the first row is used.
"""


def open_proposers(setup: ProposerSetup) -> tuple[tuple[Proposer, ...], int | None]:
    """Opens the proposers of a model; returns them, and the memory that they leave for the KV cache.

    If one can't be opened, the earlier ones are closed and the error is raised.
    """
    if setup.config.speculate is False:
        return (), setup.memory
    opened: list[Proposer] = []
    try:
        for open_one in PROPOSERS.values():
            if (proposer := open_one(setup)) is not None:
                opened.append(proposer)
                setup = setup.after(proposer)
    except BaseException:
        for proposer in opened:
            proposer.close()
        raise
    return tuple(opened), setup.memory
