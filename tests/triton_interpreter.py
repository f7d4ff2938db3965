"""A process in which Triton interprets its kernels on the CPU: it decides as it is imported, for good."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
        yield pool
