"""The variables that --tools and --set pass to the chat template, and those that it doesn't use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.template_options import Template

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
TEMPLATE = "{{ tools | tojson }}{{ mood }}{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("bundles") / "tools.bundle"))
    (copy / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["tokenizer/chat_template.jinja"]["bytes"] = len(TEMPLATE)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_they_reach_the_template(command: str, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    options = ["--tools", str(tmp_path / "tools.json"), "--set", "mood=sunny", "--max-tokens", "5"]
    prompt = ["Hi"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, str(bundle), *prompt, *options], input="Hi\n")
    assert result.exit_code == 0, result.output
    with ew.LLM(bundle) as llm:
        expected = llm.chat(
            [{"role": "user", "content": "Hi"}], ew.SamplingParams(max_tokens=5), tools=[TOOL], mood="sunny"
        )
        assert f"{json.dumps([TOOL])}sunnyHi" == llm.tokenizer.decode(expected[0].prompt_token_ids)
    assert result.stdout == expected[0].text + "\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=3", 3),
        ("a=[1, null]", [1, None]),
        ("a=yes", "yes"),
        ("a=", ""),
        ('a="3"', "3"),
        ("a=b=c", "b=c"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert Template(variables=[text]).given() == {"a": value}


@pytest.mark.parametrize("text", ["a", "=1", "a b=1"])
def test_what_is_no_variable(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=rf"--set {text}: not of the form NAME=VALUE"):
        Template(variables=[text]).given()


@pytest.mark.parametrize("name", ["messages", "params", "self"])
def test_what_is_taken(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=rf"--set {name}=1: '{name}' can't be set"):
        Template(variables=[f"{name}=1"]).given()


@pytest.mark.parametrize(
    ("content", "message"), [("{", "can't be read as JSON"), ("{}", "must be a list"), ("[1]", "must be a list")]
)
def test_what_are_no_tools(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ew.RequestError, match=rf"--tools .*tools\.json: {message}"):
        Template(tools=tmp_path / "tools.json").given()
    with pytest.raises(ew.RequestError, match=r"missing\.json: can't be read: No such file"):
        Template(tools=tmp_path / "missing.json").given()


def test_raw_prompts_have_no_template(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(bundle), "Hi", "--raw", "--set", "a=1"])
    assert result.exit_code == 2 and "--raw" in result.output
