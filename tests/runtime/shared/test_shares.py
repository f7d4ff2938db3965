"""A cache's budget holds for all owners together, and no owner loses its share to another."""

from __future__ import annotations

import random

from enginewright.runtime.shared.shares import Shares


def test_an_owner_within_its_share_loses_nothing_to_others() -> None:
    shares: Shares[int, str] = Shares(1000)
    assert shares.put(0, "mine", "a", 200)
    for i in range(1, 100):
        assert shares.put(i, "theirs", "b", 100)
    assert shares.get(0) == "mine"
    assert shares.bytes <= 1000 and shares.get(1) is None and shares.get(99) == "theirs"


def test_what_was_used_last_stays() -> None:
    shares: Shares[str, int] = Shares(1000)
    for name in "abcd":
        shares.put(name, 1, "", 250)
    assert shares.get("a") == 1
    shares.put("e", 1, "", 250)
    assert [name for name in "abcde" if shares.get(name)] == ["a", "c", "d", "e"]


def test_a_large_entry_is_not_kept_and_takes_its_key_s_older_one_with_it() -> None:
    shares: Shares[str, int] = Shares(1000)
    assert shares.put("a", 1, "", 250)
    assert not shares.put("a", 2, "", 251)
    assert shares.get("a") is None and shares.bytes == 0 and len(shares) == 0


def test_bytes_are_those_of_the_entries_that_are_there() -> None:
    rng = random.Random(1)
    shares: Shares[int, int] = Shares(5000)
    for _ in range(5000):
        key = rng.randrange(60)
        if rng.random() < 0.8:
            shares.put(key, size := rng.randrange(1, 1500), rng.choice("abc"), size)
        else:
            shares.pop(key)
        assert shares.bytes == sum(shares.get(key) or 0 for key in list(shares)) <= 5000
    assert len(shares) > 3
