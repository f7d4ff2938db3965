"""Sampling's kernels, which take seconds, are compiled in tests of their own."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_sampling_kernels() -> Iterator[None]:
    pytest.importorskip("tensorrt_rtx")
    from enginewright.plugins.tensorrt_rtx.compile import emit_segments, whole

    with patch.object(whole, "emit_sampling_kernels"), patch.object(emit_segments, "emit_sampling_kernels"):
        yield
