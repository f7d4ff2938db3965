"""Runs mutated files in a process of its own: ``python -m ...mutation_worker SUBJECT SOURCE WORK FIRST COUNT``.

Before each case its number goes to stdout, so that whoever reads it knows which one ended the process; what went wrong
otherwise follows as text, or "refused" if it was an error of ours. The address space is limited, and a case that takes
too long ends the process.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import json
import os
import random
import resource
import shutil
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright.runtime.shared.errors import EnginewrightError
from tests.acceptance.mutations import mutate_bytes, mutate_json, mutate_meaning

EXTENSION = "EW_SANITIZED_EXTENSION"
"""In the environment: an extension built with sanitizers, to be tested in place of the package's."""
SECONDS = 120  # a hundred times what a case takes
ADDRESS_SPACE = 3 << 29  # beyond what the process has when it begins
OF_XLA = 1 << 36
"""Each client of XLA's has threads of its own, and XLA ends the process that has no room for their stacks."""
MEMORY = 1 << 29

if TYPE_CHECKING:
    from enginewright.runtime.text.tokenizer import Tokenizer

Case = Callable[[random.Random], None]


def _bundle_case(folder: Path, name: str) -> Case:
    """A file of a bundle, which is then opened, and answers a prompt. Sizes that manifests state are mended."""
    from enginewright.runtime.engine.llm import LLM
    from enginewright.runtime.requests.sampling import SamplingParams

    path = folder / name
    original = path.read_bytes()
    listed_in = folder / ("targets/cpu" if name.startswith("targets/") else "") / "manifest.json"
    manifest = listed_in.read_bytes()
    params = SamplingParams(max_tokens=3, temperature=0.7, seed=1)

    def run(rng: random.Random) -> None:
        data = mutate_json(rng, original) if name.endswith(".json") else mutate_bytes(rng, original, len(original))
        with _replaced(path, data, original):
            if listed_in != path and rng.random() < 0.95:
                listed = json.loads(manifest)
                listed["files"][str(path.relative_to(listed_in.parent))]["bytes"] = len(data)
                listed_in.write_text(json.dumps(listed))
            try:
                with LLM(folder, threads=2, memory="2MiB", max_requests=4) as llm:
                    llm.generate([[1, 5, 7, 9] * 10, [3]], params)
                    if name.startswith("tokenizer/"):
                        _use_tokenizer(llm.tokenizer)
            finally:
                if listed_in != path:
                    listed_in.write_bytes(manifest)

    return run


def _meaning_case(folder: Path, name: str) -> Case:
    """A bundle whose program, index and manifest mean something else; it is opened, and answers prompts."""
    from enginewright.runtime.engine.llm import LLM
    from enginewright.runtime.requests.sampling import SamplingParams

    files = {"program": "targets/cpu/programs/decode.json", "index": "weights/index.json", "manifest": "manifest.json"}
    listed = {"program": "targets/cpu/manifest.json", "index": "manifest.json"}
    originals = {path: (folder / path).read_bytes() for path in {*files.values(), *listed.values()}}
    params = SamplingParams(max_tokens=3, temperature=0.7, seed=1)

    def run(rng: random.Random) -> None:
        documents = {part: json.loads(originals[path]) for part, path in files.items()}
        mutate_meaning(rng, documents)
        target = json.loads(originals["targets/cpu/manifest.json"])
        texts = {part: json.dumps(documents[part]).encode() for part in ("program", "index")}
        target["files"]["programs/decode.json"]["bytes"] = len(texts["program"])
        documents["manifest"]["files"][files["index"]]["bytes"] = len(texts["index"])
        written = {files[part]: text for part, text in texts.items()}
        written["manifest.json"] = json.dumps(documents["manifest"]).encode()
        written["targets/cpu/manifest.json"] = json.dumps(target).encode()
        try:
            for path, data in written.items():
                (folder / path).write_bytes(data)
            with LLM(folder, threads=2, memory="2MiB", max_requests=4) as llm:
                llm.generate([[1, 5, 7, 9] * 10, [3]], params)
                llm.logits([1, 2, 3])
        finally:
            for path, data in originals.items():
                (folder / path).write_bytes(data)

    return run


def _hostile_case(folder: Path, target: str) -> Case:
    """A file of a bundle of many targets, in which all sizes and hashes are mended; one of its targets is asked for.

    Code that was altered is opened by who doesn't trust it, or trusts what it was. The rest may be anybody's.
    """
    from enginewright.runtime.bundle.output_folder import why_not_a_bundle
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.engine.llm import LLM
    from enginewright.runtime.requests.sampling import SamplingParams

    opened = Bundle.open(folder)
    manifests = ["manifest.json", f"targets/{target}/manifest.json"]
    files = [p for p in opened.files if p.startswith(f"targets/{target}/")]
    files += [p for p in opened.files if p.endswith(".onnx")] if target == "onnx" else []
    others = [p for p in opened.files if p.startswith(("weights/", "tokenizer/"))]
    choices = [*manifests, *manifests, *files, *files, *others]
    originals = {path: (folder / path).read_bytes() for path in choices}
    params = SamplingParams(max_tokens=3, temperature=0.7, seed=1)

    def run(rng: random.Random) -> None:
        path = rng.choice(choices)
        json_file = path.endswith(".json")
        data = mutate_json(rng, originals[path]) if json_file else mutate_bytes(rng, originals[path], 4096)
        written = {path: data} | (_mended(originals, path, data, target) if rng.random() < 0.9 else {})
        code = path.endswith((".so", ".bc", ".vmfb"))
        trust = rng.choice((None, opened.hash) if code else (None, opened.hash, "code", "code", "code"))
        try:
            for name, content in written.items():
                (folder / name).write_bytes(content)
            foreign = folder / rng.choice(("notes.txt", "report/notes.txt", "weights.txt", f"targets/{target}.txt"))
            foreign.parent.mkdir(exist_ok=True)
            foreign.write_text("mine")
            if why_not_a_bundle(folder) is None:
                raise AssertionError(f"--force would delete {foreign.name}")
            foreign.unlink()
            options = {"threads": 1, "context": 24, "max_requests": 2, "memory": rng.choice((None, "2MiB"))}
            with LLM(folder, target=target, trust=trust, verify=rng.choice((None, True, False)), **options) as llm:
                llm.generate([[1, 5, 7, 9] * 4, [3]], params)
                llm.logits([1, 2, 3])
                if path.startswith("tokenizer/"):
                    _use_tokenizer(llm.tokenizer)
        finally:
            for name in written:
                (folder / name).unlink()
                (folder / name).write_bytes(originals[name])

    return run


def _mended(originals: dict[str, bytes], path: str, data: bytes, target: str) -> dict[str, bytes]:
    """The manifests to write next to an altered file, so that sizes and hashes agree with it."""
    from enginewright.runtime.bundle.manifest import _sealed

    try:
        if path.endswith("manifest.json"):
            fields, listed_in = json.loads(data), path
        else:
            in_target = path.startswith("targets/")
            listed_in = f"targets/{target}/manifest.json" if in_target else "manifest.json"
            fields = json.loads(originals[listed_in])
            entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            fields["files"][path.removeprefix(f"targets/{target}/") if in_target else path] = entry
            if fields.get("tvm") and path.endswith("programs/decode.json") and len(data) % 2:
                fields["tvm"].pop("program", None)  # as bundles were before: then the program alone says what is right
        fields.pop("sha256", None)
        return {listed_in: _sealed(fields).encode()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}


def _checkpoint_case(folder: Path, name: str) -> Case:
    """A file of a Hugging Face folder, whose tensors are then bound to its model and read."""
    from enginewright.optimizer.capture import build_from_directory, check_source, huggingface
    from enginewright.optimizer.capture.bind_weights import bind_weights
    from enginewright.optimizer.capture.convert_weights import by_model_names

    path = folder / name
    original = path.read_bytes()
    model, _ = build_from_directory(folder)

    def run(rng: random.Random) -> None:
        with _replaced(path, _mutate_safetensors(rng, original), original):
            if name == check_source.CONFIG:
                weights = build_from_directory(folder)[1]
            else:  # the model is the same, and takes longer than the rest
                tensors = by_model_names(model, huggingface.read_tensors(folder), source=str(folder))
                weights = bind_weights(model, tensors, source=str(folder))
            for weight in weights.values():
                weight.evaluate()

    return run


def _tokenizer_case(folder: Path, name: str) -> Case:
    """A file of a Hugging Face folder's tokenizer."""
    from enginewright.optimizer.capture.tokenizer import load_tokenizer, tokenizer_files
    from enginewright.runtime.text.tokenizer import Tokenizer

    path = folder / name
    original = path.read_bytes()

    def run(rng: random.Random) -> None:
        with _replaced(path, mutate_json(rng, original), original):
            loaded = load_tokenizer(folder)
            if loaded is not None:
                files = tokenizer_files(loaded)
                if files.tokenizer_json is not None:
                    _use_tokenizer(Tokenizer(files))

    return run


def _use_tokenizer(tokenizer: Tokenizer) -> None:
    if tokenizer.chat_templates:
        tokenizer.encode_chat([{"role": "user", "content": "Hi <b>é</b> 😀"}])
    detokenizer = tokenizer.detokenizer(ids := tokenizer.encode("Hello, wörld 😀"))
    for token in (*ids, 5, 300, 0):
        detokenizer.push(token)
    detokenizer.flush()


def _gguf_case(folder: Path, name: str) -> Case:
    """A GGUF file, of which everything is read that an export reads: configuration, tensors and tokenizer."""
    from enginewright.optimizer.capture import build_from_gguf
    from enginewright.optimizer.capture.gguf.file import open_gguf
    from enginewright.optimizer.capture.gguf.model import read_tokenizer

    path = folder / name
    original = path.read_bytes()
    header = min(tensor.data_offset for tensor in open_gguf(path).tensors.values())

    def run(rng: random.Random) -> None:
        with _replaced(path, mutate_bytes(rng, original, header), original):
            file = open_gguf(path)
            for weight in build_from_gguf(file)[1].values():
                weight.evaluate()
            read_tokenizer(file)

    return run


def _faulty_case(folder: Path, name: str) -> Case:
    """Does what no case may do: for a test of the tests."""

    def run(rng: random.Random) -> None:
        kind = rng.randrange(8)
        if kind == 0:
            os.abort()
        if kind == 1:
            raise ValueError("not ours")
        if kind == 2:
            bytearray(1 << 40)
        if kind == 3:
            raise EnginewrightError("ours")

    return run


SUBJECTS: dict[str, tuple[Callable[[Path, str], Case], str]] = {
    "safetensors": (_checkpoint_case, "model.safetensors"),
    "shards": (_checkpoint_case, "model.safetensors.index.json"),
    "config": (_checkpoint_case, "config.json"),
    "tokenizer": (_tokenizer_case, "tokenizer.json"),
    "special": (_bundle_case, "tokenizer/special_tokens.json"),
    "template": (_bundle_case, "tokenizer/chat_template.jinja"),
    "bundled": (_bundle_case, "tokenizer/tokenizer.json"),
    "gguf": (_gguf_case, "tiny.gguf"),
    "manifest": (_bundle_case, "manifest.json"),
    "target": (_bundle_case, "targets/cpu/manifest.json"),
    "index": (_bundle_case, "weights/index.json"),
    "weights": (_bundle_case, "weights/weights-00000.bin"),
    "program": (_bundle_case, "targets/cpu/programs/decode.json"),
    "buckets": (_bundle_case, "targets/cpu/buckets/plan.json"),
    "meaning": (_meaning_case, ""),
    "faulty": (_faulty_case, ""),
    **{f"hostile-{target}": (_hostile_case, target) for target in ("cpu", "onnx", "tvm", "stablehlo")},
}


def _mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Half of the time the header stays JSON of the length that is stated before it."""
    if data[:1] == b"{":
        return mutate_json(rng, data)
    (length,) = struct.unpack_from("<Q", data)
    if rng.random() < 0.5:
        return mutate_bytes(rng, data, 8 + length)
    header = mutate_json(rng, data[8 : 8 + length])
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


@contextmanager
def _replaced(path: Path, data: bytes, original: bytes) -> Iterator[None]:
    # A new file each time: what is still mapped of the last case keeps its own.
    path.unlink()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink()
        path.write_bytes(original)


def _load_extension(path: str) -> None:
    """Puts an extension that was built with sanitizers in place of the package's."""
    name = "enginewright.plugins.cpu._cpu"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    package = importlib.import_module("enginewright.plugins.cpu")
    vars(package)["_cpu"] = module


def _limit_address_space(most: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most,) * 2)


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode(errors="backslashreplace"))


def main() -> None:
    subject, source, work, first, count = sys.argv[1:]
    sanitized = os.environ.get(EXTENSION)
    if sanitized is not None:
        _load_extension(sanitized)
    folder = Path(work)
    shutil.copytree(source, folder)
    make, name = SUBJECTS[subject]
    run = make(folder, name)
    if sanitized is None:  # its shadow memory is terabytes of addresses
        _limit_address_space(OF_XLA if subject.endswith("stablehlo") else ADDRESS_SPACE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(int(first), int(first) + int(count)):
        _say(str(index))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            run(random.Random(f"{subject} {index}"))
        except EnginewrightError:
            _say("refused")
        except BaseException:  # noqa: BLE001  that there is none is what is tested
            _say(f"case {subject} {index} ended with an error that is none of ours\n{traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > MEMORY:
            _say(f"case {subject} {index} took {grown:,} bytes of memory")
            before += grown // 1024


if __name__ == "__main__":
    main()
