"""``optimize chat``: a conversation in the terminal."""

from __future__ import annotations

import difflib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError
from enginewright.runtime.shared.json_document import parse_json

from .console import print_error, print_json, print_styled, reported
from .exported import exported
from .options import AsJson, ModelPath, ModelRecipe, Sampling, Serving, TextOnly, grouped, named_value
from .streaming import StreamPrinter, conversation, result_row
from .template_options import Template
from .terminal import Wrapped, read_turn, terminal_width

if TYPE_CHECKING:
    from enginewright.runtime.engine.llm import LLM
    from enginewright.runtime.requests.sampling import SamplingParams
    from enginewright.runtime.text.chat_format import ChatParser, Message

EPILOG = (
    "Examples:\n\n"
    "  optimize chat smollm2.bundle\n\n"
    "  optimize chat model.gguf\n\n"
    "  optimize chat HuggingFaceTB/SmolLM2-135M-Instruct --recipe int4-awq\n\n"
    '  optimize chat smollm2.bundle --system "Answer briefly." --temperature 0.7\n\n'
    "  echo Hello | optimize chat smollm2.bundle --max-tokens 32 --scheduling classes.toml"
)
HELP = """\
  /help             shows this
  /retry            answers the last turn again, with another seed
  /edit [TEXT]      changes the last turn, and answers that
  /reset            forgets the conversation
  /system [TEXT]    sets the system message and begins anew; without TEXT, shows it
  /set [NAME VALUE] sets temperature, max_tokens or another parameter, or a variable of the template
  /save FILE        writes the conversation, as JSON
  /load FILE        continues a conversation that was saved
  /quit             ends (so do /exit and Ctrl-D)
Ctrl-C stops an answer. Pasted lines are one turn."""
_ONE_ANSWER = ("n", "best_of", "num_beams")


@reported
@grouped
def command(
    model: ModelPath,
    *,
    recipe: ModelRecipe = None,
    template: Template,
    sampling: Sampling,
    serving: Serving,
    as_json: AsJson = False,
    quiet: TextOnly = False,
) -> None:
    """Holds a conversation in the terminal. From a pipe, each line is one turn, and only the answers are printed."""
    from enginewright import LLM, SamplingParams
    from enginewright.runtime.text.template_process import template_process

    params = SamplingParams(**(settings := sampling.given()))
    if name := next((name for name in _ONE_ANSWER if name in settings), None):
        raise typer.BadParameter(f"--param {name}: a turn of a conversation has one answer, as it comes")
    options = template.given()
    interactive = sys.stdin.isatty()
    if interactive and as_json:
        raise typer.BadParameter("--json is for a conversation from a pipe, which has an end")
    served = serving.given()
    bundle = exported(model, recipe=recipe, quiet=quiet)
    template_process.start()  # beside the opening of the model
    start = time.perf_counter()
    with LLM(bundle, **served) as llm:
        if not llm.has_chat_template:
            raise RequestError(f"{model}: this model has no chat template", hint="Use `optimize generate` instead.")
        rows: list[dict[str, Any]] | None = [] if as_json else None
        chat = Chat(llm, params, options, template.system, interactive=interactive, quiet=quiet, rows=rows)
        chat.check(conversation("Hello", template.system))  # an option that is wrong is wrong for each turn
        if interactive and not quiet:
            _say(f"{llm.model.name}. /help shows what can be typed.")
        chat.run(_typed() if interactive else _piped())
    if as_json:
        print_json({"results": chat.rows, "seconds": time.perf_counter() - start})
    if chat.failed is not None and not interactive:
        raise typer.Exit(chat.failed.exit_code)


class _QuitError(Exception):
    """Ends the conversation."""


@dataclass
class Chat:
    """A conversation, with the commands that can be typed in it.

    Attributes:
        options: variables of the chat template.
        rows: results for ``--json``; None if answers are printed while they are generated.
        turns: the messages without the system message.
        failed: the error of the first turn that failed; later turns still run.
    """

    llm: LLM
    params: SamplingParams
    options: dict[str, Any]
    system: str | None = None
    interactive: bool = False
    quiet: bool = False
    rows: list[dict[str, Any]] | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    failed: EnginewrightError | None = None
    _retries: int = 0

    def run(self, lines: Iterator[str]) -> None:
        """Answers turns, and runs commands: lines that begin with /."""
        commands: dict[str, Callable[[str], None]] = {
            **{"/exit": self._quit, "/quit": self._quit, "/help": lambda rest: _say(HELP)},
            **{"/reset": lambda rest: self.turns.clear(), "/retry": self._retry, "/edit": self._edit},
            **{"/system": self._system, "/set": self._set, "/save": self._save, "/load": self._load},
        }
        for line in lines:
            word, _, rest = line.partition(" ")
            try:
                if word in commands:
                    commands[word](rest.strip())
                elif word.startswith("/") and "\n" not in line:
                    _say(f"there is no {word}; /help shows what there is")
                else:
                    self._ask(line)
            except _QuitError:
                return

    def check(self, messages: list[dict[str, Any]]) -> None:
        """Raises RequestError for arguments that the model's template would ignore, or refuses."""
        self.llm.tokenizer.guarded_chat(messages, **self.options)

    def _ask(self, text: str) -> None:
        self._retries = 0
        self.turns.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        """Answers the last turn; if that fails, the turn is removed and the conversation continues."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        params = replace(self.params, seed=(self.params.seed or 0) + self._retries) if self._retries else self.params
        try:
            turn = self._stream([*before, *self.turns], params)
        except (RequestError, CapacityError) as e:
            self.failed = self.failed or e
            dropped = self.turns.pop()
            if self.rows is not None:
                self.rows.append({"prompt": dropped["content"], "error": e.message})
            print_error(e)
            if self.interactive and self.turns:
                print_styled("  /reset forgets the conversation so far.", dim=True)
        else:
            self.turns.append(turn)

    def _parser(self, messages: list[dict[str, Any]], params: SamplingParams) -> ChatParser | None:
        """Returns the parser of an answer; None if answers are plain text, or a stop text may cut them anywhere."""
        tokenizer = self.llm.tokenizer
        chat_format = tokenizer.chat_format_of(self.options.get("chat_template"))
        if params.stop or not (chat_format.has_calls or chat_format.has_reasoning):
            return None
        prompt = tokenizer.encode_guarded(tokenizer.guarded_chat(messages, **self.options))
        return chat_format.parser(tokenizer, tools=self.options.get("tools"), prompt_ids=prompt)

    def _stream(self, messages: list[dict[str, Any]], params: SamplingParams) -> dict[str, Any]:
        """Prints the model's answer while it is generated, and returns it. In a terminal, Ctrl-C ends only the
        answer.
        """
        if self.rows is not None:
            (result,) = self.llm.chat(messages, params, **self.options)
            if result.error is not None:
                raise result.error
            self.rows.append({"prompt": messages[-1]["content"]} | result_row(result))
            return as_turn(result.text, None if params.stop else result.message)
        parser = self._parser(messages, params)
        printer = StreamPrinter(wrap=self.interactive and sys.stdout.isatty(), parser=parser)
        with closing(self.llm.stream_chat(messages, params, **self.options)) as pieces:
            try:
                printer.print(pieces)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print(" (stopped)")
        if self.interactive and not self.quiet:
            print_styled(printer.speed(), dim=True)
        return as_turn(printer.text, None if parser is None else parser.message)

    def _quit(self, rest: str) -> None:
        raise _QuitError

    def _system(self, rest: str) -> None:
        if rest:
            try:
                self.check(conversation("Hello", rest))
            except RequestError as e:
                print_error(e)
                return
            self.system = rest
            self.turns.clear()
        _say(f"system: {self.system or 'none'}")

    def _set(self, rest: str) -> None:
        from enginewright.runtime.requests.sampling import SamplingParams

        known = [one.name for one in fields(SamplingParams) if one.name not in _ONE_ANSWER]
        if not rest:
            plain = SamplingParams()
            for name in known:
                mark = "" if getattr(self.params, name) == getattr(plain, name) else "  (set)"
                _say(f"  {name} {getattr(self.params, name)!r}{mark}")
            for name, value in self.options.items():
                _say(f"  {name} {value!r}  (of the template)")
            return
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if not text.strip() or not name.isidentifier():
            _say("/set NAME VALUE, such as /set temperature 0.7; /set alone shows what there is")
            return
        _, value = named_value("/set", f"{name}={text.strip()}", "temperature=0.7")
        params, options = self.params, self.options
        try:
            if name in known:
                self.params = replace(params, **{name: value})
            else:
                self.options = options | {name: value}
                self.check(conversation("Hello", self.system))
            _say(f"{name} {value!r}")
        except RequestError as e:
            self.params, self.options = params, options
            near = difflib.get_close_matches(name, known, 1)
            print_error(e if name in known or not near else RequestError(f"/set: no {name}; did you mean {near[0]}?"))

    def _retry(self, rest: str) -> None:
        if not self.turns:
            _say("there is no turn yet")
            return
        if self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        self._retries += 1
        if self.params.temperature == 0:
            _say("greedy answers are the same each time; /set temperature 0.8 draws others")
        self._answer()

    def _edit(self, rest: str) -> None:
        last = next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), None)
        if last is None:
            _say("there is no turn yet")
            return
        if not rest and not self.interactive:
            _say("/edit TEXT: from a pipe the new text stands behind it")
            return
        text = rest or read_turn("edit> ", self.turns[last]["content"])
        if text and text.strip():
            del self.turns[last:]
            self._ask(text.strip())

    def _save(self, rest: str) -> None:
        if (file := _file_of("/save", rest)) is None:
            return
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            if file.exists():
                _read_turns(file)  # a conversation may be replaced, and nothing else
            part = file.with_name(f".{file.name}.part")
            part.write_text(json.dumps([*before, *self.turns], indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(file)
        except OSError as e:
            _say(f"/save {file}: {e.strerror or e}")
        except ValueError as e:
            _say(f"/save {file}: it exists, and isn't a conversation: {e}")
        else:
            _say(f"saved {len(self.turns)} messages to {file}")

    def _load(self, rest: str) -> None:
        if (file := _file_of("/load", rest)) is None:
            return
        try:
            turns = _read_turns(file)
            self.check(turns)
        except OSError as e:
            _say(f"/load {file}: {e.strerror or e}")
        except RequestError as e:
            print_error(e)
        except ValueError as e:
            _say(f"/load {file}: it isn't a conversation: {e}")
        else:
            self.system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
            self.turns, self._retries = turns, 0
            _say(f"system: {self.system or 'none'}; {len(turns)} messages; the last one:")
            _say(f"{turns[-1]['role']}: {turns[-1]['content']}" if turns else "none")
            if turns and turns[-1]["role"] == "user":
                self._answer()


def as_turn(text: str, message: Message | None) -> dict[str, Any]:
    """Returns an answer as a message, with reasoning and calls in separate fields, as templates read them."""
    if message is None or not (message.reasoning or message.calls):
        return {"role": "assistant", "content": text}
    turn: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.calls:
        turn["tool_calls"] = [
            {
                "id": call.id or f"call{i:05}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for i, call in enumerate(message.calls)
            if call.complete
        ]
    return turn


def _say(text: str) -> None:
    wrapped = Wrapped(sys.stderr.write, lambda: terminal_width(sys.stderr))
    wrapped.write(f"{text}\n")
    sys.stderr.flush()


def _file_of(command: str, rest: str) -> Path | None:
    try:
        words = shlex.split(rest)
    except ValueError:
        words = []
    if len(words) != 1:
        _say(f"{command} FILE")
        return None
    return Path(words[0]).expanduser()


def _read_turns(file: Path) -> list[dict[str, Any]]:
    """Returns a saved conversation. Raises OSError or ValueError."""
    turns = parse_json(read_regular(file, most=MOST_JSON_BYTES))
    if not isinstance(turns, list) or not turns:
        raise ValueError("it must be a list of messages")
    for i, one in enumerate(turns):
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise ValueError(f"message {i} needs a role and a content, both text")
    return turns


def _typed() -> Iterator[str]:
    """Reads turns from a prompt until the input ends; skips blank ones."""
    while (text := read_turn("> ")) is not None:
        if text.strip():
            yield text.strip()


def _piped() -> Iterator[str]:
    """Yields the lines of stdin that aren't blank."""
    while line := sys.stdin.readline():
        if line.strip():
            yield line.strip()
