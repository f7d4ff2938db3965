from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner, Result

import enginewright as ew
from enginewright.optimizer.cli.app import app

PARAMS = ew.SamplingParams(max_tokens=6)


def chat(bundle: Path, lines: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", str(bundle), "--max-tokens", "6", *arguments], input=lines)


def answers(bundle: Path, questions: list[str], system: str | None = None) -> str:
    """What a conversation gives, from the library."""
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
    said = chat(tiny_bundle, "Hello\nWho are you?\n")
    result = chat(tiny_bundle, "Hello\nWho are you?\n", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert [row["prompt"] for row in rows] == ["Hello", "Who are you?"]
    assert "".join(row["text"] + "\n" for row in rows) == said.stdout
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


def read_until(terminal: int, text: str, seconds: float = 60) -> str:
    """What the terminal shows up to ``text``."""
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
        assert process.wait(timeout=60) == 0
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
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "\ninterrupted\n"
