"""Rules of rewrites: a pattern, a check that returns why a match is rejected, and the rewrite.

A pattern describes a value by its op and arguments, down to values that it binds to names::

    square = Call(aten.pow.Tensor_Scalar, Bind("x"), 2)
    inverse = Call(aten.rsqrt.default, Call(aten.add.Tensor, Call(aten.mean.dim, square, [-1], True), Number("eps")))
    norm = Call(aten.mul.Tensor, Bind("x"), inverse)

If a name is bound twice, both must be the same value. add and mul match with their arguments in either order.
Arguments are compared after defaults and names were filled in from the op's schema, so that their spelling doesn't
matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx.node import Node, Target

from enginewright.passes.ir.calls import bound_arguments as bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import join_where, where_of

from .base import Pass, PassContext, PassResult, Rejection

aten = torch.ops.aten
COMMUTATIVE: frozenset[Target] = frozenset({aten.add.Tensor, aten.mul.Tensor, aten.maximum.default})


@dataclass
class Match:
    """A match of a pattern.

    Attributes:
        root: the node that matches the whole pattern.
        bound: the values bound to names.
        covered: all nodes that the pattern covers.
    """

    root: Node
    bound: dict[str, Any] = field(default_factory=dict)
    covered: list[Node] = field(default_factory=list)

    def node(self, name: str) -> Node:
        value = self.bound[name]
        assert isinstance(value, Node), f"{name} is {value!r}, not a node"
        return value

    def get(self, name: str) -> Any:
        """Returns the value bound to ``name``; None if the pattern has alternatives and the one that matched doesn't
        bind it.
        """
        return self.bound.get(name)

    @property
    def where(self) -> tuple[str, ...]:
        """The module paths of all covered nodes, the root's first."""
        return where_of([self.root, *self.covered])

    def copy(self) -> Match:
        return Match(self.root, dict(self.bound), list(self.covered))


class Pattern(ABC):
    """A description of a value in a program, which a node or a constant matches or doesn't."""

    @abstractmethod
    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        """Yields one copy of ``match``, with the new bindings added, for each way in which ``value`` matches this
        pattern.
        """

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)


@dataclass(frozen=True)
class Bind(Pattern):
    """Matches any node and binds it to ``name``; if the name is bound already, matches only that node."""

    name: str

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        if isinstance(value, Node):
            yield from _bind(self.name, value, match)


@dataclass(frozen=True)
class Weight(Pattern):
    """Matches a ``get_attr`` node and binds it to ``name``. ``rank`` is its number of dimensions, None for any."""

    name: str
    rank: int | None = None

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        if not isinstance(value, Node) or value.op != "get_attr":
            return
        if self.rank is None or program.value(value).dim() == self.rank:
            yield from _bind(self.name, value, match)


@dataclass(frozen=True)
class Number(Pattern):
    """Matches a Python number and binds it to ``name``."""

    name: str

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from _bind(self.name, value, match)


@dataclass(frozen=True)
class Anything(Pattern):
    """Matches any argument, and binds it to ``name``, unless that is None."""

    name: str | None = None

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        if self.name is None:
            yield match
        else:
            yield from _bind(self.name, value, match)


@dataclass(frozen=True)
class Either(Pattern):
    """Matches whatever ``first`` or ``second`` matches."""

    first: Pattern
    second: Pattern

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        yield from self.first.matches(program, value, match)
        yield from self.second.matches(program, value, match)


class Call(Pattern):
    """Matches a call of an op, or of one of several ops, with these arguments by position or name.

    Arguments that aren't listed match anything. Plain numbers, lists, None and strings match equal values.
    """

    def __init__(self, target: Target | Sequence[Target], *args: Any, **kwargs: Any) -> None:
        self.targets: tuple[Target, ...] = tuple(target) if isinstance(target, (tuple, list)) else (target,)  # type: ignore[assignment]
        self.args = args
        self.kwargs = kwargs

    def matches(self, program: Program, value: Any, match: Match) -> Iterator[Match]:
        if not isinstance(value, Node) or value.op != "call_function" or value.target not in self.targets:
            return
        arguments = bound_arguments(value)
        names = list(arguments)
        if len(self.args) > len(names) or any(k not in arguments for k in self.kwargs):
            return
        patterns = list(zip(names, self.args, strict=False)) + list(self.kwargs.items())
        orders = [patterns]
        if value.target in COMMUTATIVE and len(self.args) == 2:
            orders.append([(names[0], self.args[1]), (names[1], self.args[0]), *self.kwargs.items()])
        for order in orders:
            yield from self._arguments(program, order, arguments, match, value)

    def _arguments(
        self, program: Program, wanted: list[tuple[str, Any]], given: dict[str, Any], match: Match, node: Node
    ) -> Iterator[Match]:
        if not wanted:
            extended = match.copy()
            extended.covered.append(node)
            yield extended
            return
        (name, pattern), rest = wanted[0], wanted[1:]
        for partial in fits(program, pattern, given[name], match):
            yield from self._arguments(program, rest, given, partial, node)


def fits(program: Program, pattern: Any, value: Any, match: Match) -> Iterator[Match]:
    """Yields the matches of ``value`` with ``pattern``, each as ``match`` with further bindings.

    ``pattern`` may be a plain argument, such as a number; then ``value`` matches if it is equal.
    """
    if isinstance(pattern, Pattern):
        yield from pattern.matches(program, value, match)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from _sequence(program, list(pattern), list(value), match)
    elif isinstance(value, Node):
        return
    elif value == pattern and isinstance(value, bool) == isinstance(pattern, bool):
        yield match


def _sequence(program: Program, patterns: list[Any], values: list[Any], match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for partial in fits(program, patterns[0], values[0], match):
        yield from _sequence(program, patterns[1:], values[1:], partial)


def _bind(name: str, value: Any, match: Match) -> Iterator[Match]:
    if name not in match.bound:
        extended = match.copy()
        extended.bound[name] = value
        yield extended
    elif match.bound[name] is value or (not isinstance(value, Node) and match.bound[name] == value):
        yield match


class Rule(ABC):
    """A rule of a rewrite: a pattern, a check and the rewrite. ``name`` is the rule's name in reports."""

    name: ClassVar[str]
    pattern: ClassVar[Pattern]

    def check(self, program: Program, match: Match) -> str | None:
        """Returns None if the match may be rewritten, otherwise the reason against it, which goes into the report."""
        return None

    @abstractmethod
    def rewrite(self, program: Program, match: Match) -> Node:
        """Adds the new nodes before the root, and returns the node that replaces the root."""


class RewritePass(Pass):
    """A pass that is made of rules. It visits the nodes in order; the first rule that matches a node and accepts the
    match rewrites it.
    """

    rules: ClassVar[tuple[Rule, ...]]

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in list(program.graph.nodes):
            if node.op != "call_function" or (not node.users and node is not program.output):
                continue
            self._try_rules(program, node, result, self.rules_for(context))
        return result

    def rules_for(self, context: PassContext) -> tuple[Rule, ...]:
        """Returns the rules for an export with these options. By default they are ``rules`` for every export."""
        return self.rules

    def _try_rules(self, program: Program, node: Node, result: PassResult, rules: tuple[Rule, ...]) -> None:
        for rule in rules:
            reason: str | None = None
            for match in rule.pattern.matches(program, node, Match(node)):
                reason = rule.check(program, match)
                if reason is not None:
                    continue
                with program.inserting_before(node):
                    new = rule.rewrite(program, match)
                if new is not node:
                    program.replace(node, new)
                result.matched += 1
                return
            if reason is not None:
                where = join_where(node.meta.get("where", ()))
                result.rejected.append(Rejection(node.name, where, f"{rule.name}: {reason}"))
