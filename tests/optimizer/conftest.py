"""Fixtures of tests with models on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.optimizer.hub_server import MODEL, Hub, Repository


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty Hub, and an empty cache in ``tmp_path / "cache"``."""
    from enginewright.optimizer.capture import hub_blobs

    with Hub() as running:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(hub_blobs, "_CHUNK_BYTES", 4096)
        monkeypatch.setattr(hub_blobs, "_PAUSE_SECONDS", 0.0)
        yield running


@pytest.fixture
def model(hub: Hub, tiny_folder: Path) -> Repository:
    """The tiny Llama as MODEL, with files that nobody needs."""
    files = {p.name: p.read_bytes() for p in tiny_folder.iterdir()}
    files |= {"README.md": b"---\nlicense: mit\n---\n", "pytorch_model.bin": b"\x80" * 50_000, "onnx/model.onnx": b"x"}
    hub.repositories[MODEL] = Repository.of(files | {"modeling_own.py": b"raise SystemExit"})
    return hub.repositories[MODEL]
