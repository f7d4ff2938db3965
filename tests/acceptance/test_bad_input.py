"""A user's mistakes end with an error of ours that names them, an exit code, and no half-written files."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.runtime.bundle.reader import Bundle
from tests.waiting import HANG

OPTIMIZE = [sys.executable, "-c", "from enginewright.optimizer.cli.app import main; main()"]


def optimize(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*OPTIMIZE, *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "400", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("Llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "tiny.bundle"
    export(model_folder, path)
    return path


def _missing_folder(folder: Path) -> Path:
    return folder.parent / "not-there"


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def _no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def _truncated_weights(folder: Path) -> Path:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)
    return folder


def _truncated_gguf(folder: Path) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\x10\x00")
    return path


def _edit_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def _encoder(folder: Path) -> Path:
    return _edit_config(folder, model_type="bert", architectures=["BertForMaskedLM"])


def _vision(folder: Path) -> Path:
    return _edit_config(folder, model_type="vit", architectures=["ViTForImageClassification"])


def _lacking_op(folder: Path) -> Path:
    return _edit_config(folder, hidden_act="mish")


CASES = [
    pytest.param(_missing_folder, 3, "not-there", id="missing folder"),
    pytest.param(_empty_folder, 3, "config.json", id="empty folder"),
    pytest.param(_no_weights, 3, "safetensors", id="config without weights"),
    pytest.param(_truncated_weights, 3, "model.safetensors", id="truncated safetensors"),
    pytest.param(_truncated_gguf, 3, "cut.gguf", id="truncated GGUF"),
    pytest.param(_encoder, 4, "BertForMaskedLM", id="encoder"),
    pytest.param(_vision, 4, "ViTForImageClassification", id="vision model"),
    pytest.param(_lacking_op, 4, "layers.0.mlp", id="an op we lack"),
]


@pytest.mark.parametrize(("spoil", "code", "named"), CASES)
def test_sources(spoil: Callable[[Path], Path], code: int, named: str, model_folder: Path, tmp_path: Path) -> None:
    source = spoil(Path(shutil.copytree(model_folder, tmp_path / "model")))
    (tmp_path / "out").mkdir()
    result = optimize("export", source, "-o", tmp_path / "out" / "x.bundle")
    assert result.returncode == code, result.stderr
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_unknown_recipe_key(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nwieghts = 1\n')
    result = optimize("export", model_folder, "-o", tmp_path / "x.bundle", "--recipe", tmp_path / "mine.toml")
    assert result.returncode == 5
    assert "mine.toml:2" in result.stderr and "wieghts" in result.stderr and "weights" in result.stderr
    assert not (tmp_path / "x.bundle").exists()


def test_full_disk(model_folder: Path, tmp_path: Path) -> None:
    """The system's limit on a file's size stands for a disk that fills up: the same write fails, with EFBIG."""
    out = tmp_path / "out"
    out.mkdir()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    result = optimize("export", model_folder, "-o", out / "x.bundle", preexec_fn=limit)
    assert result.returncode == 9, result.stderr
    assert "x.bundle" in result.stderr and "space" in result.stderr
    assert not list(out.iterdir())


STARTED = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('started', flush=True); "
STARTED += "import sys; from enginewright.__main__ import main; main()"
"""Python itself answers an interrupt before that line, with a traceback."""

# What an export has made when the interrupt comes, and how long after; the last three may find it finished.
MOMENTS = [("", 0.3), (".x.bundle.partial-*", 0), (".x.bundle.partial-*", 0.5), (".x.bundle.partial-*", 1.5)]
MOMENTS += [(".x.bundle.partial-*/weights", 0), (".x.bundle.partial-*/report", 0)]


@pytest.mark.parametrize(
    ("made", "seconds", "sent"),
    [(*moment, signal.SIGINT) for moment in MOMENTS] + [(*moment, signal.SIGTERM) for moment in MOMENTS[2:5:2]],
)
def test_interrupted_export_leaves_nothing(
    made: str, seconds: float, sent: signal.Signals, model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, "export", str(model_folder), "-o", str(out / "x.bundle")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    while made and not list(out.glob(made)) and process.poll() is None:
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=HANG)
    left = [p.name for p in out.iterdir()]
    assert "Traceback" not in errors
    # Before the command has begun Python itself ends with the signal, which a shell shows as 130 too.
    assert process.returncode in (0, 128 + sent, -sent), errors
    if left == ["x.bundle"]:  # it came after the bundle was renamed into place: then it is whole
        Bundle.open(out / "x.bundle").verify_hashes()
        assert made.endswith(("weights", "report")) or seconds > 1
    else:
        assert not left
        assert process.returncode != 0


def _truncate_blob(bundle: Path) -> None:
    blob = next((bundle / "weights").glob("*.bin"))
    os.truncate(blob, blob.stat().st_size - 1)


def _alter_program(bundle: Path) -> None:
    path = bundle / "targets" / "cpu" / "programs" / "decode.json"
    path.write_text(path.read_text().replace('"rope_table"', '"rpoe_table"', 1))


def _newer(bundle: Path) -> None:
    path = bundle / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 99', 1))


def _remove_program(bundle: Path) -> None:
    (bundle / "targets" / "cpu" / "programs" / "decode.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_truncate_blob, "weights-00000.bin"),
        (_alter_program, "rpoe"),
        (_newer, "newer"),
        (_remove_program, "decode.json"),
    ],
)
def test_bundles(spoil: Callable[[Path], None], named: str, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy.bundle"))
    spoil(copy)
    with pytest.raises(ew.BundleError, match=named):
        ew.LLM(copy)


def test_altered_weights_are_found_when_asked_for(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy.bundle"))
    blob = next((copy / "weights").glob("*.bin"))
    data = bytearray(blob.read_bytes())
    data[1000] ^= 1
    blob.write_bytes(data)
    with pytest.raises(ew.BundleError, match=blob.name):
        ew.LLM(copy, verify=True)


def test_requests(bundle: Path) -> None:
    with ew.LLM(bundle, memory="8MiB") as llm:
        with pytest.raises(ew.RequestError, match="empty"):
            llm.generate([[]])
        with pytest.raises(ew.RequestError, match=r"600.*512|512.*600"):
            llm.generate([[5] * 600])
        with pytest.raises(ew.RequestError, match="256"):
            llm.generate([[5, 256]])
    for field, value in {"temperature": -1, "top_p": 0, "top_k": -2, "min_p": 2, "max_tokens": 0}.items():
        with pytest.raises(ew.RequestError, match=field):
            ew.SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_memory_too_small_for_one_request(bundle: Path) -> None:
    with pytest.raises(ew.CapacityError, match="memory"):
        ew.LLM(bundle, memory=1000)
