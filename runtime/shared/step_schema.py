"""The arrays of a step, declared once: the inputs of a program with their lengths and padding, and its outputs.

The input arrays of a program are *ports*. The executors of all targets, the messages between ranks, the padding to
fixed sizes, the capture of models and the tests use this table. Symbols of sizes: T tokens, B requests, R rows, M
blocks of the longest block table. To add a port, add a row to ``PORTS`` with a provider, and an op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import BundleError

Array = npt.NDArray[np.int32] | npt.NDArray[np.float32]
Value = TypeVar("Value")

Size = Literal["T", "B", "B+1", "R", "M"] | int
"""The size of an axis: a symbol, or a number that is the same in every step of a program."""

Check = Literal["none", "index", "row", "starts", "lengths", "segments", "slots", "table"]
"""The rule for the values of a port, which the interpreter of the cpu target checks before a step runs.

index: in the table that looks them up. row: in [0, T). starts: from 0 to T, never less than the one before. lengths: at
least the request's tokens of the step. segments: in [0, T], never less than the one before. table: a block of the pool
for every key that is read. slots: the places that the group's table has for the tokens; of states -1, or a place in the
block that gets a snapshot.
"""

Provider = Callable[[Sequence[Any]], Array]
"""Makes the array of a step from its chunks (``runtime.scheduler.base.Chunk``), in the order of their tokens."""


@dataclass(frozen=True)
class Port:
    """One input array of a step.

    Attributes:
        name: its name in programs; for a cache group GROUP the array is called ``name:GROUP``.
        shape: the sizes of its axes.
        dtype: "i32" or "f32".
        by_group: True if there is an array for each cache group.
        check: the condition on its values.
        padding: the value for padding; None repeats the last entry.
        provider: computes the array; None if ``StepInput.packed`` does, as for all arrays of every step.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: Literal["i32", "f32"] = "i32"
    by_group: bool = False
    check: Check = "none"
    padding: int | None = 0
    provider: Provider | None = None

    def sizes(self, tokens: int, requests: int, rows: int, blocks: int) -> tuple[int, ...]:
        """Returns the port's shape in a step with these numbers of tokens, requests, rows and blocks per table."""
        named = {"T": tokens, "B": requests, "B+1": requests + 1, "R": rows, "M": blocks}
        return tuple(named[size] if isinstance(size, str) else size for size in self.shape)


IDS, POSITIONS, Q_START, KV_LEN, ROWS = "ids", "positions", "q_start", "kv_len", "rows"
SLOTS, BLOCK_TABLE, TYPES = "slots", "block_table", "types"


def _token_types(chunks: Sequence[Any]) -> Array:
    """Returns the type of each token of the chunks, [T], from ``Request.token_types``; 0 for tokens without a type."""
    types = np.zeros(sum(chunk.count for chunk in chunks), np.int32)
    start = 0
    for chunk in chunks:
        if known := chunk.request.token_types[chunk.start : chunk.start + chunk.count]:
            types[start : start + len(known)] = known
        start += chunk.count
    return types


PORTS: dict[str, Port] = {
    port.name: port
    for port in (
        Port(IDS, ("T",), check="index"),
        Port(POSITIONS, ("T",), check="index"),
        Port(Q_START, ("B+1",), check="starts", padding=None),
        Port(KV_LEN, ("B",), check="lengths"),
        Port(ROWS, ("R",), check="row"),
        Port(SLOTS, ("T",), by_group=True, check="slots", padding=-1),
        Port(BLOCK_TABLE, ("B", "M"), by_group=True, check="table", padding=-1),
        Port(TYPES, ("T",), check="index", provider=_token_types),
    )
}
"""The ports by name. Those without a provider are in every step, in this order; a program names the others."""


class OutputPort(msgspec.Struct, frozen=True):
    """One output array of a step, with a row for each of its rows or requests.

    Attributes:
        name: its name in programs; for a layer LAYER the array is called ``name:LAYER``.
        shape: the sizes of its axes; V is the vocabulary, H the hidden size, E and C the number of a vector's
            dimensions and of classes.
        by_layer: True if there is an array for each layer.
    """

    name: str
    shape: tuple[str, ...]
    by_layer: bool = False


LOGITS, HIDDEN, POOLED, CLASSES = "logits", "hidden", "pooled", "classes"

OUTPUTS: dict[str, OutputPort] = {
    port.name: port
    for port in (
        OutputPort(LOGITS, ("R", "V")),
        OutputPort(HIDDEN, ("R", "H"), by_layer=True),
        OutputPort(POOLED, ("B", "E")),
        OutputPort(CLASSES, ("R", "C")),
    )
}
"""The outputs by name.

``hidden:i`` is the input of layer i; the last one is the output of the final norm. ``pooled`` is the vector, or the
classes, of each request; ``classes`` those of each row. A step names the outputs that it needs, out of the ``outputs``
and ``taps`` of its program.
"""

ATTENTION_PORTS = (BLOCK_TABLE, Q_START, KV_LEN)
"""The ports that attention reads, as arguments of its ops and kernels: its group's block table and the requests'
bounds.
"""


def group_port(port: str, group: str) -> str:
    """Returns the name of a cache group's array: ``slots:GROUP``, ``block_table:GROUP``."""
    return f"{port}:{group}"


def layer_output(output: str, layer: int) -> str:
    """Returns the name of a layer's output: ``hidden:LAYER``."""
    return f"{output}:{layer}"


@cache
def of_request(output: str) -> bool:
    """Returns True if an output has a row for each request of a step, instead of one for each of its rows."""
    return OUTPUTS[output.partition(":")[0]].shape[0] == "B"


def layers_of(output: str, names: Iterable[str]) -> tuple[int, ...]:
    """Returns the layers for which ``names`` contains the output ``output``, in order."""
    return tuple(sorted(int(name.partition(":")[2]) for name in names if name.startswith(f"{output}:")))


def port_of(name: str) -> Port:
    """Returns the port of an array, by the array's name. Raises BundleError for an unknown name."""
    port = PORTS.get(name.partition(":")[0])
    if port is None or port.by_group != (":" in name):
        raise BundleError(
            f"program: {name!r} isn't an array of a step; there are {', '.join(PORTS)}",
            hint="Install the version of Enginewright, or the package, that the bundle was exported with.",
        )
    return port


def port_names(groups: Iterable[str], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the names of a step's arrays: those that every step has, those of each cache group, then ``more``."""
    return tuple(name for name, _ in ports_of(groups, more))


def ports_of(groups: Iterable[str], more: Iterable[str] = ()) -> Iterator[tuple[str, Port]]:
    """Yields (array's name, port) in the order of ``port_names``."""
    every = [port for port in PORTS.values() if port.provider is None]
    yield from ((port.name, port) for port in every if not port.by_group)
    for group in groups:
        yield from ((group_port(port.name, group), port) for port in every if port.by_group)
    yield from ((name, port_of(name)) for name in more)


def ports_in(values: Mapping[str, Value], ports: Iterable[str], group: str) -> dict[str, Value]:
    """Returns port -> the value of its array, for each of ``ports``.

    Args:
        values: name of an array -> its value. Most ports have an array of the same name. A port of cache groups has one
            for each group: ``block_table`` has ``block_table:GROUP``.
        ports: the names of the ports.
        group: the cache group whose array is returned for a port of cache groups.
    """
    return {port: values[group_port(port, group) if PORTS[port].by_group else port] for port in ports}


def provided(names: Iterable[str], chunks: Sequence[Any]) -> dict[str, Array]:
    """Returns the arrays of the ports with a provider, for the chunks of a step."""
    return {name: provider(chunks) for name in names if (provider := port_of(name).provider) is not None}


def by_group(arrays: Mapping[str, Array], port: str) -> dict[str, Any]:
    """Returns cache group -> its array of the port ``port``, from arrays by their names in programs."""
    prefix = f"{port}:"
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def flat(ports: Mapping[str, Any]) -> dict[str, Array]:
    """Converts arrays by port to arrays by their names in programs. The reverse is ``by_group``.

    ``ports``: port -> its array; or, for a port of cache groups, a mapping of group to array.
    """
    arrays: dict[str, Array] = {}
    for name, value in ports.items():
        if PORTS[name].by_group:
            arrays.update({group_port(name, group): array for group, array in value.items()})
        else:
            arrays[name] = value
    return arrays
