"""The comparison of servers, on a tiny model and ours alone; what is printed, of made-up figures."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import bench_serve
import pytest
from bench_serve import Job, Sizes, tables
from peers import servers
from peers.engines import OURS
from peers.servers import LLAMA_CPP_PYTHON, LLAMA_SERVER, SERVERS, Serving, about, serving_with

SIZES = Sizes(prompt="2-5", answer="2-4", requests=20, rates=(50.0,), seconds=0.2, patience="60s")


@pytest.fixture
def job(tiny_bundle: Path) -> Job:
    serving = Serving(tiny_bundle, Path("missing.gguf"), threads=1, clients=16, context=256)
    return Job("smollm2", SIZES, serving, [OURS], 1)


def test_the_same_requests_go_through_http_and_without(job: Job) -> None:
    figures: dict[str, Any] = {}
    for _ in bench_serve.through(figures, job):
        pass
    (row,) = figures["through"]
    assert row["runtime"]["tokens"] == row[OURS]["tokens"] > 20
    assert row[OURS]["failed"] == 0 and row[OURS]["tokens_counted_by"] == "server"
    took = row[OURS]["cpu_microseconds_per_token"]
    assert set(took) == {"engine", "front_end", "load_tool"} and all(value >= 0 for value in took.values())
    assert row[OURS]["peak_bytes"] > 1 << 20


def test_an_open_loop_has_its_goodput(job: Job) -> None:
    figures: dict[str, Any] = {"sizes": {"ttft": "500ms", "tpot": "50ms"}}
    for _ in bench_serve.goodput(figures, job):
        pass
    (row,) = figures["goodput"]
    assert row["failed"] == 0 and row["goodput"]["asked"] == row["finished"] > 3


def test_both_ways_to_a_first_answer_are_timed(job: Job) -> None:
    assert bench_serve.generate_seconds(job.serving) > 0
    assert bench_serve.serve_seconds(job.serving) > 0


def test_a_server_that_can_t_start_says_why(tmp_path: Path) -> None:
    serving = Serving(tmp_path / "missing.bundle", tmp_path, 1, 1, 64)
    with pytest.raises(RuntimeError, match=r"missing\.bundle"), serving_with(OURS, serving):
        pass


def test_a_process_that_is_gone_took_nothing() -> None:
    assert servers._cpu(2**22 + 1) == 0.0 and servers._peak(2**22 + 1) == 0 and servers._line(2**22 + 1) == b""


def test_peers_have_the_same_threads_and_a_place_for_each_client() -> None:
    serving = Serving(Path("/a/int8.bundle"), Path("/a/q8_0.gguf"), threads=3, clients=16, context=1024)
    assert "--parallel 16 --ctx-size 16384 --threads 3" in about(LLAMA_SERVER, serving)
    assert "--n_threads 3" in about(LLAMA_CPP_PYTHON, serving)
    assert all("/" not in about(name, serving) for name in SERVERS)


SPREAD = {"p50": 0.1, "p99": 0.4}
RESULT: dict[str, Any] = {
    "missing": [{"server": LLAMA_CPP_PYTHON, "reason": "it can't be made"}],
    "models": {
        "smollm2": {
            "sizes": {"ttft": "500ms", "tpot": "50ms"},
            "through": [
                {
                    "runtime": {"tokens_per_second": speed, "cpu_microseconds_per_token": {"process": 900.0}},
                    OURS: {
                        "tokens_per_second": 0.9 * speed,
                        "cpu_microseconds_per_token": {"engine": 950.0, "front_end": 80.0, "load_tool": 20.0},
                        "p50": {"ttft": 0.2},
                        "failed": 1,
                    },
                    LLAMA_SERVER: {"error": "it doesn't answer"},
                }
                for speed in (900.0, 1000.0, 1200.0)
            ],
            "goodput": [
                {
                    "server": OURS,
                    "rate": 4.0,
                    "goodput": {"share": 0.95, "per_second": 3.8},
                    "ttft": SPREAD,
                    "tpot": None,
                    "failed": 2,
                },
                {"server": LLAMA_SERVER, "rate": 4.0, "error": "it doesn't answer"},
            ],
            "start": [
                {"generate": 1.0, "serve": 1.4},
                {"generate": 2.0, "serve": 2.6},
                {"generate": 1.0, "serve": 1.3},
            ],
        }
    },
}


def test_what_is_printed() -> None:
    text = "\n".join(tables(RESULT))
    assert "| runtime | 1000 |  | process 900 |  |  |" in text
    assert f"| {OURS} | 900 | 90.0% | engine 950, front end 80, load tool 20 | 200 ms | 3 |" in text
    assert f"| {LLAMA_SERVER} | failed |" in text
    assert f"| 4, {OURS} | 95.0% | 3.80 | 100 ms | 400 ms |  |  | 2 |" in text
    assert "`optimize generate` 1.00 s, `optimize serve` 1.40 s, 1.30 times" in text
    assert f"{LLAMA_CPP_PYTHON} is left out: it can't be made" in text
    part = copy.deepcopy(RESULT)
    part["models"]["smollm2"] = {"sizes": {}}
    assert "|" not in "\n".join(tables(part))


def test_a_result_goes_onto_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (result := tmp_path / "serve.json").write_text(json.dumps(RESULT))
    (page := tmp_path / "page.md").write_text(
        "Before\n<!-- table: benchmarks/bench_serve.py -->\n<!-- end of table -->\nAfter\n"
    )
    assert bench_serve.main(["--from-json", str(result), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("Before\n") and text.endswith("\nAfter\n") and capsys.readouterr().out.strip() in text
