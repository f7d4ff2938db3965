"""The script that stands for a model in the agents' task, and what is made of their turns."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import agents
import pytest

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.chat_format import ChatFormat
from enginewright.runtime.text.formats.table import FORMATS
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.requests.byte_tokens import byte_tokens_json

FOLDER = Path("/work")


def said(prompt: str, name: str = "opencode") -> str:
    return agents.turn(prompt, agents.RUN[name], FOLDER)


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def assistant(text: str) -> str:
    return f"{agents.ASSISTANT}{text}<|im_end|>\n"


def test_the_answer_is_the_next_one_of_the_last_turn() -> None:
    """However many answers an agent took before: one ends its turn at a call that breaks off, another goes on."""
    first, second = agents.STEPS[0], agents.STEPS[1]
    begin = "<tools>\n</tools>" + user(first.prompt)
    call = said(begin)
    assert json.loads(call.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]) == {
        "name": "bash",
        "arguments": {"command": first.command, **agents.RUN["opencode"].more},
    }
    after = begin + assistant(call) + user("<tool_response>\nhello\n</tool_response>")
    assert said(after) == first.sentence
    again = after + assistant("one") + assistant("two") + user(second.prompt)
    assert (
        second.command
        in json.loads(said(again).partition("<tool_call>\n")[2].partition("\n</tool_call>")[0])["arguments"]["command"]
    )


def test_a_call_breaks_off_before_it_is_made() -> None:
    step = next(step for step in agents.STEPS if step.cut)
    cut, whole, sentence = agents.answers(agents.RUN["codex"], step, FOLDER)
    assert whole.startswith(cut) and "<tool_call>" in cut and "</tool_call>" not in cut and sentence == step.sentence


def test_a_tool_shows_the_picture() -> None:
    step = next(step for step in agents.STEPS if step.looks)
    for name, agent in agents.RUN.items():
        texts = agents.answers(agent, step, FOLDER)
        assert (agents.PICTURE in texts[0]) == (name != "aider") and texts[-1].endswith(step.sentence)
    data = agents.picture()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (32, 32)


def test_an_agent_without_tools_writes_files() -> None:
    prompt = user("# a.txt") + user(agents.STEPS[1].prompt)
    assert said(prompt, "aider") == f"a.txt\n```\nhello world\n```\n{agents.STEPS[1].sentence}"
    assert said(prompt) == "A small file"  # a conversation without tools, of an agent that has some


@pytest.mark.parametrize("wrong", [None, "one turn", "a turn less"])
def test_a_task_is_done_where_every_turn_is(wrong: str | None) -> None:
    turns: list[dict[str, Any]] = [
        {"done": True, "requests": [{"prompt": 100 * i, "cached": 100 * i - 60, "answer": 41}]} for i in range(1, 6)
    ]
    if wrong == "one turn":
        turns[2]["done"] = False
    verdict = agents.judged(turns[: 4 if wrong == "a turn less" else 5])
    assert verdict["done"] == (wrong is None)
    assert verdict["cached_of_the_turn_before"][0] == pytest.approx(1.0)


@pytest.mark.parametrize("name", [name for name, agent in agents.RUN.items() if agent.tool])
def test_calls_of_the_script_are_read_by_a_format(name: str) -> None:
    tokenizer = Tokenizer(TokenizerFiles(tokenizer_json=byte_tokens_json([2]), special_tokens={}))
    agent, step = agents.RUN[name], agents.STEPS[0]
    parser = ChatFormat(next(one for one in FORMATS if one.name == "hermes")).parser(tokenizer, tools=())
    parser.push(tokenizer.encode(agents.answers(agent, step, FOLDER)[0], add_special_tokens=False))
    parser.finish()
    (call,) = parser.message.calls
    assert call.name == agent.tool and json.loads(call.arguments)[agent.argument] == step.command
