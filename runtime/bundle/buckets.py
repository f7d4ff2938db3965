"""targets/NAME/buckets/plan.json: the fixed sizes of a target's steps. docs/inside/bundle-format.md describes the
file.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from ..shared.errors import BundleError
from ..shared.records import Record, parse_versioned, read
from .manifest import target_folder

FORMAT_VERSION = 1
PLAN_FILE = "buckets/plan.json"
"""The name in a target's folder."""

MOST_BUCKETS = 256
Kind = Literal["tokens", "batch"]
KINDS: tuple[Kind, ...] = ("tokens", "batch")
_MOST = 1 << 20
_Size = Annotated[int, Meta(ge=1, le=_MOST)]


class Bucket(Record, frozen=True, kw_only=True):
    """A fixed size that steps are padded to.

    A bucket of kind ``tokens`` fits any step with at most that many tokens and requests; one additional request has the
    padding tokens. A bucket of kind ``batch`` fits steps with one token per request.

    Attributes:
        kind: "tokens" or "batch".
        tokens, requests, rows: T, B and R of ``contracts.StepInput``, with padding; all equal for kind ``batch``.
    """

    kind: Kind
    tokens: _Size
    requests: _Size
    rows: _Size

    @classmethod
    def of_tokens(cls, tokens: int, most_requests: int) -> Bucket:
        """Returns a bucket of kind ``tokens`` for up to ``most_requests`` requests, plus the request that has the
        padding.
        """
        requests = min(tokens, most_requests)
        return cls(kind="tokens", tokens=tokens, requests=requests + 1, rows=requests)

    @classmethod
    def of_batch(cls, batch: int) -> Bucket:
        """Returns a bucket for decode steps of ``batch`` requests."""
        return cls(kind="batch", tokens=batch, requests=batch, rows=batch)

    @property
    def name(self) -> str:
        """The bucket's name in statistics: "tokens-128", "batch-8"."""
        return f"{self.kind}-{self.tokens}"

    def __post_init__(self) -> None:
        if self.kind == "batch" and not self.tokens == self.requests == self.rows:
            raise ValueError("a batch has as many tokens, requests and rows")
        if self.kind == "tokens" and not self.rows == self.requests - 1 <= self.tokens:
            raise ValueError("there must be one request more than rows, and no more rows than tokens")


class BucketPlan(Record, frozen=True, kw_only=True):
    """All buckets of a target: first those of kind ``tokens``, then those of kind ``batch``, each in rising order of
    size.
    """

    format_version: int = FORMAT_VERSION
    buckets: Annotated[tuple[Bucket, ...], Meta(min_length=1, max_length=MOST_BUCKETS)]

    def __post_init__(self) -> None:
        order = [(b.kind != "tokens", b.tokens) for b in self.buckets]
        if order != sorted(set(order)):
            raise ValueError("they are not in order, or one comes twice")
        if self.buckets[0].kind != "tokens":
            raise ValueError("there is none of kind tokens, which every step can run in")
        if any(b.tokens > self.most_tokens for b in self.buckets):
            raise ValueError("a batch is larger than the largest of kind tokens")
        if any(b.rows != min(b.tokens, self.most_requests) for b in self.buckets if b.kind == "tokens"):
            raise ValueError("each of kind tokens must take as many requests as it has tokens, up to one number")
        if any(b.tokens > self.most_requests for b in self.buckets if b.kind == "batch"):
            raise ValueError("a batch has more requests than the buckets of kind tokens take")

    @classmethod
    def from_sizes(cls, tokens: tuple[int, ...], batch: tuple[int, ...], most_requests: int) -> BucketPlan:
        """Returns the plan for some bucket sizes, which may be in any order.

        Args:
            tokens: the tokens of each bucket of kind ``tokens``.
            batch: the requests of each bucket of kind ``batch``.
            most_requests: the most requests of a step if ``batch`` is empty; otherwise the largest of ``batch`` counts.
        """
        most = max(batch) if batch else min(most_requests, max(tokens))
        buckets = [Bucket.of_tokens(t, most) for t in sorted(tokens)] + [Bucket.of_batch(b) for b in sorted(batch)]
        return cls(buckets=tuple(buckets))

    def sizes(self, kind: Kind) -> tuple[int, ...]:
        """Returns the tokens of the buckets of one kind, in rising order."""
        return tuple(b.tokens for b in self.buckets if b.kind == kind)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step that fits into one of the buckets."""
        return max(self.sizes("tokens"), default=0)

    @property
    def most_requests(self) -> int:
        """The most requests of a step that fits into one of the buckets."""
        return max(b.requests for b in self.buckets if b.kind == "tokens") - 1

    @property
    def most_padding(self) -> int:
        """The most padding tokens of a step. They follow from the largest gap between two sizes of a kind."""
        return max(above - below - 1 for kind in KINDS for below, above in pairwise((0, *self.sizes(kind))))

    def to_json(self) -> str:
        """Returns the plan as readable JSON; equal plans give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str, context_length: int) -> BucketPlan:
        """Parses a plan. Raises BundleError naming ``source`` and the field if it is invalid or exceeds the
        context.
        """
        plan = read(cls, parse_versioned(text, FORMAT_VERSION, source), source)
        if plan.most_tokens > context_length:
            raise BundleError(
                f"{source}: buckets: one of {plan.most_tokens} tokens is beyond the context of {context_length}",
                hint="Export the bundle again.",
            )
        return plan


def plan_path(target: str) -> str:
    """Returns the path of a target's plan in the bundle."""
    return f"{target_folder(target)}/{PLAN_FILE}"
