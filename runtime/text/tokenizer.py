"""Text to token ids and back, with the `tokenizers` library on the bundle's tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tokenizers

from enginewright.runtime.bundle.tokenizer_files import (
    CHAT_TEMPLATE_PATH,
    CHAT_TEMPLATES_FOLDER,
    TOKENIZER_PATH,
    TokenizerFiles,
)
from enginewright.runtime.bundle.tokenizer_tables import TABLES_PATH, TokenizerTables

from ..shared.errors import BundleError, EnginewrightError, RequestError, shown
from .control_tokens import ControlTokens
from .quick_tokenizer import QuickTokenizer
from .tokenizer_limits import check_tokenizer_json

if TYPE_CHECKING:
    from enginewright.runtime.bundle.reader import Bundle

    from .chat_format import ChatFormat
    from .chat_template import ChatTemplate, Message
    from .fill_in_middle import FillInMiddle

_JINJA = re.compile(r"\{[{%#]|\n")
_REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3
"""The most U+FFFD characters at a text's end that may become a character with the next token.

A UTF-8 character has at most 4 bytes, so up to 3 bytes wait for the rest.
"""
_CONTEXT = 8
_LONGEST_WINDOW = 64
_KEPT_FORMATS = 16
"""The number of chat formats that are cached for templates that callers pass."""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters_of_bytes() -> dict[str, int]:
    """Returns the letter that stands for a byte in byte-level tokenizers -> the byte.

    A visible character stands for its own byte; other bytes have letters from U+0100 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    bytes_of = {chr(byte): byte for byte in seen}
    others = [byte for byte in range(256) if byte not in seen]
    return bytes_of | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES_OF_LETTERS = _letters_of_bytes()


class Tokenizer:
    """The tokenizer of a bundle, and its chat templates by name. "default" is used by chats that name no template.

    Attributes:
        special_ids: tokens that have no text.
        response_template: JSON by which transformers reads the model's answers; None if the model has none.
        chat_codes: cached data of answer parsers for this tokenizer, by format.
        chat_templates: the Jinja text of each template by name. The first conversation compiles it.
    """

    def __init__(self, files: TokenizerFiles, read_json: Callable[[], str] | None = None) -> None:
        """Raises BundleError naming the file that is missing or damaged.

        Args:
            files: the bundle's tokenizer files.
            read_json: reads tokenizer.json if the tables don't suffice; with it, ``files`` needn't contain the text.
        """
        self._tokenizer: tokenizers.Tokenizer | QuickTokenizer
        if files.tables is not None and read_json is not None:
            read = read_json
            with what_tokenizers_raises(_damaged(TABLES_PATH)):
                tables = TokenizerTables(files.tables)
                check_tokenizer_json(tables.characters_json, longest=tables.longest)
                self._tokenizer = QuickTokenizer(tables, lambda: library_tokenizer(read()))
        elif files.tokenizer_json is None:
            raise BundleError(f"{TOKENIZER_PATH} is missing", hint="Pass token ids instead of text.")
        else:
            self._tokenizer = library_tokenizer(files.tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # A decoder of bytes would take the letters of these tokens, which are text, for bytes.
        self._literal = frozenset(
            index
            for index, token in added.items()
            if not token.content.isascii() and BYTES_OF_LETTERS.keys() >= set(token.content) and self._byte_level
        )
        self._before = self._added(files.special_tokens, "bos")
        self._after = self._added(files.special_tokens, "eos")
        self._special_tokens = files.special_tokens
        self.response_template = files.response_template
        self.chat_templates: dict[str, str] = dict(files.other_templates)
        if files.chat_template is not None:
            self.chat_templates["default"] = files.chat_template
        self._added_tokens = {token.content: index for index, token in added.items()}
        self.chat_codes: dict[Any, Any] = {}
        self._formats: dict[str | None, ChatFormat] = {}
        self._compiled: dict[str, ChatTemplate] = {}
        self._guarded: dict[str, ChatTemplate | None] = {}

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Tokenizer | None:
        """Returns the tokenizer of a bundle; None if the bundle has none. With the export's tables it starts quickly.

        Raises BundleError naming the file that is damaged.
        """
        if not {TOKENIZER_PATH, TABLES_PATH} <= bundle.files.keys():
            return cls(bundle.tokenizer_files()) if TOKENIZER_PATH in bundle.files else None
        files = bundle.tokenizer_files(whole=False)
        return cls(files, lambda: bundle.read_bytes(TOKENIZER_PATH, unaltered=True).decode())

    def to_json(self) -> str:
        """Returns the text of an equivalent tokenizer.json."""
        return str(self._tokenizer.to_str())

    @property
    def vocabulary(self) -> dict[int, str]:
        """Returns the spelling of each token id in the tokenizer's file, special tokens included."""
        return {index: token for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @property
    def added_tokens(self) -> dict[str, int]:
        """The spelling, in the tokenizer's file, of each token that was added to the vocabulary -> its id."""
        return self._added_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of ``text``.

        Args:
            text: any text.
            add_special_tokens: True adds the tokens that the model expects around a text.

        Raises:
            RequestError: ``text`` has lone surrogates (Python decodes bytes that aren't UTF-8 so), or a word for which
                the tokenizer has no tokens.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: {shown(text)} isn't text", hint="Pass a string.")
        text = str.__str__(text)
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"prompt: {text[e.start]!r} isn't a character", hint="Pass text in UTF-8.") from e
        hint = "Pass token ids instead."
        with what_tokenizers_raises(lambda e: RequestError(f"prompt: the tokenizer can't take it: {e}", hint=hint)):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens:
            before, after = self.added_around(ids)
            return before + ids + after
        return ids

    def added_around(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the tokens to add before and after a text, because the library doesn't add them itself.

        ``ids``: the library's tokens of the text.
        """
        before = [] if ids[:1] == self._before else self._before
        after = [] if ids[-1:] == self._after else self._after
        return before, after

    @property
    def most_added(self) -> int:
        """The most tokens that ``added_around`` can return, before and after together."""
        return len(self._before) + len(self._after)

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, which the first use may have to read."""
        return self._tokenizer.whole() if isinstance(self._tokenizer, QuickTokenizer) else self._tokenizer

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; ids outside the vocabulary are skipped. Raises RequestError if ``ids`` isn't
        a list.
        """
        try:
            literal = not self._literal.isdisjoint(ids)
        except TypeError as e:
            raise RequestError(f"ids: {shown(ids)} isn't a list of token ids", hint="Pass a list of integers.") from e
        if literal:
            pieces = (list(group) for _, group in groupby(ids, self._literal.__contains__))
            return "".join(
                self._text_of_literals(piece, skip_special_tokens)
                if piece[0] in self._literal
                else self.decode(piece, skip_special_tokens=skip_special_tokens)
                for piece in pieces
            )
        with what_tokenizers_raises(lambda e: BundleError(f"{TOKENIZER_PATH}: it can't decode tokens: {e}")):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def _text_of_literals(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.spelled(i) for i in ids if not (skip_special_tokens and i in self.special_ids))

    def encode_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """Returns the token ids of a conversation up to the assistant's turn: ``encode`` of ``render_chat``.

        No special tokens are added, as the template writes them. As in transformers, a message that contains the
        spelling of a special token becomes that token; ``LLM.chat`` encodes it as text, see ``guarded_chat``.
        """
        text = self.render_chat(messages, chat_template=chat_template, **options)
        return self.encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any) -> str:
        """Returns the text of a conversation up to the assistant's turn.

        Args:
            messages: the turns.
            chat_template: the name of one of the model's templates, or the text of another. None uses "tool_use" if
                that exists and ``tools`` are passed, else "default".
            options: see ``ChatTemplate.render``.

        Raises:
            BundleError: the model's template is damaged; names its file and line.
            RequestError: there is no such template, or the template refuses the messages.
        """
        try:
            if isinstance(messages, (str, Mapping)):
                raise TypeError
            messages = list(messages)
        except TypeError as e:
            raise RequestError(f"messages: {shown(messages)} isn't a list", hint="Pass a list of messages.") from e
        template = self._template(chat_template, options.get("tools") is not None)
        return template.render(messages, **options)

    def guarded_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        of_params: Collection[str] = (),
        **options: Any,
    ) -> str:
        """Returns the text of a conversation for ``encode_guarded``, in which only the template writes control tokens.

        ``render_chat`` ignores arguments that the template doesn't read, as in transformers; this raises RequestError
        for them: see ``ChatTemplate.checked``.
        """
        template = self._template(chat_template, options.get("tools") is not None)
        checked = template.checked(messages, options, of_params)
        control = self._control_tokens
        source = template.source
        special = {k: control.guard(v) for k, v in options.items() if k in self._special_tokens and isinstance(v, str)}
        if source not in self._guarded:
            self._guarded[source] = self._guarded_template(template)
        guarded = self._guarded[source]
        if guarded is None:
            text = template.render(control.break_up(checked), **control.break_up(options))
            return control.guard_composed(text, template.render(control.neutral(checked), **control.neutral(options)))
        try:
            return guarded.render(checked, **(options | special))
        except EnginewrightError as e:
            raise e.reworded(control.unguard(e.message), hint=e.hint) from None

    def encode_guarded(self, text: str) -> list[int]:
        """Encodes a text of ``guarded_chat``, or the first part of one. Control tokens are recognised only where the
        template wrote them, never in a message. Raises the errors of ``encode``.
        """
        return self._control_tokens.encode(text, partial(self.encode, add_special_tokens=False))

    def unguarded(self, text: str) -> str:
        """Returns a text of ``guarded_chat`` without its guards."""
        return self._control_tokens.unguard(text)

    def guarded(self, text: str) -> str:
        """Returns a text of the model with the guards that ``guarded_chat`` adds."""
        return self._control_tokens.guard(text)

    @cached_property
    def template_appends(self) -> bool | None:
        """True if the chat template only appends: a longer conversation's text begins with that of a shorter one.

        Then a prefix cache can reuse all but the last turn. A template that drops the reasoning of earlier answers, or
        moves the tools, doesn't append. The result comes from a few sample conversations.
        None if there is no template, or it refuses them.
        """
        messages = [{"role": role, "content": f"-{i}-"} for i, role in enumerate(("user", "assistant") * 2 + ("user",))]
        try:
            source = self._template(None, False).source
            appends = self._appends(messages)
            if appends and "think" in source:
                thought = [
                    m | {"content": f"<think>\n+\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m
                    for m in messages
                ]
                appends = self._appends(thought)
        except EnginewrightError:
            return None
        return appends

    def _appends(self, said: Sequence[Message]) -> bool:
        shorter = [(said[:i], said[i]["content"]) for i in range(1, len(said), 2)]
        whole = self.render_chat(said)
        for begin, answer in shorter:
            # Where the template itself begins the reasoning, the answer begins behind that.
            text = self.render_chat(begin)
            rest = answer if not text.rstrip().endswith("<think>") else answer.removeprefix("<think>\n")
            # A space before the answer may be the model's own first one.
            if not whole.startswith(text) or not whole[len(text) :].lstrip().startswith(rest.lstrip()):
                return False
        return True

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The format of reasoning and tool calls in the model's answers; named "plain" if they have neither.

        The first use renders a conversation, which starts a process.
        """
        return self.chat_format_of(None)

    def chat_format_of(self, chat_template: str | None) -> ChatFormat:
        """Returns the chat format of another template, by its name or text. Raises the errors of ``render_chat``."""
        from .chat_format import choose_format

        if chat_template not in self._formats:
            if len(self._formats) >= _KEPT_FORMATS:
                self._formats = {}
            self._formats[chat_template] = choose_format(self, chat_template)
        return self._formats[chat_template]

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The model's tokens for filling in the middle; None if the model has none."""
        from .fill_in_middle import FillInMiddle

        return FillInMiddle.from_tokenizer(self)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    def _guarded_template(self, template: ChatTemplate) -> ChatTemplate | None:
        """Returns the template with guarded control tokens; None if it composes control tokens from parts."""
        control = self._control_tokens
        guarded = template.with_source(control.guard(template.source), control.guard)
        for roles in ("user",), ("system", "user"), ("user", "assistant", "user"):
            messages = [{"role": role, "content": "-"} for role in roles]
            with suppress(RequestError):
                text = guarded.render(messages)
                if control.spelled(text) or control.unguard(text) != template.render(messages):
                    return None
        return guarded

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """Calls ``encode_chat``, or ``render_chat`` if ``tokenize`` is False.

        Name and defaults are those of transformers: the assistant's turn begins only with ``add_generation_prompt``.
        """
        call = self.encode_chat if tokenize else self.render_chat
        return call(conversation, add_generation_prompt=add_generation_prompt, **options)

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Name of a special token, such as "eos_token" -> the model's entry for it, as in ``TokenizerFiles``."""
        return dict(self._special_tokens)

    @property
    def special_names(self) -> list[str]:
        """The model's special tokens, as variables of the chat template: bos_token, eos_token, ..."""
        return list(self._special_tokens)

    def spelled(self, index: int) -> str:
        """Returns the spelling of a token in the tokenizer's file; empty outside the vocabulary."""
        return self._tokenizer.id_to_token(index) or ""

    def token_bytes(self, index: int) -> bytes:
        """Returns a token's bytes, which may be part of a character; empty outside the vocabulary.

        A first space that the decoder strips from a whole text is included.
        """
        name = self.spelled(index)
        if index in self.special_ids or not name:
            return name.encode()
        if index not in self._added_ids:
            if self._byte_level:
                return bytes(BYTES_OF_LETTERS[letter] for letter in name if letter in BYTES_OF_LETTERS)
            if (byte := _BYTE_TOKEN.fullmatch(name)) is not None:
                return bytes([int(byte[1], 16)])
            return name.replace("▁", " ").encode()
        return name.encode()

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in repr(self._tokenizer.decoder) or "ByteLevel" in str(self._tokenizer.decoder)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; a model may have further ones: ``LLM.model.eos_token_ids``."""
        return self._id_of("eos_token")

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this spelling in the tokenizer's file; None if there is none."""
        index: int | None = self._tokenizer.token_to_id(text)
        return index

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return self.token_id(token) if isinstance(token, str) else None

    def chat_template(self, name: str = "default") -> ChatTemplate:
        """Returns one of ``chat_templates``.

        Raises RequestError if there is no template of that name, and BundleError with file and line if it is damaged.
        """
        from .chat_template import ChatTemplate

        if not isinstance(name, str) or name not in self.chat_templates:
            names = ", ".join(sorted(self.chat_templates)) or "none"
            raise RequestError(f"chat_template: there is no template {shown(name)}", hint=f"The model has: {names}.")
        if name not in self._compiled:
            path = CHAT_TEMPLATE_PATH if name == "default" else f"{CHAT_TEMPLATES_FOLDER}{name}.jinja"
            self._compiled[name] = ChatTemplate(self.chat_templates[name], self._special_tokens, name=path)
        return self._compiled[name]

    def _template(self, name: str | None, has_tools: bool) -> ChatTemplate:
        names = ", ".join(sorted(self.chat_templates)) or "none"
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.chat_templates else "default"
            if name not in self.chat_templates:
                hint = "Use generate with a prompt instead."
                if self.chat_templates:
                    hint = f"Pass chat_template: the name of one it has ({names})."
                raise RequestError("chat: this model has no chat template", hint=hint)
        elif name not in self.chat_templates:
            return self._given_template(name, names)
        return self.chat_template(name)

    def _given_template(self, text: str, names: str) -> ChatTemplate:
        from .chat_template import ChatTemplate

        if not _JINJA.search(text):
            raise RequestError(
                f"chat: chat_template: there is no template {shown(text)}; the model has {names}",
                hint="Pass the name of one, or the text of a template.",
            )
        try:
            return ChatTemplate(text, self._special_tokens, name="chat_template")
        except BundleError as e:
            raise RequestError(f"chat: {e.message}", hint="Correct the template.") from e

    def detokenizer(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Makes a detokenizer for the text that follows ``prompt``."""
        return Detokenizer(self, prompt, skip_special_tokens=skip_special_tokens)

    def _added(self, special: Mapping[str, str | bool | None], name: str) -> list[int]:
        token = special.get(f"{name}_token")
        if not special.get(f"add_{name}") or not isinstance(token, str):
            return []
        index = self._tokenizer.token_to_id(token)
        if index is None:
            raise BundleError(f"{TOKENIZER_PATH}: no token {token!r}", hint="Export the bundle again.")
        return [index]


def library_tokenizer(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer. Raises BundleError if the file is damaged, or would take endless time or
    memory.
    """
    with what_tokenizers_raises(_damaged(TOKENIZER_PATH)):
        check_tokenizer_json(tokenizer_json)
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    for chance in ("dropout", "alpha", "nbest_size"):  # merges left out, or pieces drawn, at random: for training
        if getattr(tokenizer.model, chance, None) is not None:
            setattr(tokenizer.model, chance, None)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _damaged(path: str) -> Callable[[BaseException], BundleError]:
    return lambda e: BundleError(f"{path}: {e}", hint="Export the bundle again.")


class what_tokenizers_raises:  # noqa: N801  it is used as a function; a generator's entry and exit cost more
    """A context that converts errors of `tokenizers` by raising ``error(e)``.

    The library raises a bare Exception, or a BaseException when its Rust code panics.
    """

    __slots__ = ("_error",)

    def __init__(self, error: Callable[[BaseException], EnginewrightError]) -> None:
        self._error = error

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if e is None or isinstance(e, EnginewrightError):
            return
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            raise self._error(e) from e


class Detokenizer:
    """Decodes tokens incrementally. The pieces together are the text that follows the prompt.

    A decoder may strip the space before a text's first word, and turns part of a character into U+FFFD. So new tokens
    are decoded together with those of the piece before them, and a text that ends in U+FFFD is held back until it is
    complete. Special tokens are skipped if ``skip_special_tokens``.

    In invalid UTF-8, decoders with byte fallback turn the whole run of bytes into U+FFFD, also valid characters
    before the invalid byte. A stream has already output those characters by then.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = self._context([t for t in prompt[-2 * _CONTEXT :] if t not in self._skipped])
        self._clean = len(self._window)  # tokens of the window after which no character was incomplete
        self._given = len(self._decode(self._window))  # characters of the window's text that are out

    def push(self, token: int) -> str:
        """Returns the text that ``token`` completes; may be empty."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        unsure = len(text) - len(text.rstrip(_REPLACEMENT))
        no_text = len(self._window) > _LONGEST_WINDOW  # bytes that no character needs so many of
        if no_text:
            unsure = min(unsure, _MOST_INCOMPLETE)
        piece = text[self._given : len(text) - unsure]
        self._given = max(self._given, len(text) - unsure)
        if not unsure:
            self._begin_window(self._clean, 0)
            self._clean = len(self._window)
        elif no_text:
            self._begin_window(len(self._window) - _CONTEXT, len(text) - self._given)
            self._clean = 0
        return piece

    def flush(self) -> str:
        """Returns the text that was held back; call it at the end."""
        text = self._decode(self._window)
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece

    def _begin_window(self, start: int, held: int) -> None:
        """Drops the tokens of the window before index ``start``, unless the other tokens have no text.

        ``held``: the number of characters at the end of their text that weren't output yet.
        """
        if text := self._decode(self._window[start:]):
            del self._window[:start]
            self._given = max(len(text) - held, 0)

    def _context(self, prompt: list[int]) -> list[int]:
        """Returns the shortest end of the prompt whose text consists of whole characters; the whole prompt if it has no
        text.
        """
        text = ""
        for n in range(1, min(len(prompt), _CONTEXT) + 1):
            text = self._decode(prompt[-n:])
            if text and _REPLACEMENT not in text:
                return prompt[-n:]
        return [] if text else prompt[-_CONTEXT:]  # a space that the decoder strips here, and none after it
