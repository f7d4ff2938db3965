from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from tests.plugins.tensorrt.compile.test_build import PLANS, READY, built, bundle, engines_of  # noqa: F401  a fixture


def test_a_ready_target_is_shown(bundle: Path) -> None:  # noqa: F811
    built(bundle, machine=READY, make=engines_of(PLANS))
    shown = CliRunner().invoke(app, ["build", str(bundle)])
    assert shown.exit_code == 0
    assert "target tensorrt: ready before" in shown.stdout and "by TensorRT 11.4.0.106" in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["build", str(bundle), "--json"]).stdout)
    assert (document["built"], document["target"], len(document["engines"])) == (False, "tensorrt", 2)


def test_what_can_t_be_built_has_an_exit_code(bundle: Path) -> None:  # noqa: F811
    assert CliRunner().invoke(app, ["build", str(bundle), "--target", "onnx"]).exit_code == 7
    assert CliRunner().invoke(app, ["build", str(bundle), "--help"]).exit_code == 0
