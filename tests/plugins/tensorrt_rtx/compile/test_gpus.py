"""GPUs that there are no engines for are refused by name."""

from __future__ import annotations

import pytest

from enginewright.plugins.engines.gpus import DEFAULT, check_suited
from enginewright.runtime.shared.errors import TargetError


def test_unsuited_gpus() -> None:
    check_suited((*DEFAULT, "7.5", "12.1"))
    with pytest.raises(TargetError, match=r"no engine for compute capability 9\.0, 10\.0\n.*7\.5, 8\.0"):
        check_suited(("8.0", "9.0", "10.0"))
