"""The cost of fewer key/value heads, by each way of grouping them and before any recovery.

    python benchmarks/kv_heads.py [--kv-heads 1] [--tokens 2048] [--update-docs]

The model (SmolLM2-135M-Instruct, or --model) is captured and normalised once. Each way converts a copy, which is then
evaluated in torch on the first tokens of the package's text, window by window: KL from the source, and perplexity. It
is calibrated with the rest of that text.

Everything is written to a JSON file; --update-docs puts the table into benchmarks/notes/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers.loading import load_module
from peers.machine import commit, processor
from peers.marked_table import MarkedTable

from enginewright.optimizer.capture import capture
from enginewright.optimizer.measure.texts import BUILT_IN, EVALUATION_TEXT, read_text
from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.passes.attention.group_kv_heads import GroupKvHeads
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.kv_options import KvGrouping, KvMethod, KvOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.runtime.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "benchmarks" / "notes" / "quantization.md"
TABLE = MarkedTable("kv_heads.py")
WAYS: tuple[tuple[KvMethod, KvGrouping], ...] = (
    ("mean", "neighbours"),
    ("mean", "similar"),
    ("calibrated", "neighbours"),
    ("calibrated", "similar"),
)
WINDOW = 512
LENGTH = 256
"""The tokens of a calibration sequence."""


@dataclass(frozen=True)
class Row:
    """The cost of one way of grouping.

    Attributes:
        kl: mean KL from the source in nats per token.
        error: mean squared relative error of the attentions' outputs on the calibration tokens; None if it uses none.
    """

    method: str
    grouping: str
    perplexity: float
    kl: float
    top1_agreement: float
    error: float | None
    seconds: float


def main() -> None:
    """Converts, evaluates, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--kv-heads", type=int, default=1, help="of every layer")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text that are evaluated on")
    parser.add_argument("--json", type=Path, help="where the result goes; benchmarks/results/kv-heads-* if left out")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()

    model = arguments.model or load_module("fetch_model", HERE.parent / "examples" / "fetch_model.py").fetch()
    captured = capture(model)
    assert captured.tokenizer_files is not None
    tokenizer = Tokenizer(captured.tokenizer_files)
    program = captured.program
    PassManager(split_before(default_pipeline(), GroupKvHeads.name)[0]).run(program)
    ids = torch.tensor(tokenizer.encode(read_text(BUILT_IN, "text", EVALUATION_TEXT)), dtype=torch.int32)
    windows = [w for w in ids[: arguments.tokens].split(WINDOW) if len(w) > 1]
    calibration = [w for w in ids[arguments.tokens :].split(LENGTH) if len(w) > 1]
    before = _logits(program, windows)
    rows = [_row("", "", windows, before, before, None, 0.0)]
    for method, grouping in WAYS:
        if arguments.kv_heads == 1 and grouping == "similar":
            continue  # one group has all heads, whichever are alike
        start, copy = time.perf_counter(), program.copy()
        options = KvOptions(kv_heads=arguments.kv_heads, method=method, grouping=grouping)
        record = GroupKvHeads().run(
            copy, PassContext(recipe=PassOptions(attention=options, name="kv_heads"), calibration=tuple(calibration))
        )
        seconds = time.perf_counter() - start
        errors = [f.value for f in record.metrics if f.name.startswith("relative error")]
        after = _logits(copy, windows)
        error = sum(errors) / len(errors) if errors else None
        rows.append(_row(method, grouping, windows, before, after, error, seconds))
        print(rows[-1], flush=True)
    result = {
        "model": Path(model).name,
        "kv_heads": arguments.kv_heads,
        "text_tokens": sum(map(len, windows)),
        "window": WINDOW,
        "calibration_tokens": sum(map(len, calibration)),
        "processor": processor(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path = arguments.json or HERE / "results" / f"kv-heads-{date.today().isoformat()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.update_docs:
        TABLE.put(PAGE, _table(result))


def _logits(program: Program, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    """[S, V], of each window."""
    fast = FastEvaluation(program, WeightCache(1 << 30))
    return [fast.evaluate(packed_inputs(program, [ids]))[0] for ids in windows]


def _row(
    method: str,
    grouping: str,
    windows: list[torch.Tensor],
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    error: float | None,
    seconds: float,
) -> Row:
    loss, kl, agreed, scored, seen = 0.0, 0.0, 0, 0, 0
    for ids, a, b in zip(windows, before, after, strict=True):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        loss -= float(q[:-1].gather(1, ids[1:, None].long()).double().sum())
        scored, seen = scored + len(ids) - 1, seen + len(ids)
    perplexity = float(torch.tensor(loss / scored, dtype=torch.float64).exp())
    return Row(method, grouping, perplexity, kl / seen, agreed / seen, error, round(seconds, 1))


def _table(result: dict[str, Any]) -> str:
    lines = [
        "| method | grouping | KL, mean | perplexity | same likeliest token | error of what attention adds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        name = f"`{row['method']}` | `{row['grouping']}`" if row["method"] else "the source |"
        error = "" if row["error"] is None else f"{row['error']:.2f}"
        kl, same = (f"{row['kl']:.2f}", f"{row['top1_agreement']:.1%}") if row["method"] else ("", "")
        lines.append(f"| {name} | {kl} | {row['perplexity']:,.1f} | {same} | {error} |")
    lines += [
        "",
        f"{result['model']}, {result['kv_heads']} key/value head in every layer; {result['text_tokens']:,} tokens of "
        f"the package's text in windows of {result['window']}, calibrated with {result['calibration_tokens']:,} "
        f"others; {result['date']}, commit {result['commit']}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
