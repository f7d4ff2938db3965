"""Expressions that pass the judgement take a backtracking engine quadratic time at most; others are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from enginewright.runtime.shared.pattern_tree import (
    Chars,
    Choice,
    Concatenation,
    Edge,
    Look,
    Node,
    PatternTree,
    Repeat,
    TooComplexError,
)


def chars(text: str) -> Chars:
    return Chars(text.__contains__, text)


END = chars("!")
A, B, AB = chars("a"), chars("b"), chars("ab")


def sequence(*items: Node) -> Node:
    return Concatenation(items)


def many(body: Node, least: int = 0, most: int | None = None) -> Node:
    return Repeat(body, least, most)


class Backtracking:
    """An engine that tries one way after the other, greedy ones first, and counts its steps."""

    def __init__(self, text: str, most: int) -> None:
        self.text, self.steps, self.most = text, 0, most

    def ends(self, node: Node, at: int) -> Iterator[int]:
        self.steps += 1
        if self.steps > self.most:
            raise TimeoutError
        if isinstance(node, Chars):
            if at < len(self.text) and node.test(self.text[at]):
                yield at + 1
        elif isinstance(node, Concatenation):
            if not node.items:
                yield at
            else:
                for end in self.ends(node.items[0], at):
                    yield from self.ends(Concatenation(node.items[1:]), end)
        elif isinstance(node, Choice):
            for option in node.options:
                yield from self.ends(option, at)
        elif isinstance(node, Repeat):
            yield from self.repeated(node, at, 0)
        elif isinstance(node, Look):
            if any(True for _ in self.ends(node.body, at)) != node.negative:
                yield at
        else:
            yield at

    def repeated(self, node: Repeat, at: int, count: int) -> Iterator[int]:
        if node.most is None or count < node.most:
            for end in self.ends(node.body, at):
                if end > at or count < node.least:
                    yield from self.repeated(node, end, count + 1)
        if count >= node.least:
            yield at


def random_node(generator: random.Random, depth: int = 0) -> Node:
    kind = generator.random()
    if depth > 3 or kind < 0.3:
        return generator.choice([A, B, AB, chars("bc"), chars("c")])
    if kind < 0.6:
        return sequence(*(random_node(generator, depth + 1) for _ in range(generator.randint(1, 3))))
    if kind < 0.72:
        return Choice((random_node(generator, depth + 1), random_node(generator, depth + 1)))
    if kind < 0.94:
        least, most = generator.choice([(0, None), (1, None), (0, 1), (1, 3), (0, None)])
        return many(random_node(generator, depth + 1), least, most)
    return Look(random_node(generator, depth + 1), ahead=True, negative=generator.random() < 0.5)


def test_what_passes_takes_quadratic_time_at_most() -> None:
    """Each expression is followed by a character that no text has: every way is tried."""
    generator = random.Random(3)
    passed = refused = 0
    while passed < 400:
        root = sequence(random_node(generator), END)
        tree = PatternTree(root)
        try:
            tree.check_backtracking()
        except TooComplexError:
            refused += 1
            continue
        passed += 1
        period = "".join(generator.choice("abc") for _ in range(generator.randint(1, 3)))
        text = (period * 40)[:40]
        engine = Backtracking(text, 100 * len(text) ** 2)
        assert not list(engine.ends(root, 0))
        assert not tree.matches(text)
    assert refused > 50


@pytest.mark.parametrize(
    "root",
    [
        many(many(A, 1), 1),
        many(Choice((A, A))),
        many(sequence(many(A), many(B))),
        many(sequence(many(AB), many(B, 0, 1)), 1),
        many(Choice((AB, B, sequence(A, B)))),
        sequence(many(AB), many(B), many(AB)),
        many(many(A, 1, 30), 1, 30),
        sequence(many(many(A, 0, 1), 30, 30), A),
        sequence(many(many(A, 0, 1), 10, 10), many(many(A, 0, 1), 10, 10)),
        sequence(*[Choice((A, A))] * 20),
        many(sequence(Look(sequence(many(A), B), True, False), A)),
    ],
    ids=["a++", "a|a", "a*b*", "overlap", "words", "in a row", "counts", "optional", "counted", "choices", "assertion"],
)
def test_what_may_take_endless_time_is_refused(root: Node) -> None:
    with pytest.raises(TooComplexError):
        PatternTree(sequence(root, END)).check_backtracking()


def test_an_end_that_cannot_fail_makes_no_engine_go_back() -> None:
    PatternTree(many(Choice((A, A)))).check_backtracking()
    PatternTree(sequence(many(AB), many(B, 1))).check_backtracking()


def test_size_is_bounded() -> None:
    for root in (
        many(Choice(tuple(map(chars, map(chr, range(65, 165)))))),
        many(many(many(A, 16, 16), 16, 16), 16, 16),
    ):
        with pytest.raises(TooComplexError):
            PatternTree(sequence(root, END)).check_backtracking()


def test_edges_and_lengths() -> None:
    words = PatternTree(sequence(Edge("word"), many(A, 2), Edge("word")))
    assert [words.matches(text, anywhere=True) for text in ("a", "aa", "baa", "b aa b", "")] == [
        *(False, True, False, True, False)
    ]
    assert words.shortest() == 2
    assert PatternTree(Choice((sequence(A, B), many(A)))).shortest() == 0
    behind = PatternTree(sequence(Look(sequence(A, B), False, False), B))
    assert behind.matches("abb", anywhere=True) and not behind.matches("bb", anywhere=True)
    assert PatternTree(sequence(Edge("line_begin"), B, Edge("end"))).matches("a\nb", anywhere=True)
