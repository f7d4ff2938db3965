"""Names of records: keyed hashes of everything that a block's keys and values depend on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from enginewright.runtime.requests.block_keys import Content, Item, Namespace, to_bytes

HASH_BYTES = 32


class RecordNames:
    """Names records by hashes (BLAKE2b, RFC 7693).

    Args:
        key: the key of the hashes.
        identity: see ``disk_tier.BlockMemory.cache_identity``.
    """

    def __init__(self, key: bytes, identity: bytes) -> None:
        self._key, self._identity = key, identity

    @property
    def key(self) -> bytes:
        """The key of the hashes."""
        return self._key

    def root(self, namespace: Namespace) -> bytes:
        """Returns the name of the empty prefix of a namespace (tenant and adapter), from which names of blocks are
        derived.
        """
        return self._hash("root", self._identity, *(part.encode() for part in namespace))

    def child(self, parent: bytes, items: Sequence[Item]) -> bytes:
        """Returns the name of the block with ``items`` after the block ``parent``."""
        return self._hash("block", parent, *to_bytes(items))

    def states(self, name: bytes) -> bytes:
        """Returns the name of the record with the states of recurrent layers at the end of the block ``name``."""
        return self._hash("states", name)

    def parts(self, parent: bytes, items: Sequence[Item]) -> list[bytes]:
        """Returns the possible names of records whose tokens end within the block after the block ``parent``.

        The name at index i is a hash of ``parent`` and of the first i + 1 of ``items``.
        """
        digest, names = self._keyed("part"), []
        digest.update(parent)
        for item in items:
            placeholder, content = item if isinstance(item, Content) else (item, b"")
            digest.update(struct.pack("<qq", placeholder, len(content)) + content)
            names.append(digest.copy().digest())
        return names

    def _hash(self, kind: str, *parts: bytes) -> bytes:
        digest = self._keyed(kind)
        for part in parts:
            digest.update(struct.pack("<q", len(part)))
            digest.update(part)
        return digest.digest()

    def _keyed(self, kind: str) -> hashlib.blake2b:
        return hashlib.blake2b(digest_size=HASH_BYTES, key=self._key, person=b"ew-" + kind.encode())
