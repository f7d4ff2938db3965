"""Rules of a grammar in Lark, in llguidance's dialect: texts, tokens and choices.

A marker that is a token of the vocabulary is written as that token, ``<[151657]>``; anything else is a text in quotes.
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...shared.errors import RequestError
from ...shared.json_document import JSON_GUIDANCE
from .markers import Vocabulary

ANY = "/(?s:.*)/"
_META = frozenset(r"\.+*?()|[]{}^$#&-~/" + '"')


def is_token(text: str, tokenizer: Vocabulary) -> bool:
    """Returns True if a text is a token that llguidance doesn't match as text: a special one, or one like ``<tag>``."""
    index = tokenizer.added_tokens.get(text)
    return (
        bool(text)
        and index is not None
        and (index in tokenizer.special_ids or re.fullmatch(r"<[^<>\s]+>", text) is not None)
    )


class RuleWriter:
    """Collects the rules of one grammar.

    Attributes:
        rules: name -> rule, in the order of the grammar.
        tokens: spelling -> id, of tokens that llguidance doesn't match as text.
        exact: True if a keyword of a schema that can't be enforced is an error.
        ignored: names of the keywords that can't be enforced; it is filled here.
    """

    def __init__(self, tokenizer: Vocabulary, *, exact: bool, ignored: set[str]) -> None:
        self.rules: dict[str, str] = {}
        self.tokens = {text: index for text, index in tokenizer.added_tokens.items() if is_token(text, tokenizer)}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.exact, self.ignored = exact, ignored

    @property
    def grammar(self) -> str:
        """The text of the whole grammar, with all rules added so far."""
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self.rules.items()) + "\n"

    def add(self, name: str, rule: str) -> str:
        """Adds a rule under ``name`` to the grammar, and returns the name."""
        self.rules[name] = rule
        return name

    def split(self, text: str) -> list[str | int]:
        """Splits a text into its parts: texts, and the ids of tokens that llguidance doesn't match as text."""
        parts: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [text[at : match.start()], self.tokens[match[0]]]
            at = match.end()
        return [part for part in (*parts, text[at:]) if part != ""]

    def as_written(self, text: str) -> str:
        """Returns the expression that matches a text exactly, with its tokens as tokens."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in self.split(text))

    def free_until(self, name: str, end: str, inner: str = "(?s:.*)") -> str:
        """Returns the expression that matches any text up to ``end``, and the end.

        Args:
            name: the name of the rule that is added.
            end: the text, or the token, that ends it.
            inner: regular expression of the text before the end.
        """
        first, *rest = self.split(end)
        if isinstance(first, int):
            return f"{self.add(name, f'/{inner}/')} {self.as_written(end)}"
        after = " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in rest)
        lazy = "[lazy]" if not rest else ""  # a token ends it, where one follows
        self.rules[f"{name}{lazy}"] = f"/{inner}{escaped(first)}/"
        return f"{name} {after}".strip()

    def one_of(self, rules: Sequence[str]) -> str:
        """Returns an expression for the choice of ``rules``, each of which begins with a quoted text.

        Common beginnings are written only once, because llguidance tries each alternative, and at most 2,000 of them.
        """
        parts = []
        for rule in rules:
            text, end = json.JSONDecoder().raw_decode(rule)
            parts.append((text, rule[end:].strip()))
        return _prefix_tree(parts)


def _prefix_tree(parts: Sequence[tuple[str, str]]) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for text, rest in parts:
        groups.setdefault(text[:1], []).append((text, rest))
    choices = []
    for first, group in groups.items():
        if not first:
            choices += [rest for _, rest in group]
            continue
        least, most = min(group)[0], max(group)[0]
        differ = (i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
        common = least[: next(differ, len(least))]
        below = _prefix_tree([(text[len(common) :], rest) for text, rest in group])
        choices.append(f"{quoted(common)} {below}".strip())
    return choices[0] if len(choices) == 1 else f"( {' | '.join(choices)} )"


def quoted(text: str) -> str:
    """Returns a text as a string literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Returns a text with its special characters escaped for a regular expression."""
    spelled = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(spelled.get(char) or ("\\" + char if char in _META else char) for char in text)


def without(text: str) -> str:
    """Returns the Lark expression that matches every text that doesn't contain ``text``."""
    return f"{ANY} & ~/(?s:.*){escaped(text)}(?s:.*)/"


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the argument of ``%json``: a schema with llguidance's options."""
    return json.dumps({**schema, "x-guidance": JSON_GUIDANCE}, ensure_ascii=False)


def unmet(subject: str) -> RequestError:
    """Returns the error for a schema that no value meets. ``subject`` names the schema."""
    return RequestError(f"tools: nothing can meet the schema of {subject}", hint="Pass another schema.")
