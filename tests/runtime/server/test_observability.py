"""examples/observability: each series and label that a rule or a panel names is in the metrics of a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from .conftest import Server

promql = pytest.importorskip("promql_parser", reason="promql-parser isn't installed")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "observability"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "grafana" / "enginewright.json").read_text(encoding="utf-8"))
BY_PROMETHEUS = {"job", "instance"}
"""The labels that Prometheus adds to each series that it reads."""
INTERVAL = re.compile(r"\$__rate_interval")


def expressions() -> dict[str, str]:
    """Every PromQL expression of the rules and the dashboard, by a name."""
    named = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            named[f"{panel['title']} {target['refId']}"] = INTERVAL.sub("5m", target["expr"])
    return named


def nodes(expression: Any) -> Iterator[Any]:
    """An expression and all expressions within it."""
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(expression, name, None)
        if isinstance(inner, promql.Expr):
            yield from nodes(inner)
    for inner in getattr(expression, "args", ()):
        yield from nodes(inner)


def labels_used(expression: Any) -> set[str]:
    """The labels that an expression selects or groups by."""
    used: set[str] = set()
    for node in nodes(expression):
        if isinstance(node, promql.VectorSelector):
            used |= {matcher.name for matcher in node.matchers.matchers} - {"__name__"}
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql.AggregateExpr) and modifier is not None:
            used |= set(modifier.labels)
    return used


def names_used(expression: Any) -> set[str]:
    return {node.name for node in nodes(expression) if isinstance(node, promql.VectorSelector)}


@pytest.fixture(scope="module")
def series(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Each series of a server that has answered, by its name, with the names of its labels."""
    errors = tmp_path_factory.mktemp("watched") / "stderr"
    server = Server(tiny_bundle, "--tenant-metrics", "2", errors=errors)
    try:
        assert server.chat("Hello", max_tokens=4, ignore_eos=True).status == 200
        assert server.chat("Hello", max_tokens=-7).status == 400
        page = server.ask("GET", "/metrics").body.decode()
    finally:
        assert server.stop() == 0, errors.read_text()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        # A series without samples yet, such as that of errors, is announced all the same.
        labels.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_series_and_label_that_is_named_exists(series: dict[str, set[str]]) -> None:
    recorded = {rule["record"]: labels_used(promql.parse(rule["expr"])) for rule in RULES if "record" in rule}
    known = series | recorded | {"up": set()}
    for title, text in expressions().items():
        expression = promql.parse(text)
        names = names_used(expression)
        assert names and names <= known.keys(), (title, names - known.keys())
        labels = BY_PROMETHEUS.union(*(known[name] for name in names))
        if any(known[name] for name in names):  # a series without samples has no labels to compare with
            assert labels_used(expression) <= labels | {"helper"}, title


def test_the_chart_scales_by_a_series_that_is_there(series: dict[str, set[str]]) -> None:
    values = yaml.safe_load((FOLDER.parent / "kubernetes" / "chart" / "values.yaml").read_text(encoding="utf-8"))
    assert values["autoscaling"]["metric"] in series


def test_the_page_says_what_to_do_about_each_alert() -> None:
    page = (FOLDER.parents[1] / "docs" / "build" / "service.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `Enginewright"))
    assert set(re.findall(r"`(\w+)`", rows)) == {rule["alert"] for rule in RULES if "alert" in rule}


def test_the_check_sees_a_series_and_a_label_that_are_not_there(series: dict[str, set[str]]) -> None:
    wrong = promql.parse('sum by (model) (rate(enginewright_tokens_total{tenants="a"}[5m])) / 2')
    assert names_used(wrong) - series.keys() == {"enginewright_tokens_total"}
    assert labels_used(wrong) == {"model", "tenants"}


def test_a_label_in_an_alert_s_text_is_one_that_its_expression_keeps(series: dict[str, set[str]]) -> None:
    for rule in RULES:
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in {"warning", "critical"} and rule["annotations"]["summary"]
        expression = promql.parse(rule["expr"])
        labels = labels_used(expression) | BY_PROMETHEUS
        if not any(isinstance(node, promql.AggregateExpr) for node in nodes(expression)):
            labels |= set().union(*(series.get(name, {"model_name"}) for name in names_used(expression)))
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= labels, rule["alert"]


def test_each_alert_and_record_has_a_name_of_its_own() -> None:
    names = [rule.get("alert") or rule["record"] for rule in RULES]
    assert len(names) == len(set(names)) and sum("alert" in rule for rule in RULES) >= 8


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    (variable,) = DASHBOARD["templating"]["list"]
    assert re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])


def test_files_that_compose_mounts_exist_and_name_each_other() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                mounts[target] = FOLDER / source
    assert mounts and all(path.is_file() for path in mounts.values())
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert [mounts[path].name for path in prometheus["rule_files"]] == ["rules.yml"]
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}] and "server" in services
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel} == {
        source["uid"] for source in yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"]
    }
    assert all(
        (FOLDER / one["build"]["context"]).resolve() == FOLDER.parents[1] for one in services.values() if "build" in one
    )
