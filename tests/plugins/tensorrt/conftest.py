"""The process that ``bindings_process`` makes, once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.plugins.tensorrt.bindings_process import bindings_process


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with bindings_process(tmp_path_factory.mktemp("tensorrt")) as pool:
        yield pool
