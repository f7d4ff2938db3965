"""Models of the Hub, from a Hub of our own on the loopback."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub.constants
import pytest

import enginewright as ew
from enginewright.optimizer.bisect import Given, Options, bisect
from enginewright.optimizer.capture import hub as fetching
from enginewright.optimizer.capture import hub_blobs
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.capture.hub import choose_files
from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.evaluate import evaluate
from enginewright.optimizer.plan.planner import planned_model
from enginewright.optimizer.sbom import source_facts
from enginewright.runtime.bundle.hub_id import HubId
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, SourceError, UnsupportedModelError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.conftest import make_tiny_model
from tests.optimizer.capture.gguf.test_model import write
from tests.optimizer.hub_server import MODEL, Hub, Repository, _git_hash

# ---- what is fetched


@pytest.mark.matrix
def test_an_id_is_exported_and_says_its_commit(hub: Hub, model: Repository, tiny_folder: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    report = ew.export(MODEL, tmp_path / "a.bundle", targets=("cpu",), progress=events.append)
    commit = model.names["main"]
    manifest = Bundle.open(tmp_path / "a.bundle").manifest
    assert manifest.source.hub is not None
    assert (manifest.source.name, manifest.source.hub.id, manifest.source.hub.commit) == (MODEL, MODEL, commit)
    assert manifest.model.name == "tiny-llama"
    assert "download" in report.stages

    # Only what an export reads.
    names = {p.name for p in tiny_folder.iterdir()} | {"README.md"}
    assert {a.rpartition("/")[2] for a in hub.asked if "/resolve/" in a} == names
    size = sum(len(model.revisions[commit][n]) for n in names)
    assert sum(hub.served.values()) == size
    assert sum("/api/models/" in a for a in hub.asked) == 1  # which commit is meant, and what it has
    downloads = [e for e in events if e.stage == "download"]
    assert downloads[-1].done == downloads[-1].total == size
    assert all(a.done <= b.done for a, b in pairwise(downloads))

    # Again, by its commit: nothing is fetched, and the bundle has the same bytes.
    hub.served.clear()
    ew.export(f"{MODEL}@{commit}", tmp_path / "b.bundle", targets=("cpu",))
    assert not hub.served
    assert same_files(tmp_path / "a.bundle", tmp_path / "b.bundle") == set()


def same_files(one: Path, other: Path) -> set[str]:
    """The files that differ, measurements left out."""
    names = {p.relative_to(f).as_posix() for f in (one, other) for p in f.rglob("*") if p.is_file()}
    both = [n for n in names if not n.startswith("report/")]
    return {n for n in both if (one / n).read_bytes() != (other / n).read_bytes()}


def test_everything_that_takes_a_source_takes_an_id(
    hub: Hub, model: Repository, tiny_bundle: Path, tmp_path: Path
) -> None:
    checked = check_bundle(tiny_bundle, source=MODEL)
    assert checked.targets[0].comparison is not None
    (tmp_path / "text.txt").write_text("The first one is always the shortest. " * 3)
    evaluation = evaluate(tiny_bundle, text=tmp_path / "text.txt", against=MODEL, window=32)
    assert evaluation.comparison is not None
    assert evaluation.comparison.kl_mean < 1e-6
    assert bisect(Given(Path(MODEL)), Given(tiny_bundle), Options(tokens=[[5, 6, 7, 8]])).first_divergence is None
    bundle = ew.export(MODEL, tmp_path / "a.bundle", targets=("cpu",)).path
    facts = source_facts(Bundle.open(bundle), MODEL)
    assert facts.name == MODEL
    assert facts.licence == "mit"
    options = ew.RecoverOptions(steps=1, sampled_tokens=600, sequence_length=32, batch_tokens=64)
    ew.recover(MODEL, tmp_path / "recovered", recipe="int4", options=options)


def test_a_plan_fetches_the_configuration_alone(hub: Hub, model: Repository, tmp_path: Path) -> None:
    (one,) = planned_model(MODEL, ["f32"]).programs
    assert one.program is not None
    assert {a.rpartition("/")[2] for a in hub.asked if "/resolve/" in a} == {"config.json"}
    assert sum("/api/models/" in a for a in hub.asked) == 1
    ew.export(MODEL, tmp_path / "a.bundle", targets=("cpu",), recipe="f32")  # which finds what is missing
    assert Bundle.open(tmp_path / "a.bundle").programs["cpu"] == one.program


def test_a_branch_another_commit(hub: Hub, model: Repository, tmp_path: Path) -> None:
    changed = dict(model.revisions[model.names["main"]])
    changed["generation_config.json"] = b'{"temperature": 0.25}'
    commit = model.add("tuned", changed)
    folder = find_source(MODEL, revision="tuned")
    assert folder.name == commit == find_source(f"{MODEL}@tuned").name
    assert (folder / "generation_config.json").read_bytes() == b'{"temperature": 0.25}'
    assert find_source(MODEL).name == model.names["main"]
    with pytest.raises(SourceError, match=r"no revision 'missing'(?s:.*)main, tuned"):
        find_source(MODEL, revision="missing")


def test_shards_by_the_index(hub: Hub, tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_folder, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(sharded, max_shard_size="100KB")
    shards = {p.name for p in sharded.glob("*.safetensors")}
    assert len(shards) > 1
    hub.repositories[MODEL] = Repository.of(sharded)
    events: list[ProgressEvent] = []
    folder = find_source(MODEL, progress=events.append)
    assert {p.name for p in folder.iterdir()} == {p.name for p in sharded.iterdir()}
    assert len({e.total for e in events}) == 1
    order = [a.rpartition("/")[2] for a in hub.asked if a.startswith("HEAD")]
    assert set(order[-len(shards) :]) == shards  # weights last
    hub.repositories[MODEL].revisions[folder.name].pop(min(shards))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(SourceError, match=r"index.json: it names model-00001"):
        find_source(MODEL)


# ---- offline


def test_offline_takes_what_was_fetched(
    hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"HF_HUB_OFFLINE is set(?s:.*)Unset"):
        find_source(MODEL)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    folder = find_source(MODEL)
    hub.asked.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_source(MODEL) == find_source(f"{MODEL}@{folder.name}") == folder
    assert hub.asked == []
    with pytest.raises(SourceError, match=f"it has the commits {folder.name}"):
        find_source(f"{MODEL}@other")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"has neither config.json with model.safetensors"):
        find_source(MODEL)


def test_without_a_network_the_cache_is_offered(
    hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(SourceError, match=r"no folder some-org/tiny-llama here, and the connection to http") as e:
            find_source(MODEL)
        assert "HF_HUB_OFFLINE" not in str(e.value)
    find_source(MODEL)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE=1 to take what its cache has"):
        find_source(MODEL)


# ---- who may read it


def test_gated_and_private_models_want_the_token(
    hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model.gated = True
    messages = []
    for token in (None, "hf_wrongwrongwrong"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(SourceError, match=rf"gated(?s:.*)Ask for access at {hub.endpoint}/{MODEL}") as e:
            find_source(MODEL)
        messages.append(str(e.value))
    model.gated, model.private = False, True
    with pytest.raises(SourceError, match=r"neither a folder (?s:.*)hf auth login") as e:
        find_source(MODEL)
    messages.append(str(e.value))
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(hub.token)  # what `hf auth login` leaves
    find_source(MODEL)
    assert hub.tokens["storage"] == {None}  # where the weights are nobody is told the token
    assert f"Bearer {hub.token}" in hub.tokens["hub"]
    output = "".join(messages) + "".join(capfd.readouterr())
    assert hub.token not in output and "hf_wrong" not in output and "Signature" not in output


def test_a_token_that_can_be_no_header_is_not_printed(
    hub: Hub, model: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_\xe4\u20ac")
    with pytest.raises(SourceError, match="the token has a character") as e:
        find_source(MODEL)
    assert "hf_" not in str(e.value)


# ---- what can't be had


def test_what_the_hub_doesnt_have(hub: Hub) -> None:
    with pytest.raises(SourceError, match=r"neither a folder no/such here nor a model of that id at http"):
        find_source("no/such")
    with pytest.raises(SourceError, match="can't be a model's id"):
        find_source("no/such--one")
    hub.broken = 503
    with pytest.raises(SourceError, match=r"answers 503 Service Unavailable(?s:.*)later"):
        find_source("no/such")


def test_an_answer_that_is_no_hubs(hub: Hub, model: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken = 200
    with pytest.raises(SourceError, match=r"isn't the Hub's(?s:.*)HF_ENDPOINT"):
        find_source(MODEL)


def test_a_name_that_leads_out_of_the_cache_is_no_file(hub: Hub, model: Repository, tmp_path: Path) -> None:
    victim = tmp_path / "victim.gguf"
    victim.write_bytes(b"GGUF")
    names = [
        str(victim),
        "../../../victim.gguf",
        "a/../../victim.gguf",
        "nul\0.gguf",
        "C:\\x.gguf",
        "C:/x.gguf",
        "./x.gguf",
        "",
    ]
    for name in names:
        hub.repositories["some-org/names"] = Repository({"0" * 40: {name: b"x" * 30}}, {"main": "0" * 40})
        with pytest.raises(SourceError, match=r"has no|neither config.json|It is empty"):
            find_source("some-org/names")
        with pytest.raises(SourceError):
            find_source(f"some-org/names:{victim.name}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("size", [float("nan"), float("inf"), -1, 1.5, "9", True, [], 2**63, 10**400])
def test_a_size_that_is_none(size: object, hub: Hub, model: Repository) -> None:
    hub.listed["config.json"] = {"size": size}
    with pytest.raises((SourceError, CapacityError), match=r"isn't the Hub's"):
        find_source(MODEL)


def test_an_answer_without_an_end(hub: Hub, model: Repository) -> None:
    hub.endless = True
    with pytest.raises(SourceError, match="isn't the Hub's"):
        find_source(MODEL)
    assert hub.served["list"] < 512 << 20


def test_the_bytes_are_those_that_were_listed(hub: Hub, model: Repository) -> None:
    """Also where the list gives a file the hash of another one, whose bytes are there already."""
    files = model.revisions[model.names["main"]]
    first, second = [n for n in files if n in ("config.json", "generation_config.json", "tokenizer.json")][:2]
    hub.listed[second] = {"size": len(files[first]), "blobId": _git_hash(files[first])}
    with pytest.raises(SourceError, match=r"isn't what the Hub lists"):
        find_source(MODEL)


def test_bytes_that_the_hub_says_nothing_of(hub: Hub, model: Repository) -> None:
    hub.listed["config.json"] = {"size": None}
    with pytest.raises(SourceError, match=r"doesn't say which bytes config.json has"):
        find_source(MODEL)


@pytest.mark.parametrize("name", ["../../../outside", "a" * 39])
def test_a_hash_that_is_none_names_no_file(name: str, hub: Hub, model: Repository, tmp_path: Path) -> None:
    from tests.optimizer import hub_server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_server, "_git_hash", lambda data: name)
        with pytest.raises(SourceError, match="isn't the Hub's"):
            find_source(MODEL)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, SourceError, r"in pytorch_model.bin only(?s:.*)@refs/pr/1"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, SourceError, "an adapter"),
        ({"consolidated.safetensors": b"x"}, SourceError, r"neither config.json(?s:.*)consolidated.safetensors"),
        ({}, SourceError, "It is empty"),
        (
            {"model.safetensors": b"x" * 50_000, "config.json": b'{"auto_map": {"a": "b"}}'},
            UnsupportedModelError,
            "auto_map",
        ),
        ({"model.safetensors": b"x" * 50_000, "config.json": b"{}"}, SourceError, "model_type"),
    ],
)
def test_what_cant_be_compiled_is_said_before_weights_come(
    files: dict[str, bytes], error: type[EnginewrightError], message: str, hub: Hub
) -> None:
    hub.repositories[MODEL] = Repository.of(files)
    with pytest.raises(error, match=message):
        find_source(MODEL)
    assert set(hub.served) <= {"config.json"}


def test_a_full_disk(hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fetching.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
        with pytest.raises(CapacityError, match=r"KiB are missing, and 9.8 KiB are free(?s:.*)HF_HOME"):
            find_source(MODEL)
    real = hub_blobs._append

    def full(file: Any, *others: Any) -> None:
        if len(others[0].hash) == 64:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, *others)

    monkeypatch.setattr(hub_blobs, "_append", full)
    with pytest.raises(CapacityError, match="there is no space left"):
        find_source(MODEL)


# ---- GGUF


FILES = (
    "m-Q4_K_M.gguf",
    "m-q8_0.gguf",
    "sub/m-UD-Q2_K_XL.gguf",
    "m-Q4_K_S.gguf",
    "mmproj-m-F16.gguf",
    "big-F32-00001-of-00002.gguf",
    "big-F32-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-q8_0.gguf"),
        ("Q2_K_XL", "sub/m-UD-Q2_K_XL.gguf"),
        ("UD-Q2_K_XL", "sub/m-UD-Q2_K_XL.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        ("sub/m-UD-Q2_K_XL.gguf", "sub/m-UD-Q2_K_XL.gguf"),
    ],
)
def test_a_gguf_file_by_its_type_or_name(file: str, expected: str) -> None:
    assert choose_files(HubId(MODEL, None, file), FILES, "there") == (expected,)


@pytest.mark.parametrize("file", ["F32", "big-F32-00001-of-00002.gguf", "big-F32-00002-of-00002.gguf"])
def test_a_split_gguf_file_comes_with_all_its_parts(file: str) -> None:
    parts = ("big-F32-00001-of-00002.gguf", "big-F32-00002-of-00002.gguf")
    assert choose_files(HubId(MODEL, None, file), FILES, "there") == parts
    assert choose_files(HubId(MODEL), parts, "there") == parts, "the only one needs no name"


def test_a_whole_gguf_file_comes_before_a_split_one() -> None:
    assert choose_files(HubId(MODEL, None, "F32"), (*FILES, "all-F32.gguf"), "there") == ("all-F32.gguf",)


@pytest.mark.parametrize(
    ("file", "files", "message"),
    [
        ("Q4_K", FILES, "there has no Q4_K"),  # not the first that begins so
        ("M", FILES, "there has no M"),
        ("Q5_0", FILES, r"has no Q5_0(?s:.*)m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
        ("none.gguf", FILES, "has no none.gguf"),
        ("F16", FILES, "has no F16"),  # a projector for images isn't a language model
        (None, FILES, rf"none is named(?s:.*){MODEL}:"),
        ("Q8_0", ("a-Q8_0.gguf", "b-Q8_0.gguf"), r"has 2 files for Q8_0(?s:.*)a-Q8_0.gguf, b-Q8_0.gguf"),
        ("F32", FILES[:-1], "lacks 1 of the 2 parts of big-F32-00001-of-00002.gguf"),
        ("F32", FILES[-1:], "lacks 1 of the 2 parts of big-F32-00001-of-00002.gguf"),
        (None, ("big-00001-of-99999.gguf",), "lacks 99,998 of the 99,999 parts"),
    ],
)
def test_a_gguf_file_that_isnt_there_or_isnt_the_only_one(
    file: str | None, files: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        choose_files(HubId(MODEL, None, file), files, "there")


def test_safetensors_come_before_gguf_and_one_gguf_needs_no_name() -> None:
    both = ("config.json", "model.safetensors", "m-Q8_0.gguf")
    assert choose_files(HubId(MODEL), both, "there") is None
    assert choose_files(HubId(MODEL, None, "Q8_0"), both, "there") == ("m-Q8_0.gguf",)
    assert choose_files(HubId(MODEL), ("config.json", "m-Q8_0.gguf", "README.md"), "there") == ("m-Q8_0.gguf",)


REFUSED = """
import sys
from enginewright.optimizer.cli.app import app
for line in (
    ["export", "some-org/none"],
    ["plan", "some-org/none"],
    ["bisect", "some-org/none", "x.bundle"],
    ["recover", "some-org/none", "-o", "r", "-r", "int8"],
    ["chat", "some-org/none"],
    ["export", "some-org/code"],
    ["export", "some-org/tiny-GGUF:Q3_K"],
):
    try:
        app(line)
    except SystemExit as e:
        print(line[0], e.code, *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_an_id_is_checked_before_torch_is_imported(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["some-org/tiny-GGUF"] = Repository.of({"tiny-Q8_0.gguf": b"GGUF"})
    config = b'{"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}}'
    hub.repositories["some-org/code"] = Repository.of({"config.json": config, "model.safetensors": b"0" * 100})
    home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.endpoint}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG_"))} | home
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    names = ["export", "plan", "bisect", "recover", "chat"]
    assert done.stdout.splitlines() == [*(f"{name} 3" for name in names), "export 4", "export 3"], done.stderr
    assert done.stderr.count("neither a folder some-org/none here nor a model of that id") == len(names)
    assert "the model comes with code of its own" in done.stderr and "GGUF files there: tiny-Q8_0.gguf" in done.stderr
    assert set(hub.served) == {"config.json"}


def test_the_command_takes_a_gguf_file_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """In an empty home, by environment variables alone, as a user would."""
    tiny_gguf = write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    files = {"tiny-Q8_0.gguf": tiny_gguf.read_bytes(), "tiny-Q4_0.gguf": b"GGUF" * 10_000}
    hub.repositories["some-org/tiny-GGUF"] = Repository.of(files)
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token}
    code = "from enginewright.optimizer.cli.app import main; main()"
    command = [sys.executable, "-c", code, "export", "some-org/tiny-GGUF:q8_0", "--target", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(tmp_path / "tiny-GGUF-q8_0.bundle")
    assert bundle.manifest.source.name == "tiny-Q8_0.gguf"
    assert bundle.manifest.recipe["name"] == "gguf"  # as the file says that came after the arguments were read
    assert "recipe gguf, as the file is quantized, for cpu" in done.stdout
    assert bundle.manifest.source.hub is not None
    assert bundle.manifest.source.hub.id == "some-org/tiny-GGUF"
    assert set(hub.served) == {"tiny-Q8_0.gguf"}
    assert (home / ".cache" / "huggingface" / "hub" / "models--some-org--tiny-GGUF" / "refs" / "main").is_file()
    assert hub.token not in done.stdout + done.stderr
