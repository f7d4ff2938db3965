from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import gguf
import pytest

from enginewright.optimizer.sbom import source_facts
from enginewright.optimizer.sbom.source_facts import _licence_of_directory, _licence_of_gguf
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.shared.progress import ProgressEvent


def test_every_file_is_hashed(tiny_bundle: Path, tiny_folder: Path) -> None:
    events: list[ProgressEvent] = []
    facts = source_facts(Bundle.open(tiny_bundle), tiny_folder, events.append)
    there = {p.name: p.read_bytes() for p in tiny_folder.iterdir()}
    assert {n: (f.bytes, f.sha256) for n, f in facts.files.items()} == {
        n: (len(data), hashlib.sha256(data).hexdigest()) for n, data in there.items()
    }
    assert (facts.name, facts.licence) == (tiny_folder.name, None)
    total = sum(map(len, there.values()))
    assert (events[-1].stage, events[-1].done, events[-1].total) == ("source", total, total)


def test_another_model_is_refused_by_its_name(tiny_bundle: Path, tiny_folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    with pytest.raises(SourceError, match=r"source: .*nothing doesn't exist"):
        source_facts(bundle, tmp_path / "nothing")
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    with pytest.raises(SourceError, match=f"was made from {tiny_folder.name} .huggingface., and .* is called other"):
        source_facts(bundle, other)
    file = tmp_path / tiny_folder.name
    file.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="was made from"):
        source_facts(bundle, file)


@pytest.mark.parametrize(
    ("card", "config", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: mit\n", "{}", "apache-2.0"),
        ("---\nlicense: 'MIT'  # as ever\n---\n", "{}", "MIT"),
        ("---\nlicense: other\nlicense_name: our-own\n---\n", "{}", "our-own"),
        ("# A model\n\nlicense: mit\n", '{"license": "bsd-3-clause"}', "bsd-3-clause"),
        ("---\ntags:\n- a\n---\n", '{"license": 7}', None),
        ("---\nlicense:\n- mit\n---\n", "{}", None),  # a list: nothing is guessed
        (None, '{"license": " "}', None),
    ],
)
def test_the_licence_of_a_folder(card: str | None, config: str, licence: str | None, tmp_path: Path) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    (tmp_path / "config.json").write_text(config)
    assert _licence_of_directory(tmp_path) == licence


def test_the_licence_of_a_gguf_file(tmp_path: Path) -> None:
    for stated, expected in (("apache-2.0", "apache-2.0"), ("", None), (None, None)):
        path = tmp_path / "a.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if stated is not None:
            writer.add_license(stated)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert _licence_of_gguf(path) == expected


def test_a_damaged_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json: not JSON"):
        _licence_of_directory(tmp_path)
