"""The table of a step's arrays: names, sizes, and names that no port has."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.step_schema import (
    ATTENTION_PORTS,
    PORTS,
    by_group,
    flat,
    group_port,
    port_names,
    port_of,
    ports_in,
    ports_of,
)


def test_every_step_has_these_in_this_order() -> None:
    """Libraries of older bundles, and messages between ranks, have the order of the interpreter's list."""
    assert port_names(["full", "window"]) == (
        *("ids", "positions", "q_start", "kv_len", "rows"),
        *("slots:full", "block_table:full", "slots:window", "block_table:window"),
    )
    assert [name for name, port in PORTS.items() if port.padding is None] == ["q_start"]


@pytest.mark.parametrize(("tokens", "requests", "rows", "blocks"), [(7, 3, 2, 5), (1, 1, 0, 1)])
def test_sizes(tokens: int, requests: int, rows: int, blocks: int) -> None:
    sizes = {name: port.sizes(tokens, requests, rows, blocks) for name, port in ports_of(["g"])}
    assert sizes == {
        **dict.fromkeys(("ids", "positions", "slots:g"), (tokens,)),
        **{"q_start": (requests + 1,), "kv_len": (requests,), "rows": (rows,), "block_table:g": (requests, blocks)},
    }


@pytest.mark.parametrize("name", ["adapters", "slots", "ids:full", "", "slots2:full"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(BundleError, match="isn't an array of a step"):
        port_of(name)


def test_arrays_of_groups() -> None:
    one, other, ids = (np.full(2, i, np.int32) for i in range(3))
    arrays = flat({"ids": ids, "slots": {"a": one, "b:c": other}})
    assert list(arrays) == ["ids", "slots:a", "slots:b:c"]
    assert by_group(arrays, "slots") == {"a": one, "b:c": other}
    assert port_of("slots:b:c") is PORTS["slots"]
    values = {group_port("block_table", "a"): 1, "q_start": 2, "kv_len": 3, group_port("block_table", "b"): 4}
    assert ports_in(values, ATTENTION_PORTS, "b") == {"block_table": 4, "q_start": 2, "kv_len": 3}
