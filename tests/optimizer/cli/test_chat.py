from __future__ import annotations

import fcntl
import json
import os
import pty
import readline
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.chat import as_turn
from enginewright.optimizer.cli.streaming import StreamPrinter
from enginewright.runtime.requests.outputs import StreamPiece
from tests.runtime.text.chat_streams import answer, format_of, tokenizer_of
from tests.waiting import HANG

PARAMS = ew.SamplingParams(max_tokens=6)


def chat(bundle: Path, lines: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", str(bundle), "--max-tokens", "6", *arguments], input=lines)


def answers(bundle: Path, questions: list[str], system: str | None = None) -> str:
    """The answers of a conversation, from the library."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []
    text = ""
    with ew.LLM(bundle) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, PARAMS)[0].text
            messages.append({"role": "assistant", "content": answer})
            text += answer + "\n"
    return text


def test_each_line_is_a_turn_of_one_conversation(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "Hello\n\nWho are you?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == answers(tiny_bundle, ["Hello", "Who are you?"])
    assert result.stdout != answers(tiny_bundle, ["Hello"]) + answers(tiny_bundle, ["Who are you?"])


def test_json_is_one_document_at_the_end(tiny_bundle: Path) -> None:
    run = chat(tiny_bundle, "Hello\nWho are you?\n")
    result = chat(tiny_bundle, "Hello\nWho are you?\n", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert [row["prompt"] for row in rows] == ["Hello", "Who are you?"]
    assert "".join(row["text"] + "\n" for row in rows) == run.stdout
    assert all(row["finish_reason"] in ("stop", "length") and row["token_ids"] for row in rows)


def test_reset_forgets(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "Hello\n/reset\nWho are you?\n/exit\nnever asked\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == answers(tiny_bundle, ["Hello"]) + answers(tiny_bundle, ["Who are you?"])


def test_the_system_message(tiny_bundle: Path) -> None:
    expected = answers(tiny_bundle, ["Hello"], "Be brief.")
    assert expected != answers(tiny_bundle, ["Hello"])
    assert chat(tiny_bundle, "Hello\n", "--system", "Be brief.").stdout == expected
    changed = chat(tiny_bundle, "/system Be brief.\n/system\nHello\n")
    assert changed.stdout == expected
    assert changed.stderr.count("system: Be brief.") == 2


def test_an_empty_system_message_is_one(tiny_bundle: Path) -> None:
    expected = answers(tiny_bundle, ["Hello"], "")
    assert expected != answers(tiny_bundle, ["Hello"])
    assert chat(tiny_bundle, "Hello\n", "--system", "").stdout == expected


def test_a_model_without_a_chat_template(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "plain.bundle"
    shutil.copytree(tiny_bundle, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    del manifest["files"]["tokenizer/chat_template.jinja"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    result = chat(bundle, "")
    assert result.exit_code == 8
    assert "optimize generate" in result.stderr


def test_help_and_what_is_no_command(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "/help\n/nothing\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "/reset" in result.stderr
    assert "there is no /nothing" in result.stderr


def test_a_conversation_that_no_longer_fits(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "x" * 600 + "\n")
    assert result.exit_code == 8
    assert "context" in result.stderr


def read_until(terminal: int, text: str, seconds: float = HANG) -> str:
    """The terminal's output up to ``text``."""
    shown = b""
    deadline = time.monotonic() + seconds
    while text.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {text!r} in {shown!r}"
        shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")


def test_in_a_terminal(tiny_bundle: Path) -> None:
    terminal, child = pty.openpty()
    code = "from enginewright.optimizer.cli.app import main; main()"
    command = [sys.executable, "-c", code, "chat", str(tiny_bundle), "--max-tokens", "6"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    try:
        assert "/help" in read_until(terminal, "> ")
        os.write(terminal, b"Hello\n")
        assert "tokens in" in read_until(terminal, "> ")
        os.write(terminal, b"x" * 600 + b"\n")
        refused = read_until(terminal, "> ")  # and the conversation goes on
        assert "error:" in refused
        assert "context" in refused
        os.write(terminal, b"/exit\n")
        assert process.wait(timeout=HANG) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_ctrl_c_ends_it_cleanly(tiny_bundle: Path) -> None:
    code = "from enginewright.optimizer.cli.app import main; main()"
    command = [sys.executable, "-c", code, "chat", str(tiny_bundle), "--max-tokens", "6"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("Hello\n")
        process.stdin.flush()
        assert process.stdout.readline()  # it has answered, and waits for more
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG) == 130
        assert process.stderr.read() == "\ninterrupted\n"


def test_an_overflowing_turn_drops_no_other(tiny_bundle: Path) -> None:
    """It is said, and the others are answered as if it hadn't been."""
    lines = "Hello\n" + "x" * 600 + "\nWho are you?\n"
    result = chat(tiny_bundle, lines)
    assert result.exit_code == 8
    assert result.stdout == answers(tiny_bundle, ["Hello", "Who are you?"])
    assert result.stderr.count("error:") == 1 and "context" in result.stderr
    as_json = chat(tiny_bundle, lines, "--json")
    assert as_json.exit_code == 8
    rows = json.loads(as_json.stdout)["results"]
    assert [row["prompt"][:5] for row in rows] == ["Hello", "xxxxx", "Who a"]
    assert "context" in rows[1]["error"] and "".join(row["text"] + "\n" for row in (rows[0], rows[2])) == result.stdout


def test_save_and_load(tiny_bundle: Path, tmp_path: Path) -> None:
    file, foreign = tmp_path / "my talk.json", tmp_path / "notes.txt"
    foreign.write_text("mine")
    run = chat(
        tiny_bundle, f"/system Be brief.\nHello\n/save '{file}'\n/save '{foreign}'\n/save {tmp_path}/no/x\n/save\n"
    )
    assert run.exit_code == 0, run.output
    messages = json.loads(file.read_text())
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] + "\n" == run.stdout
    assert foreign.read_text() == "mine" and "notes.txt: it exists, and isn't a conversation" in run.stderr
    assert "No such file" in run.stderr and "/save FILE" in run.stderr
    assert sorted(tmp_path.iterdir()) == [file, foreign]
    went_on = chat(tiny_bundle, f"/load '{file}'\nWho are you?\n/save '{file}'\n")
    assert run.stdout + went_on.stdout == answers(tiny_bundle, ["Hello", "Who are you?"], "Be brief.")
    assert len(json.loads(file.read_text())) == 5
    for text, problem in (
        ("{", "it isn't a conversation"),
        ("[]", "it must be a list of messages"),
        ('[{"role": "user"}]', "message 0 needs a role and a content"),
        ('[{"role": "nobody", "content": "a"}]', "the role 'nobody'"),
    ):
        foreign.write_text(text)
        result = chat(tiny_bundle, f"/load {foreign}\nHello\n")
        assert problem in result.stderr and result.stdout == answers(tiny_bundle, ["Hello"])
    assert "No such file" in chat(tiny_bundle, f"/load {tmp_path}/none\n").stderr


def test_retry_draws_anew(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "/retry\n/set temperature 5\nHello\n/retry\n/retry\n", "--seed", "3")
    assert result.exit_code == 0, result.output
    expected = ""
    with ew.LLM(tiny_bundle) as llm:
        for seed in (3, 4, 5):
            params = ew.SamplingParams(max_tokens=6, temperature=5, seed=seed)
            expected += llm.chat([{"role": "user", "content": "Hello"}], params)[0].text + "\n"
    assert result.stdout == expected
    assert "there is no turn yet" in result.stderr
    assert "greedy answers are the same" in chat(tiny_bundle, "Hello\n/retry\n").stderr


def test_edit_replaces_the_last_turn(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "/edit x\nHello\nWho?\n/edit Who are you?\n/edit\n")
    assert result.exit_code == 0, result.output
    wrong, right = answers(tiny_bundle, ["Hello", "Who?"]), answers(tiny_bundle, ["Hello", "Who are you?"])
    assert result.stdout == wrong + right.removeprefix(answers(tiny_bundle, ["Hello"]))
    assert "there is no turn yet" in result.stderr and "/edit TEXT" in result.stderr


def test_set_changes_parameters(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "/set max_tokens=2\nHello\n/set\n")
    with ew.LLM(tiny_bundle) as llm:
        expected = llm.chat([{"role": "user", "content": "Hello"}], ew.SamplingParams(max_tokens=2))[0].text
    assert result.stdout == expected + "\n"
    assert "max_tokens 2  (set)" in result.stderr
    for wrong, words in (
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature hot", "temperature: 'hot' is out of range"),
        ("/set mood sunny", "mood: the model's template has no such variable"),
        ("/set n 2", "n: the model's template has no such variable"),
        ("/set temperature", "/set NAME VALUE"),
    ):
        result = chat(tiny_bundle, f"{wrong}\nHello\n")
        assert words in result.stderr and result.stdout == answers(tiny_bundle, ["Hello"])


def test_an_option_that_the_template_does_not_read_is_said_at_once(tiny_bundle: Path) -> None:
    result = chat(tiny_bundle, "Hello\nHello\n", "--set", "mood=sunny")
    assert result.exit_code == 8 and result.stdout == ""
    assert result.stderr.count("mood: the model's template has no such variable") == 1


def test_quit_and_exit(tiny_bundle: Path) -> None:
    for word in ("/quit", "/exit"):
        assert chat(tiny_bundle, f"Hello\n{word}\nHello\n").stdout == answers(tiny_bundle, ["Hello"])


PROMPT = "\x1b[?2004h> "  # with what readline says to the terminal: it wants to know of what is pasted


class Terminal:
    """``optimize chat`` in a terminal of its own."""

    def __init__(self, bundle: Path, *arguments: str) -> None:
        self.end, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 40, 0, 0))
        code = "from enginewright.optimizer.cli.app import main; main()"
        command = [sys.executable, "-c", code, "chat", str(bundle), "--max-tokens", "6", *arguments]
        environment = os.environ | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, start_new_session=True, env=environment
        )
        os.close(child)

    def type(self, keys: bytes, until: str = PROMPT) -> str:
        os.write(self.end, keys)
        return read_until(self.end, until)

    def interrupt(self, until: str) -> None:
        """Ctrl-C, until the text appears. Python overlooks one that comes right before it waits for a key."""
        seen = ""
        while until not in seen:
            self.process.send_signal(signal.SIGINT)
            while select.select([self.end], [], [], 1)[0]:
                seen += os.read(self.end, 4096).decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste")
def test_pasted_lines_are_one_turn_and_the_last_turn_can_be_edited(tiny_bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with Terminal(tiny_bundle, "--quiet") as terminal:
        read_until(terminal.end, PROMPT)
        terminal.type(b"\x1b[200~one\ntwo\nthree\x1b[201~", until="three")
        terminal.type(b"\n")
        assert "saved 2 messages" in terminal.type(f"/save {saved}\n".encode())
        assert json.loads(saved.read_text())[0]["content"] == "one\ntwo\nthree"
        terminal.type(b"/edit\n", until="three")  # the last turn stands there
        terminal.type(b" and four\n")
        assert "saved 2 messages" in terminal.type(f"/save {saved}\n".encode())
        assert json.loads(saved.read_text())[0]["content"] == "one\ntwo\nthree and four"
        terminal.type(b"half a line", until="half a line")
        terminal.interrupt("Ctrl-D ends")
        os.write(terminal.end, b"/quit\n")
        assert terminal.process.wait(timeout=HANG) == 0


def test_quiet_says_nothing_but_answers(tiny_bundle: Path) -> None:
    with Terminal(tiny_bundle, "--quiet") as terminal:
        assert "/help" not in read_until(terminal.end, PROMPT)
        assert "tokens in" not in terminal.type(b"Hello\n")


def test_reasoning_is_written_apart_and_calls_have_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [("now", {}), ("get_weather", {"city": "Oslo"})]
    one = answer("hermes", "Well.", "Hm. Let me see.", calls)
    pieces = [StreamPiece((token,), "") for token in one.ids]
    output = 'Well.\nnow {}\nget_weather {"city": "Oslo"}\n'
    for terminal, expected in ((False, output), (True, f"\x1b[2mHm. Let me see.\x1b[22m\n\n{output}")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        printer = StreamPrinter(parser=format_of("hermes").parser(tokenizer_of("hermes")))
        printer.print(pieces)
        assert capsys.readouterr().out == expected
        assert printer.text == "Well." and printer.tokens == len(one.ids)


def test_a_turn_with_a_call_is_as_templates_read_it() -> None:
    one = answer("hermes", None, "Hm.", [("get_weather", {"city": "Oslo"})])
    message = format_of("hermes").parse(tokenizer_of("hermes"), one.ids)
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    assert as_turn("...", message) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    assert as_turn("Hi", None) == {"role": "assistant", "content": "Hi"}
