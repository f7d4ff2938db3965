"""A folder returns blocks as they were written, bit for bit, or not at all."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.kv_cache import block_store
from enginewright.runtime.kv_cache.block_store import BlockStore
from enginewright.runtime.requests.block_keys import Namespace

TOKENS = tuple(range(32))
SIZES = (700, 64)
WHO = Namespace("someone")


def payloads(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in SIZES]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Opens the same folder, with the same key; all are closed after the test."""
    stores: list[BlockStore] = []

    def make(identity: bytes = b"model", *, close_others: bool = True, **more: Any) -> BlockStore:
        while close_others and stores:
            stores.pop().close()
        options = {"most_bytes": 1 << 20, "key_file": tmp_path / "keys" / "key"} | more
        stores.append(BlockStore(tmp_path / "kept", identity, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def put(store: BlockStore, count: int = 1, who: Namespace = WHO) -> list[bytes]:
    """A prefix of so many blocks; their names."""
    names, name = [], store.root(who)
    for i in range(count):
        name = store.child(name, TOKENS)
        names.append(name)
        store.write(name, who, TOKENS, payloads(i), wait=True)
    store.flush()
    return names


def file_of(store: BlockStore, name: bytes) -> Path:
    return next(store.folder.glob(f"*{name.hex()}.kv"))


def same(found: list[Any] | None, seed: int) -> bool:
    return found is not None and all(np.array_equal(a, b) for a, b in zip(found, payloads(seed), strict=True))


def test_it_comes_back_in_a_later_process(opened: Any) -> None:
    store = opened()
    names = put(store, 3)
    assert [same(store.read(name, TOKENS, SIZES), i) for i, name in enumerate(names)] == [True] * 3
    later = opened()
    assert later.problem is None
    assert [same(later.read(name, TOKENS, SIZES), i) for i, name in enumerate(names)] == [True] * 3
    assert later.use.read == 3 and later.seconds_per_block > 0
    assert {p.stat().st_mode & 0o777 for p in [later.folder, *later.folder.iterdir()]} == {0o700, 0o600}


@pytest.mark.parametrize("what", ["identity", "tenant", "tokens", "parent", "key"])
def test_another_s_is_not_found(what: str, opened: Any, tmp_path: Path) -> None:
    put(opened())
    other = opened(b"another" if what == "identity" else b"model")
    if what == "key":
        (tmp_path / "keys" / "key").unlink()
        other = opened()
    root = other.root(Namespace("else") if what == "tenant" else WHO)
    name = other.child(root, TOKENS[::-1] if what == "tokens" else TOKENS)
    if what == "parent":
        name = other.child(name, TOKENS)
    assert not other.has(name) and other.read(name, TOKENS, SIZES) is None
    assert other.problem is None and len(other._files) == 1, "it counts for the limit, and is deleted in its time"


def damaged(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    changed = bytes([data[middle] ^ 1])
    return {
        "cut off": data[:-1],
        "half": data[:middle],
        "empty": b"",
        "a bit": data[:middle] + changed + data[middle + 1 :],
        "its head": b"EWKV9999" + data[8:],
        "zeros": bytes(len(data)),
        "longer": data + b"x",
    }[how]


@pytest.mark.parametrize("how", ["cut off", "half", "empty", "a bit", "its head", "zeros", "longer"])
def test_a_damaged_record_is_computed_again(how: str, opened: Any) -> None:
    store = opened()
    first, second = put(store, 2)
    for name in (first, second):
        path = file_of(store, name)
        path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.warns(RuntimeWarning, match=r"prefix cache: .*\.kv: .*computed again") as caught:
        assert [store.read(name, TOKENS, SIZES) for name in (first, second)] == [None, None]
    assert len(caught) == 1, "it is said once"
    assert store.use.refused == 2 and not list(store.folder.glob("*.kv"))
    put(store, 2)
    assert same(store.read(first, TOKENS, SIZES), 0)


def test_a_record_in_another_s_place_is_refused(opened: Any) -> None:
    """A forger without the key can still move files."""
    store = opened()
    first, second = put(store, 2)
    file_of(store, second).write_bytes(file_of(store, first).read_bytes())
    with pytest.warns(RuntimeWarning, match="damaged, or was not written with this key"):
        assert store.read(second, TOKENS, SIZES) is None


def test_a_link_in_a_record_s_place_is_not_followed(opened: Any, tmp_path: Path) -> None:
    store = opened()
    (name,) = put(store)
    path = file_of(store, name)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="link to a file outside"):
        assert store.read(name, TOKENS, SIZES) is None
    assert (tmp_path / "elsewhere").exists()
    path.symlink_to(tmp_path / "elsewhere")
    assert not opened()._files


def test_a_lying_disk(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    (name,) = put(store)
    monkeypatch.setattr(block_store, "read_regular", lambda path, most, within: b"x" * most)
    with pytest.warns(RuntimeWarning):
        assert store.read(name, TOKENS, SIZES) is None


def test_a_full_disk(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    real = os.replace

    def full(source: Any, to: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(to))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device; blocks that can't be written are not kept"):
        put(store, 2)
    assert store.use.skipped == 2 and not [p for p in store.folder.iterdir() if p.name != ".lock"]
    monkeypatch.setattr(os, "replace", real)
    names = put(store, 2)
    assert same(store.read(names[1], TOKENS, SIZES), 1), "later blocks are tried again"


@pytest.mark.parametrize("error", [RuntimeWarning("made an error"), ValueError("unforeseen"), SystemExit(3)])
def test_whatever_goes_wrong_in_the_writer_switches_the_tier_off(
    error: BaseException, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    (name,) = put(store)

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(store, "_write", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as `-W error` does: what is said must not end the thread either
        for i in range(3):
            store.write(store.child(name, [i]), WHO, TOKENS, payloads(0), wait=True)
        store.flush()
    assert not store.usable and not store.writable and type(error).__name__ in store.problem
    assert store.read(name, TOKENS, SIZES) is None or store.has(name)
    assert store.delete() == 0
    store.close()


def test_a_full_disk_under_w_error(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's request ends by what is said of a folder."""
    store = opened()

    def full(source: Any, to: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(to))

    with warnings.catch_warnings(), monkeypatch.context() as patched:
        warnings.simplefilter("error")
        patched.setattr(os, "replace", full)
        put(store, 2)
    assert store.use.skipped == 2 and "No space left" in store.problem
    names = put(store, 2)
    path = file_of(store, names[0])
    path.write_bytes(damaged(path.read_bytes(), "a bit"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read(names[0], TOKENS, SIZES) is None


def test_nobody_waits_for_a_disk_for_ever(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, goes_on = opened(), threading.Event()
    monkeypatch.setattr(block_store, "_SECONDS_TO_CLOSE", 0.05)
    monkeypatch.setattr(store, "_write", lambda *_: goes_on.wait(60))
    with pytest.warns(RuntimeWarning, match=r"the disk isn't done after 0.05 s; it is not used any more"):
        put(store)
    assert not store.usable
    goes_on.set()


def test_what_was_used_least_is_deleted(opened: Any) -> None:
    store = opened(most_bytes=4000)
    names = put(store, 3)
    store.used(names[:1])
    other = put(store, 2, Namespace("else"))
    assert [store.has(name) for name in [*names, *other]] == [True, False, True, True, True]
    assert sum(p.stat().st_size for p in store.folder.glob("*.kv")) == store._bytes <= 4000
    small = opened(most_bytes=100)
    put(small, 1, Namespace("third"))
    assert small.use.skipped == 1 and not list(store.folder.glob("*.partial"))


def test_of_a_prefix_the_end_is_deleted_first(opened: Any) -> None:
    store = opened(most_bytes=4000)
    names = put(store, 3)
    store.used(names)
    put(store, 2, Namespace("else"))
    assert [store.has(name) for name in names] == [True, True, False]
    assert next(iter(opened(most_bytes=4000)._files)) == names[1], "and so it is for a later process"


def test_what_is_old_is_deleted(opened: Any) -> None:
    store = opened()
    names = put(store, 2)
    os.utime(file_of(store, names[0]), (0, 0))
    (store.folder / f".{'0' * 64}.17.partial").write_bytes(b"of a process that was killed")
    (store.folder / "mine.txt").write_text("not ours")
    later = opened(most_age=3600.0)
    assert [later.has(name) for name in names] == [False, True]
    assert sorted(p.name for p in later.folder.iterdir()) == [".lock", file_of(later, names[1]).name, "mine.txt"]


def test_a_tenant_s_are_deleted(opened: Any) -> None:
    store = opened()
    mine, other = put(store, 2), put(store, 2, Namespace("else"))
    assert store.delete(WHO.tenant) == 2
    assert [store.has(name) for name in [*mine, *other]] == [False, False, True, True]
    assert store.delete() == 2 and not list(store.folder.glob("*.kv"))


def test_a_second_process_only_reads(opened: Any) -> None:
    store = opened()
    names = put(store, 2)
    with pytest.warns(RuntimeWarning, match="another process writes it; this one only reads"):
        second = opened(close_others=False)
    assert same(second.read(names[0], TOKENS, SIZES), 0)
    put(second, 3)
    assert len(list(second.folder.glob("*.kv"))) == 2 and second.delete() == 0
    store.delete()
    assert second.read(names[1], TOKENS, SIZES) is None and second.use.refused == 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("link", "link to one is not taken"),
        ("file", "not a folder"),
        ("open to others", "chmod 700"),
        ("another's", "belongs to another user"),
        ("key open to others", "chmod 600"),
        ("key damaged", "key is damaged"),
        ("key within", "its key would lie in it"),
    ],
)
def test_a_folder_that_is_not_ours(
    what: str, message: str, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key = tmp_path / "kept", tmp_path / "keys" / "key"
    if what == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif what == "file":
        folder.write_text("")
    elif what == "open to others":
        folder.mkdir(mode=0o755)
    elif what == "another's":
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    elif what == "key within":
        key = folder / "key"
    else:
        key.parent.mkdir()
        key.write_bytes(b"k" * (32 if "others" in what else 5))
        key.chmod(0o644 if "others" in what else 0o600)
    with pytest.warns(RuntimeWarning, match=message):
        store = opened(key_file=key)
    assert not store.usable and not store.writable
    name = store.child(store.root(WHO), TOKENS)
    store.write(name, WHO, TOKENS, payloads(0))
    assert store.read(name, TOKENS, SIZES) is None
    assert message in str(store.describe()["problem"])


WRITER = """
import sys, warnings
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from tests.runtime.kv_cache.test_block_store import TOKENS, WHO, payloads
from enginewright.runtime.kv_cache.block_store import BlockStore
store = BlockStore(Path(sys.argv[1]), b"model", most_bytes=60_000, key_file=Path(sys.argv[2]))
print("open", store.writable, flush=True)
name = store.root(WHO)
for i in range(10 ** 9):
    name = store.child(name, TOKENS)
    store.write(name, WHO, TOKENS, payloads(i), wait=True)
    if i == 2:
        store.flush()
        print("written", flush=True)
"""


def test_killed_at_any_moment(opened: Any, tmp_path: Path, repository: Path) -> None:
    """Whatever is there then is whole, or refused; the lock is free."""
    folder, key = tmp_path / "kept", tmp_path / "keys" / "key"
    chance = random.Random(1)
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(folder), str(key), str(repository)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "open True\n"
            assert process.stdout.readline() == "written\n"
            time.sleep(chance.uniform(0, 0.2))  # any moment will do
            process.send_signal(signal.SIGKILL)
        store = opened()
        assert store.writable and not list(folder.glob("*.partial"))
        name, count = store.root(WHO), 0
        for i in range(100_000):
            name = store.child(name, TOKENS)
            if store.has(name):
                assert same(store.read(name, TOKENS, SIZES), i)
                count += 1
            elif count:
                break
        assert count > 0
        store.close()
