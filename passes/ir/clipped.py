"""Weights of 4 bits whose groups may be clipped: the largest values are clamped so that steps are finer for the others.

AWQ chooses the share of its range that each group uses (Lin et al. 2023, https://arxiv.org/abs/2306.00978, section 3.2
of the paper, and its code). A weight stores one small number per group for it; the integers are computed when they are
needed.

    symmetric      scale = share * m / -8, where m is the group's value of the largest magnitude. So m becomes -8, the
                   one integer that has no counterpart of the other sign
    with offsets   scale = share * (largest - smallest) / 15, offset = share * smallest
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from enginewright.runtime.shared.errors import PassError

from .prequantized import CodeFormat, Codes, Prequantized
from .stacked_weights import pieces
from .weights import InPlaceOf, Shape

SHARES = (8 / 7, *(1.0 - 0.04 * i for i in range(-2, 14)))
"""The shares of a group's range to choose from. Those above 1 are for symmetric groups alone: at 8/7 both sides have
seven steps, and nothing is clipped.
"""

_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Choices:
    """The chosen shares of a weight: indices into ``SHARES``, uint8 [.., N, groups], which ``read`` returns. Two are
    equal if their bits are.
    """

    shape: Shape
    digest: str
    read: Callable[[], torch.Tensor] = field(compare=False, repr=False)

    @staticmethod
    def from_indices(indices: torch.Tensor) -> Choices:
        """Returns choices that are stored in memory."""
        content = indices.contiguous()
        return Choices(tuple(content.shape), hashlib.sha256(content.numpy().tobytes()).hexdigest(), lambda: content)


@dataclass(frozen=True)
class Clipped(InPlaceOf, Prequantized):
    """The weight ``base`` [.., N, K] in 4 bits, with the integers of each group along K spread over the chosen share of
    its range.

    ``choices`` [.., N, K / group_size] has the index of each group's share.
    """

    of_source = False
    choices: Choices
    format: CodeFormat

    def __post_init__(self) -> None:
        *lead, size = self.base.shape
        if self.format.bits != 4 or size % self.format.group_size:
            raise PassError(f"a weight of shape {self.base.shape} in {self.format}")
        if self.choices.shape != (*lead, size // self.format.group_size):
            raise PassError(f"choices {self.choices.shape} for a weight {self.base.shape} in {self.format}")

    @property
    def code_format(self) -> CodeFormat:
        return self.format

    def codes(self) -> Codes:
        rounded: list[Codes] = []
        chosen = self.choices.read().flatten(0, -2)  # [rows, groups]
        at = 0
        for piece in pieces(self.base):
            rows = piece.evaluate().reshape(-1, self.shape[-1])
            for part in rows.split(max(1, _CHUNK_ELEMENTS // self.shape[-1])):
                rounded.append(round_groups(part.float(), self.format, share_of(chosen[at : at + len(part)])))
                at += len(part)

        def joined(some: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(some).view(*self.shape[:-1], -1)

        offsets = [c.offsets for c in rounded if c.offsets is not None]
        return Codes(
            joined([c.values for c in rounded]),
            joined([c.scales for c in rounded]),
            joined(offsets) if offsets else None,
        )

    def describe(self) -> str:
        return f"clipped({self.base.describe()}, {self.format.group_size}, {self.choices.digest[:8]})"


def share_of(choices: torch.Tensor) -> torch.Tensor:
    """Converts indices into SHARES to float32 shares of the same shape."""
    shares: torch.Tensor = torch.tensor(SHARES)[choices.long()]
    return shares


def round_groups(weight: torch.Tensor, code_format: CodeFormat, share: torch.Tensor | float) -> Codes:
    """Rounds a weight float32 [N, K] to 4 bits. ``share`` has the share of each group's range, [N, groups], or one for
    all.

    Values are rounded for the scales as stored. Raises PassError if a scale is too large for float16.
    """
    groups = weight.unflatten(-1, (-1, code_format.group_size))  # [N, C, G]
    values, scales, offsets = _integers(groups, range_of(groups, code_format), share)
    return Codes(values.to(torch.int8).flatten(-2), scales, offsets)


def range_of(groups: torch.Tensor, code_format: CodeFormat) -> tuple[torch.Tensor, ...]:
    """Returns the range of each group of ``groups`` [N, C, G], as tensors [N, C].

    With offsets they are the smallest and the largest value, otherwise only the value with the largest magnitude.
    """
    if code_format.offsets:
        low, high = torch.aminmax(groups, dim=-1)
        return low, high
    largest = groups.abs().argmax(-1, keepdim=True)
    return (groups.gather(-1, largest)[..., 0],)


def rounded(groups: torch.Tensor, of: tuple[torch.Tensor, ...], share: torch.Tensor | float) -> torch.Tensor:
    """Returns groups [N, C, G] as floats after rounding them to 4 bits.

    ``of`` is the result of ``range_of`` for them, ``share`` the share of that range that the integers cover.
    """
    values, scales, offsets = _integers(groups, of, share)
    values *= scales.float()[..., None]
    return values if offsets is None else values.add_(offsets.float()[..., None])


def _integers(
    groups: torch.Tensor, of: tuple[torch.Tensor, ...], share: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rounds groups [N, C, G] to 4 bits, with ranges multiplied by ``share``. ``of`` is as for ``rounded``.

    Returns integers as float32 [N, C, G], scales float16 [N, C], and offsets alike or None. Raises PassError if a scale
    is too large for float16.
    """
    if len(of) == 2:
        low, high = of
        scales, offsets = (share * (high - low) / 15).half(), (share * low).half()
    else:
        scales, offsets = (share * of[0] / -8).half(), None
    if not torch.isfinite(scales).all() or (offsets is not None and not torch.isfinite(offsets).all()):
        raise PassError(
            f"a weight of magnitude {groups.abs().max().item():g} is too large for float16 scales",
            hint='Give the module another format by an override in the recipe, such as { storage = "f32" }.',
        )
    divisor = torch.where(scales == 0, torch.inf, scales.float())[..., None]  # a group that vanishes is all zeros
    if offsets is None:
        return (groups / divisor).round_().clamp_(-8, 7), scales, None
    return ((groups - offsets.float()[..., None]) / divisor).round_().clamp_(0, 15), scales, offsets
