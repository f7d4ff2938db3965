"""targets/NAME/buckets/plan.json: the fixed sizes of a target's steps. docs/inside/bundle-format.md describes it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from ..shared.errors import BundleError
from ..shared.json_document import parse_shown
from ..shared.records import Record, read
from .manifest import check_format_version, target_folder

FORMAT_VERSION = 1
PLAN_FILE = "buckets/plan.json"
"""The name in a target's folder."""

MOST_BUCKETS = 256
Kind = Literal["tokens", "batch"]
KINDS: tuple[Kind, ...] = ("tokens", "batch")
_MOST = 1 << 20
_Size = Annotated[int, Meta(ge=1, le=_MOST)]


class Bucket(Record, frozen=True, kw_only=True):
    """The sizes that a step is padded to.

    ``tokens``, ``requests`` and ``rows`` are T, B and R of ``contracts.StepInput``. Of kind ``tokens`` it takes any
    step of no more tokens; padding is one request more, or none where no token is padding. Of kind ``batch`` it takes
    steps of one token a request, and T = B = R.
    """

    kind: Kind
    tokens: _Size
    requests: _Size
    rows: _Size

    @classmethod
    def of_tokens(cls, tokens: int, most_requests: int) -> Bucket:
        """Makes a bucket for prompts beside decodes: up to ``most_requests``, and one that owns the padding."""
        requests = min(tokens, most_requests)
        return cls(kind="tokens", tokens=tokens, requests=requests + 1, rows=requests)

    @classmethod
    def of_batch(cls, batch: int) -> Bucket:
        """Makes a bucket for decode steps."""
        return cls(kind="batch", tokens=batch, requests=batch, rows=batch)

    @property
    def name(self) -> str:
        """The name in statistics: "tokens-128", "batch-8"."""
        return f"{self.kind}-{self.tokens}"

    def __post_init__(self) -> None:
        if self.kind == "batch" and not self.tokens == self.requests == self.rows:
            raise ValueError("a batch has as many tokens, requests and rows")
        if self.kind == "tokens" and not self.rows == self.requests - 1 <= self.tokens:
            raise ValueError("there must be one request more than rows, and no more rows than tokens")


class BucketPlan(Record, frozen=True, kw_only=True):
    """All of them: those of kind tokens by rising size, then those of kind batch."""

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
        """The plan of so many tokens and so many requests a decode step, in any order."""
        most = max(batch) if batch else min(most_requests, max(tokens))
        buckets = [Bucket.of_tokens(t, most) for t in sorted(tokens)] + [Bucket.of_batch(b) for b in sorted(batch)]
        return cls(buckets=tuple(buckets))

    def sizes(self, kind: Kind) -> tuple[int, ...]:
        """Lists the sizes of one kind, rising."""
        return tuple(b.tokens for b in self.buckets if b.kind == kind)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a step."""
        return max(self.sizes("tokens"), default=0)

    @property
    def most_requests(self) -> int:
        """Most requests of a step, whatever it has."""
        return max(b.requests for b in self.buckets if b.kind == "tokens") - 1

    @property
    def most_padding(self) -> int:
        """Most tokens of padding of a step: what comes between two sizes of a kind."""
        return max(above - below - 1 for kind in KINDS for below, above in pairwise((0, *self.sizes(kind))))

    def to_json(self) -> str:
        """Stable, readable text: the same plan gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str, context_length: int) -> BucketPlan:
        """Raises BundleError naming ``source`` and the field if it isn't a plan for a model of that context."""
        try:
            data = parse_shown(text)
        except ValueError as e:
            raise BundleError(f"{source}: not JSON: {e}", hint="Export the bundle again.") from e
        check_format_version(data, FORMAT_VERSION, source)
        plan = read(cls, data, source)
        if plan.most_tokens > context_length:
            raise BundleError(
                f"{source}: buckets: one of {plan.most_tokens} tokens is beyond the context of {context_length}",
                hint="Export the bundle again.",
            )
        return plan


def plan_path(target: str) -> str:
    """Returns the path of a target's plan in the bundle."""
    return f"{target_folder(target)}/{PLAN_FILE}"
