"""Downloads that break off, are damaged, or meet another."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enginewright.optimizer.capture.find_source import find_source
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.optimizer.hub_server import MODEL, Hub, Repository


def partial_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.incomplete"))


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, model: Repository, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = [50_000, 1000, 0, 0]
    folder = find_source(MODEL)
    weights = model.revisions[folder.name]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.served["model.safetensors"] == len(weights)  # no byte twice
    assert partial_files(tmp_path) == []


def test_an_interrupted_download_goes_on(hub: Hub, model: Repository, tmp_path: Path) -> None:
    """The second attempt of a process that was killed, as far as the disk tells."""
    hub.cuts["model.safetensors"] = [70_000, *[0] * 20]
    with pytest.raises(SourceError, match=r"connection to http(?s:.*)the next attempt goes on"):
        find_source(MODEL)
    (partial,) = partial_files(tmp_path)
    assert partial.stat().st_size == 70_000
    served = hub.served["model.safetensors"]
    del hub.cuts["model.safetensors"]
    folder = find_source(MODEL)
    weights = model.revisions[folder.name]["model.safetensors"]
    assert hub.served["model.safetensors"] - served == len(weights) - 70_000
    assert (folder / "model.safetensors").read_bytes() == weights
    assert partial_files(tmp_path) == []


def test_ctrl_c_keeps_what_came(hub: Hub, model: Repository, tmp_path: Path) -> None:
    def interrupt(event: ProgressEvent) -> None:
        if event.detail.startswith("model.safetensors") and event.done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_source(MODEL, progress=interrupt)
    (partial,) = partial_files(tmp_path)
    have = partial.stat().st_size
    assert have > 50_000
    find_source(MODEL)
    assert hub.starts["model.safetensors"] == [0, have]


def test_a_server_without_ranges_sends_it_whole(hub: Hub, model: Repository, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = [70_000]
    hub.without_ranges = True
    folder = find_source(MODEL)
    assert (folder / "model.safetensors").read_bytes() == model.revisions[folder.name]["model.safetensors"]


def test_what_is_damaged_gets_no_name(hub: Hub, model: Repository, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.damaged = {name}
        with pytest.raises(SourceError, match="isn't what the Hub lists"):
            find_source(MODEL)
        assert not list((tmp_path / "cache").rglob(f"snapshots/*/{name}"))
        hub.damaged = set()
        find_source(MODEL)
        shutil.rmtree(tmp_path / "cache")


def test_two_at_once_fetch_it_once(hub: Hub, model: Repository, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: find_source(MODEL), range(4)))
    assert len(set(folders)) == 1
    assert hub.served["model.safetensors"] == (folders[0] / "model.safetensors").stat().st_size
    assert partial_files(tmp_path) == []
