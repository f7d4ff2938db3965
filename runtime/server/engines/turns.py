"""Caches the tokens of finished turns, so that the next request of a conversation has the same prompt tokens.

Tokenizing a generated text may give other tokens than those that the model generated; the prefix cache then finds
nothing after them. So the tokens of a conversation are cached with its text, by tenant and model. A later conversation
that begins with that text, answer included, gets these tokens, and only its rest is tokenized. Comparing the texts also
detects edited turns and templates that change earlier turns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...shared.shares import Shares

MOST_BYTES = 64 << 20
"""The most bytes of texts and token ids, of all tenants together."""
_TOKEN_BYTES = 8


@dataclass(frozen=True)
class Turn:
    """A conversation up to the end of an answer."""

    tenant: str
    text: str
    token_ids: Sequence[int]

    @property
    def bytes(self) -> int:
        return len(self.text) + _TOKEN_BYTES * len(self.token_ids)


class Turns:
    """The finished turns of one model; see the module.

    Args:
        ends: texts that end a turn, in the form of ``Tokenizer.guarded_chat``. Conversations are looked up at these
            ends.
        most_bytes: the most bytes of all turns. The tenant with the most bytes loses its least recently used turn
            first.
    """

    def __init__(self, ends: Sequence[str], most_bytes: int = MOST_BYTES) -> None:
        self._ends = re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)")
        self._turns: Shares[bytes, Turn] = Shares(most_bytes)

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, tenant: str, text: str, token_ids: Sequence[int]) -> None:
        """Stores the token ids of a conversation.

        ``text`` must end with one of ``ends``, as only such texts are looked up.
        """
        turn = Turn(tenant, text, tuple(token_ids))
        self._turns.put(self._key(tenant, text), turn, tenant.partition("\0")[0], turn.bytes)

    def encode(self, tenant: str, text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
        """Returns the token ids of a text, and the number of them that come from a cached turn.

        Args:
            tenant: name of the tenant.
            text: the text of a conversation.
            encode: converts a text to token ids: the whole text, or only its part from the end token of the cached turn
                on.
        """
        digest = hashlib.blake2b(tenant.encode() + b"\0", digest_size=32)
        longest: Turn | None = None
        begun = begin = 0
        for end in self._ends.finditer(text):
            digest.update(text[begun : end.end()].encode())
            begun = end.end()
            turn = self._turns.get(digest.digest())
            if turn is not None and turn.tenant == tenant and text.startswith(turn.text):
                longest, begin = turn, end.start()
        if longest is None:
            return encode(text), 0
        # Behind the token that ends a turn, as in the middle of a text: without the space before a first word.
        rest = encode(text[begin:])
        return [*longest.token_ids, *rest[1:]], len(longest.token_ids)

    def _key(self, tenant: str, text: str) -> bytes:
        digest = hashlib.blake2b(tenant.encode() + b"\0", digest_size=32)
        digest.update(text.encode())
        return digest.digest()
