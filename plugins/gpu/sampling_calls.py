"""Makes the kernel calls that draw a step's tokens on a GPU, from logits and options in its memory. It doesn't need
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .call import Argument, Call, Operand
from .specs import Constant
from .tiles import power_of_2

Memory = TypeVar("Memory", bound=Operand)
PIECE = 1024
"""The number of tokens of the vocabulary that one program processes."""

_PASSES, _NEAREST_PASSES = 8, 12
"""The numbers of passes of a search, four bits at a time: over 32 bits of a logit, and over 48 of a surprise's nearness
to its mean.
"""


@dataclass(frozen=True)
class Drawing:
    """The sampling options that the rows of a step use. Kernels of unused options aren't launched.

    Attributes:
        penalties: True if a row has a repetition penalty.
        random: True if a row has a temperature above 0.
        top_k, top_p, min_p, typical: True if a row with a temperature above 0 has this option.
        edits: True if a row has biases, bans, allowed tokens, or penalties by count.
        dry: True if a row has tokens that DRY penalizes; then ``edits`` is True as well.
        masks: True if a row has a mask of allowed tokens.
    """

    penalties: bool = False
    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    edits: bool = False
    typical: bool = False
    dry: bool = False
    masks: bool = False

    @property
    def changes(self) -> bool:
        """True if logits are changed before tokens are drawn."""
        return self.penalties or self.edits or self.typical or self.masks


class SamplingMemory(Generic[Memory]):
    """The memory that the sampling kernels share, for up to ``rows`` rows of ``vocab`` tokens.

    ``new`` allocates zeroed memory of a shape and of a type, which is named as in numpy and torch.
    """

    def __init__(self, rows: int, vocab: int, new: Callable[[tuple[int, ...], str], Memory]) -> None:
        self.rows, self.vocab = rows, vocab
        self.pieces = -(-vocab // PIECE)
        self._new = new
        count = rows * self.pieces
        self.values, self.places = new((count,), "float32"), new((count,), "int32")
        self.tops, self.tokens = new((rows,), "float32"), new((rows,), "int32")
        self.sums, self.moments = new((count,), "float64"), new((count,), "float64")
        self.counts, self.weights = new((2 * count * 16,), "int32"), new((2 * count * 16,), "float64")
        self.state = new((rows * (_NEAREST_PASSES + 1) * 3,), "float64")
        self.cut_keys, self.cut_tokens = new((2 * rows,), "int64"), new((2 * rows,), "int32")
        self.masks = new((rows * -(-vocab // 32),), "int32")
        self.no_lists = new((rows + 1,), "int32")  # stays 0: where lists begin that no row has
        self._wide: Memory | None = None

    @property
    def wide(self) -> Memory:
        """The memory for changed logits, float32 [rows, vocab]. It is allocated when it is first used."""
        if self._wide is None:
            self._wide = self._new((self.rows, self.vocab), "float32")
        return self._wide


def sampling_calls(
    logits: Operand, options: Mapping[str, Operand], memory: SamplingMemory[Memory], drawing: Drawing
) -> list[Call]:
    """Returns the calls that draw a token for each row of logits [R, V] into ``memory.tokens`` [R].

    A row that can't be drawn from gets NO_TOKEN.

    Args:
        logits: the logits on the device.
        options: arrays on the device, by the names of ``contracts.SAMPLING_OPTIONS`` and SAMPLING_LISTS; seed and
            counter are int64 [R]. ``lists`` is int32 and has all lists (see logit_kernels.py). ``mask_rows`` has the
            index of each row's mask in ``memory.masks``, -1 for none.
        memory: the kernels' memory.
        drawing: the options in use.
    """
    rows, vocab = logits.shape
    if not rows:
        return []
    pieces, room = memory.pieces, power_of_2(memory.pieces)
    calls: list[Call] = []
    if drawing.changes:
        calls += _changed(logits, options, memory, drawing)
        logits = memory.wide
    calls += _largest(logits, rows, memory)
    if not drawing.random:
        return calls
    sizes: dict[str, Constant] = {"STRIDE": logits.stride(0), "V": vocab, "C": pieces, "ROOM": room}
    heads: dict[str, Argument] = {"logits": logits, "tops": memory.tops, "temperatures": options["temperature"]}
    cuts: dict[str, Argument] = {"cut_keys": memory.cut_keys, "cut_tokens": memory.cut_tokens}
    histograms: dict[str, Argument] = {"counts": memory.counts, "weights": memory.weights, "state": memory.state}
    bounds: dict[str, Argument] = {"top_ks": options["top_k"], "top_ps": options["top_p"], "sums": memory.sums}
    plain: dict[str, Constant] = {"STRIDE": logits.stride(0), "V": vocab}

    def sums(count: int, min_p: bool) -> Call:
        arguments = {**heads, "min_ps": options["min_p"], **cuts, "sums": memory.sums}
        return Call("sums", arguments, {**plain, "CUTS": count, "MIN_P": min_p, "PIECE": PIECE}, (rows, pieces, 1))

    # A cut that nobody asks for stands before one that somebody does, and keeps all.
    for by_weight, used in ((False, drawing.top_k or drawing.top_p), (True, drawing.top_p)):
        if not used:
            continue
        if by_weight:
            calls.append(sums(1, False))
        for number in range(_PASSES):
            constants = {**sizes, "BY_WEIGHT": by_weight, "CUTS": int(by_weight), "PIECE": PIECE}
            calls.append(
                Call(
                    "narrow",
                    {**heads, **bounds, **cuts, **histograms, "number": number},
                    constants,
                    (rows, pieces, 1),
                    warps=8,  # with 4 a few registers are on the stack
                )
            )
        constants = {**sizes, "BY_WEIGHT": by_weight, "PIECE": PIECE}
        calls.append(Call("cut", {**heads, **bounds, **histograms, **cuts}, constants, (rows, 1, 1)))
    count, min_p = 2 if drawing.top_p else int(drawing.top_k), drawing.min_p
    if drawing.typical:
        calls += _typical(options, heads, cuts, count, memory, rows)
        count, min_p = 0, False  # by now these cuts are in the logits
    calls.append(sums(count, min_p))
    drawn: dict[str, Argument] = {**heads, "min_ps": options["min_p"], **cuts, "sums": memory.sums}
    drawn |= {"seeds": options["seed"], "counters": options["counter"], "tokens": memory.tokens}
    constants = {**sizes, "CUTS": count, "MIN_P": min_p, "PIECE": PIECE}
    calls.append(Call("draw", drawn, constants, (rows, 1, 1)))
    return calls


def _changed(
    logits: Operand, options: Mapping[str, Operand], memory: SamplingMemory[Memory], drawing: Drawing
) -> list[Call]:
    """Returns the calls that write the logits to ``memory.wide`` as float32, changed by the lists of tokens and the
    masks.

    ``options`` has the rows' options by name; ``drawing`` says which of these changes there are.
    """
    rows, vocab = logits.shape
    sized: dict[str, Constant] = {"STRIDE": logits.stride(0), "V": vocab, "PIECE": PIECE}
    calls = [Call("widen", {"logits": logits, "out": memory.wide}, sized, (rows, memory.pieces, 1))]
    if drawing.edits or drawing.masks:  # rows that nothing can be drawn from are found before anything is banned
        calls += _largest(logits, rows, memory)
    if drawing.edits:
        edited: dict[str, Argument] = {"logits": logits, "tokens": memory.tokens, "lists": options["lists"]}
        edited |= {name: options[name] for name in ("allowed_start", "biased_start", "seen_start", "counted_start")}
        edited |= {name: options[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")}
        calls.append(Call("edit", {**edited, "out": memory.wide}, sized, (rows, 1, 1)))
        if drawing.dry:  # biases once more, after the penalties
            edited |= dict.fromkeys(("allowed_start", "seen_start", "counted_start"), memory.no_lists)
            edited |= {"biased_start": options["dry_start"]}
            calls.append(Call("edit", {**edited, "out": memory.wide}, sized, (rows, 1, 1)))
    elif drawing.penalties:
        penalized: dict[str, Argument] = {"logits": logits, "seen": options["lists"]}
        penalized |= {"seen_start": options["seen_start"], "penalties": options["repetition_penalty"]}
        calls.append(Call("penalize", {**penalized, "out": memory.wide}, sized, (rows, 1, 1)))
    if drawing.masks:  # a banned token stays banned, whatever else changes logits
        masked: dict[str, Argument] = {"tokens": memory.tokens, "mask_rows": options["mask_rows"], "bits": memory.masks}
        calls.append(
            Call("mask", {**masked, "out": memory.wide}, {"V": vocab, "PIECE": PIECE}, (rows, memory.pieces, 1))
        )
    return calls


def _typical(
    options: Mapping[str, Operand],
    heads: Mapping[str, Argument],
    cuts: Mapping[str, Argument],
    count: int,
    memory: SamplingMemory[Memory],
    rows: int,
) -> list[Call]:
    """Returns the calls that set the tokens which ``count`` cuts, min_p and typical_p remove to -infinity in
    ``memory.wide``.

    Args:
        options: the rows' options by name.
        heads, cuts: arguments of the kernels for the rows' largest logits and for the cuts, by name.
        rows: the number of rows of logits.
    """
    grid = (rows, memory.pieces, 1)
    spread: dict[str, Argument] = {**heads, "min_ps": options["min_p"], **cuts}
    spread |= {"sums": memory.sums, "moments": memory.moments, "cuts": count}
    nearest: dict[str, Argument] = {**heads, "typical_ps": options["typical_p"]}
    nearest |= {"sums": memory.sums, "moments": memory.moments}
    nearest |= {"counts": memory.counts, "weights": memory.weights, "state": memory.state}
    constants: dict[str, Constant] = {"V": memory.vocab, "C": memory.pieces, "ROOM": power_of_2(memory.pieces)}
    return [
        Call("spread", spread, {"V": memory.vocab, "PIECE": PIECE}, grid),
        *(
            Call("nearest", {**nearest, "number": number}, {**constants, "PIECE": PIECE}, grid, warps=8)
            for number in range(_NEAREST_PASSES + 1)  # the last one cuts
        ),
    ]


def _largest(logits: Operand, rows: int, memory: SamplingMemory[Memory]) -> list[Call]:
    """Returns the calls that find each row's largest logit and its token."""
    largest: dict[str, Argument] = {"values": memory.values, "places": memory.places}
    constants: dict[str, Constant] = {"STRIDE": logits.stride(0), "V": memory.vocab, "PIECE": PIECE}
    chosen: dict[str, Argument] = {**largest, "tops": memory.tops, "tokens": memory.tokens}
    room: dict[str, Constant] = {"C": memory.pieces, "ROOM": power_of_2(memory.pieces)}
    return [
        Call("largest", {"logits": logits, **largest}, constants, (rows, memory.pieces, 1)),
        Call("choose_largest", chosen, room, (rows, 1, 1)),
    ]
