from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from typer.testing import CliRunner, Result

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.options import Sampling


def generate(bundle: Path, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", str(bundle), *arguments], input=stdin)


def test_it_says_what_the_library_says(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "Hello", "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    with ew.LLM(tiny_bundle) as llm:
        expected = llm.chat([{"role": "user", "content": "Hello"}], ew.SamplingParams(max_tokens=12))[0]
        raw = llm.generate("Hello", ew.SamplingParams(max_tokens=12))[0]
    assert result.stdout == expected.text + "\n"
    assert "tokens/s" in result.stderr
    assert raw.prompt_token_ids != expected.prompt_token_ids
    assert generate(tiny_bundle, "Hello", "--raw", "--max-tokens", "12").stdout == raw.text + "\n"


def test_json_of_several_prompts(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "One", "Two, three", "--max-tokens", "5", "--json", "--raw")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [r["prompt"] for r in data["results"]] == ["One", "Two, three"]
    for row in data["results"]:
        assert 1 <= len(row["token_ids"]) <= 5
        assert row["finish_reason"] in ("stop", "length")
    alone = json.loads(generate(tiny_bundle, "One", "--max-tokens", "5", "--json", "--raw").stdout)
    assert alone["results"][0]["token_ids"] == data["results"][0]["token_ids"]


def test_several_prompts_as_text(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "One", "Two", "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    assert "> One\n" in result.stdout
    assert "> Two\n" in result.stdout


def test_the_prompt_from_stdin(tiny_bundle: Path) -> None:
    piped = generate(tiny_bundle, "-", "--raw", "--max-tokens", "4", "--json", stdin="Hello\n")
    result = generate(tiny_bundle, "Hello", "--raw", "--max-tokens", "4", "--json")
    assert json.loads(piped.stdout)["results"] == json.loads(result.stdout)["results"]


def test_sampling_options_reach_the_engine(tiny_bundle: Path) -> None:
    def tokens(*options: str) -> list[int]:
        result = generate(tiny_bundle, "Hello", "--max-tokens", "16", "--json", *options)
        assert result.exit_code == 0, result.output
        ids: list[int] = json.loads(result.stdout)["results"][0]["token_ids"]
        return ids

    greedy = tokens()
    assert tokens("--temperature", "5", "--top-k", "1") == greedy
    assert tokens("--temperature", "5", "--top-p", "1e-6") == greedy
    assert tokens("--temperature", "5", "--min-p", "1") == greedy
    first, second = tokens("--temperature", "5", "--seed", "1"), tokens("--temperature", "5", "--seed", "2")
    assert first != second
    assert tokens("--temperature", "5", "--seed", "1") == first
    assert tokens("--system", "Be brief.") != greedy


def test_any_field_of_the_parameters_can_be_given(tiny_bundle: Path) -> None:
    options = (
        "--param",
        "n=2",
        "--param",
        "bad_words=[[5, 6]]",
        "--param",
        'logit_bias={"7": -3}',
        "--temperature",
        "2",
    )
    result = generate(tiny_bundle, "Hello", "--raw", "--max-tokens", "5", *options, "--param", "logprobs=1", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["results"]
    params = ew.SamplingParams(temperature=2, max_tokens=5, n=2, bad_words=[[5, 6]], logit_bias={7: -3}, logprobs=1)
    with ew.LLM(tiny_bundle) as llm:
        expected = llm.generate("Hello", params)[0]
    assert row["token_ids"] == list(expected.token_ids)
    assert [one["token_ids"] for one in row["others"]] == [list(one.token_ids) for one in expected.others]
    assert len(row["logprobs"]) == 5 and row["logprobs"][0]["token_id"] == row["token_ids"][0]


def test_the_form_of_an_answer(tiny_bundle: Path, tmp_path: Path) -> None:
    result = generate(tiny_bundle, "Hello", "--raw", "--quiet", "--choice", "yes", "--choice", "no")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() in ("yes", "no")
    (tmp_path / "a.lark").write_text('start: "x" "y"', encoding="utf-8")
    (tmp_path / "a.json").write_text('{"const": [1, "z"]}', encoding="utf-8")
    for option, words in (("--grammar", "xy"), ("--schema", '[1,"z"]')):
        form = tmp_path / ("a.lark" if option == "--grammar" else "a.json")
        result = generate(tiny_bundle, "Hello", "--raw", "--quiet", option, str(form))
        assert result.exit_code == 0, result.output
        assert "".join(result.stdout.split()) == words


def test_answers_have_numbers(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "Hello", "--raw", "-n", "3", "--param", "num_beams=3", "--param", "n=2")
    assert result.exit_code == 0, result.output
    assert "> Hello\n[0] " in result.stdout and "\n[1] " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["Hello", "--param", "beams=4"], 2, "no such field"),
        (["Hello", "--param", "num_beam=4"], 2, "mean num_beams?"),
        (["Hello", "--param", "num_beams"], 2, "name=value"),
        (["Hello", "--param", "top_p=1", "--top-p", "0.5"], 2, "said already"),
        (["Hello", "--choice", "a", "--regex", "a"], 2, "only one of"),
        (["Hello", "--schema", "nowhere.json"], 2, "--schema nowhere.json: no such file"),
        (["Hello", "--schema", '{"not": {}}'], 8, '"not"'),
        (["Hello", "--top-p", "1.5"], 2, "--top-p: 1.5 is out of range"),
        (["Hello", "--temperature", "-1"], 2, "--temperature"),
        (["Hello", "--max-tokens", "0"], 2, "--max-tokens"),
        (["Hello", "-n", "-5"], 2, "--max-tokens: -5 is out of range"),
        (["Hello", "--seed", "-1"], 2, "--seed"),
        (["Hello", "--context", "0"], 2, "--context"),
        (["Hello", "--target", "gpu"], 2, "no target 'gpu'; choose"),
        (["Hello", "--target", "onnx"], 7, "no target 'onnx'; it has cpu"),
        (["Hello", "--provider", "cuda"], 2, "--provider"),
        (["Hello", "--set", "x"], 2, "name=value"),
        ([""], 8, "prompt"),
        (["x" * 600, "--raw"], 8, "prompt"),
        (["Hello", "--memory", "lots"], 2, "--memory"),
        (["Hello", "--memory", "1"], 9, "memory"),
        (["-", "-"], 2, "stdin"),
        (["caf\udce9"], 8, "prompt"),  # an argument that isn't UTF-8
        (["Hello", "--threads", "1025"], 2, "--threads"),
        (["Hello", "--raw", "--system", "Be brief."], 2, "--system"),
    ],
)
def test_bad_requests_name_what_is_wrong(arguments: list[str], code: int, named: str, tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, *arguments)
    assert result.exit_code == code, result.output
    assert named in result.stderr.lower()
    assert result.stdout == ""


def test_a_mistake_in_an_option_is_a_document_too(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "Hello", "-n", "-5", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("RequestError", 2)
    assert error["message"] == "--max-tokens: -5 is out of range"


def test_arguments_in_the_wrong_order(tiny_bundle: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "Hello", str(tiny_bundle)])
    assert result.exit_code == 2
    assert "the bundle comes first" in " ".join(result.stderr.replace("│", " ").split())


def test_quiet_leaves_the_text_alone(tiny_bundle: Path) -> None:
    loud, quiet = (generate(tiny_bundle, "Hello", "-n", "3", *more) for more in ([], ["--quiet"]))
    assert (quiet.stdout, quiet.stderr) == (loud.stdout, "")
    assert "tokens/s" in loud.stderr
    assert generate(tiny_bundle, "One", "Two", "-n", "3", "-q").stderr == ""


def test_a_wrong_bundle_before_a_long_prompt_names_near_ones(tiny_bundle: Path, tmp_path: Path) -> None:
    """A prompt of over 255 bytes can't be a file's name, and was asked whether it is a folder."""
    (tmp_path / "tiny.bundle").symlink_to(tiny_bundle)
    prompt = "A long prompt. " * 40
    for typed, words in (("tinny.bundle", "Did you mean"), ("elsewhere", "There is")):
        result = generate(tmp_path / typed, prompt)
        assert result.exit_code == 7, result.output
        assert f"{typed} doesn't exist" in result.stderr and f"{words} {tmp_path / 'tiny.bundle'}" in result.stderr
    result = CliRunner().invoke(app, ["generate", prompt, prompt])
    assert result.exit_code == 7 and f"{prompt[:60]}... doesn't exist" in result.stderr


def test_what_the_template_does_not_read_is_refused(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "Hello", "--set", "mood=sunny")
    assert result.exit_code == 8 and "mood: the model's template has no such variable" in result.stderr


def test_no_bundle(tmp_path: Path) -> None:
    result = generate(tmp_path / "absent.bundle", "Hello", "--json")
    assert result.exit_code == 7
    assert json.loads(result.stdout)["error"]["exit_code"] == 7


def test_an_answer_that_was_cut_says_so(tiny_bundle: Path) -> None:
    assert "--max-tokens" in generate(tiny_bundle, "Hello", "--max-tokens", "2").stderr
    with ew.LLM(tiny_bundle) as llm:
        text = llm.chat([{"role": "user", "content": "Hello"}], ew.SamplingParams(max_tokens=12))[0].text
    assert "--max-tokens" not in generate(tiny_bundle, "Hello", "--max-tokens", "12", "--stop", text[0]).stderr


def test_the_help_names_the_default_of_max_tokens() -> None:
    help_text = get_args(get_type_hints(Sampling, include_extras=True)["max_tokens"])[1].help
    assert help_text.endswith(f"default {ew.SamplingParams().max_tokens}.")


def test_statistics(tiny_bundle: Path) -> None:
    result = generate(tiny_bundle, "One", "--max-tokens", "3", "--raw", "--stats")
    assert result.exit_code == 0, result.output
    assert "preemptions: 0" in result.stderr and "KV cache: " in result.stderr and "isa " in result.stderr
    several = generate(tiny_bundle, "One", "Two", "--max-tokens", "3", "--raw", "--stats")
    assert "preemptions: 0" in several.stderr and "preemptions" not in several.stdout
    data = json.loads(generate(tiny_bundle, "One", "--max-tokens", "3", "--raw", "--stats", "--json").stdout)
    assert data["stats"]["buckets"] == [] and data["stats"]["preemptions"] == 0
    assert "stats" not in json.loads(generate(tiny_bundle, "One", "--max-tokens", "3", "--raw", "--json").stdout)


def test_a_target_and_a_context(tiny_bundle: Path) -> None:
    usual = generate(tiny_bundle, "Hello", "--raw", "--max-tokens", "4")
    small = generate(
        tiny_bundle, "Hello", "--raw", "--max-tokens", "4", "--target", "cpu", "--context", "16", "--stats"
    )
    assert small.exit_code == 0, small.output
    assert small.stdout == usual.stdout
    long = generate(tiny_bundle, "Hello", "--raw", "--context", "8", "--json")
    assert len(json.loads(long.stdout)["results"][0]["token_ids"]) <= 8 - len("Hello")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--target", "onnx"], 7, "no target 'onnx'; it has cpu"),
        (["--provider", "cuda"], 2, "--provider: 'cuda' is for target 'onnx' or 'stablehlo', not 'cpu'"),
        (["--context", "513"], 9, "context: 513 tokens are more than the 512"),
        (["--context", "1"], 2, "--context: 1 is out of range"),
    ],
)
def test_what_does_not_run(tiny_bundle: Path, options: list[str], code: int, message: str) -> None:
    result = generate(tiny_bundle, "Hello", *options)
    assert result.exit_code == code
    assert message in result.stderr


def test_a_repetition_penalty(tiny_bundle: Path) -> None:
    with ew.LLM(tiny_bundle) as llm:
        params = ew.SamplingParams(max_tokens=24, repetition_penalty=1.5)
        expected, plain = (llm.generate("Hello", p)[0].text for p in (params, ew.SamplingParams(max_tokens=24)))
    result = generate(tiny_bundle, "Hello", "--raw", "-n", "24", "--repetition-penalty", "1.5")
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    assert expected != plain
    refused = generate(tiny_bundle, "Hello", "--repetition-penalty", "0")
    assert refused.exit_code == 2 and "--repetition-penalty: 0.0 is out of range" in refused.output


def test_one_prompt_whose_logits_are_nan(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' answers are printed, and the command fails."""
    from enginewright.runtime.scheduler.continuous import ContinuousScheduler

    commit = ContinuousScheduler.commit

    def spoiled(self: ContinuousScheduler, batch: Any, output: Any) -> Any:
        row = 0
        for chunk in batch.chunks:
            if chunk.rows and chunk.request.tokens[0] == first:
                output.tokens[row] = -1
            row += chunk.rows
        return commit(self, batch, output)

    with ew.LLM(tiny_bundle) as llm:
        first = llm.tokenizer.encode("Bad")[0]
    monkeypatch.setattr(ContinuousScheduler, "commit", spoiled)
    result = generate(tiny_bundle, "Good", "Bad", "--raw", "-n", "3")
    assert result.exit_code == 1 and "> Good" in result.stdout and "are NaN or infinite" in result.stderr
    result = generate(tiny_bundle, "Good", "Bad", "--raw", "-n", "3", "--json")
    rows = json.loads(result.stdout)["results"]
    assert result.exit_code == 1
    assert ["error" in row for row in rows] == [False, True] and len(rows[0]["token_ids"]) == 3


def test_scheduling_by_name_or_file(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text('refuse = false\n[classes.default]\nttft = "1s"\n')
    arguments = ("One", "Two", "--max-tokens", "3", "--json", "--stats")
    plain = json.loads(generate(tiny_bundle, *arguments).stdout)
    assert plain["stats"]["scheduling"] is None
    for scheduling in ("fair", str(file)):
        result = generate(tiny_bundle, *arguments, "--scheduling", scheduling)
        assert result.exit_code == 0, result.output
        served = json.loads(result.stdout)
        assert [row["token_ids"] for row in served["results"]] == [row["token_ids"] for row in plain["results"]]
        assert served["stats"]["scheduling"] is not None


def test_tokens_computed_ahead_are_the_same(tiny_bundle: Path) -> None:
    arguments = ("One two one two one two", "--max-tokens", "40", "--json", "--stats", "--raw")
    plain = json.loads(generate(tiny_bundle, *arguments, "--speculate", "off").stdout)
    assert plain["stats"]["speculation"] is None
    for how in ((), ("--speculate", "lookup")):
        ahead = json.loads(generate(tiny_bundle, *arguments, *how).stdout)
        assert ahead["results"][0]["token_ids"] == plain["results"][0]["token_ids"]
        assert "drafted" in ahead["stats"]["speculation"]
    wrong = generate(tiny_bundle, "One", "--speculate", "guess")
    assert wrong.exit_code != 0 and "speculate: guess doesn't exist" in wrong.output


@pytest.mark.parametrize(
    ("scheduling", "text", "said"),
    [
        ("fast", None, "neither fcfs, priority, fair, offline nor a .toml file"),
        ("missing.toml", None, "No such file"),
        ("broken.toml", "classes = [", "broken.toml: "),
        ("wrong.toml", "speed = 1", "there is no option 'speed'"),
    ],
)
def test_wrong_scheduling(scheduling: str, text: str | None, said: str, tiny_bundle: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / scheduling).write_text(text)
        scheduling = str(tmp_path / scheduling)
    result = generate(tiny_bundle, "One", "--scheduling", scheduling)
    assert result.exit_code == 2
    output = " ".join(result.output.replace("│", " ").split())
    assert said in output or said.replace(" ", "") in output.replace(" ", "")
