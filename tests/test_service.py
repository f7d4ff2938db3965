"""examples/service and the page on it: the image and the unit name files, extras and options that there are."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from enginewright.optimizer.cli.app import app
from enginewright.runtime.server.http.engine_options import replica_options
from enginewright.runtime.server.http.option_files import options_from_file
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.shared.errors import RequestError

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "examples" / "service"
UNIT = FOLDER / "enginewright.service"
PAGE = (REPOSITORY / "docs" / "build" / "service.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, each on one line."""
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (x.partition(" ") for x in lines if x and not x.startswith("#"))]


def said(name: str) -> list[str]:
    """The arguments of all instructions with that name."""
    return [rest for instruction, rest in instructions() if instruction == name]


def options_of(command: str) -> set[str]:
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {flag for one in known for flag in (*one.opts, *one.secondary_opts)}


def unit() -> dict[str, list[str]]:
    """Keys of the unit's section Service, with all their values."""
    sections: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            sections.setdefault(key, []).append(value)
    return sections


def test_the_dockerfile_copies_all_that_a_wheel_is_built_from() -> None:
    copied = {name for rest in said("COPY") if not rest.startswith("--from") for name in rest.split()[:-1]}
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    links = {path.readlink().name for path in (REPOSITORY / "src" / "enginewright").iterdir() if path.is_symlink()}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert copied >= {"CMakeLists.txt", "pyproject.toml", "src", *links, "README.md", *project["license-files"]}
    (extras,) = re.findall(r"whl\)\[(\w+)\]", "\n".join(said("RUN")))
    assert extras in project["optional-dependencies"]


def test_the_build_context_has_all_that_images_copy_and_nothing_that_was_built() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*" and all((REPOSITORY / name).exists() for name in allowed)
    copied = {name for rest in said("COPY") if not rest.startswith("--from") for name in rest.split()[:-1]}
    assert copied | {"examples"} == allowed
    assert {"build", "docs", "tests", "benchmarks", ".git", ".venv"}.isdisjoint(allowed)


def test_the_image_runs_as_nobody_s_user_a_command_that_there_is() -> None:
    assert [rest.split()[0] for rest in said("FROM")] == ["${PYTHON}"] * 2  # one Python and one glibc
    assert re.fullmatch(r"PYTHON=python:\d+\.\d+-slim-bookworm", said("ARG")[0])
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", said("USER")[-1])
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    entry = json.loads(said("ENTRYPOINT")[-1]) + json.loads(said("CMD")[-1])
    assert entry[:4] == ["python", "-m", "enginewright", "serve"]
    check = json.loads(said("HEALTHCHECK")[-1].partition(" CMD ")[2])
    assert check[0] == "python" and "/health" in check[2]
    compile(check[2], "HEALTHCHECK", "exec")
    for words in (entry, shlex.split(PAGE.partition("enginewright --model")[2].partition("\n")[0])):
        assert {word for word in words if word.startswith("--")} <= options_of("serve")


def test_the_unit_is_closed_and_runs_a_command_that_there_is() -> None:
    sections = unit()
    program, command, *words = sections["ExecStart"][0].split()
    assert (Path(program).name, command) == ("optimize", "serve")
    assert {word for word in words if word.startswith("--")} <= options_of("serve")
    (credential,) = sections["LoadCredential"]
    assert "${CREDENTIALS_DIRECTORY}/" + credential.partition(":")[0] in words
    assert sections.keys() >= {"NoNewPrivileges", "DynamicUser", "PrivateTmp", "PrivateDevices", "ProtectHome"}
    assert sections["ProtectSystem"] == ["strict"] and sections["CapabilityBoundingSet"] == [""]
    assert int(sections["TimeoutStopSec"][0]) > 60  # the drain_seconds of the page
    assert sections["ExecReload"] == ["/bin/kill -HUP $MAINPID"]  # the server reads its options and certificate again


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd isn't installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    program = unit()["ExecStart"][0].split()[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_s_file_of_options_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    file = tmp_path / "server.toml"
    file.write_text(block)
    assert options_from_file(file)["drain_seconds"] < int(unit()["TimeoutStopSec"][0])


@pytest.mark.parametrize("command", ["plan", "export", "verify", "loadtest"])
def test_the_page_s_commands_have_the_options_that_it_names(command: str) -> None:
    lines = re.findall(rf"^optimize {command} (.*)$", PAGE, re.M)
    assert lines
    for line in lines:
        assert {word for word in line.split() if word.startswith("-")} <= options_of(command)


KUBERNETES = REPOSITORY / "examples" / "kubernetes"
CHART = KUBERNETES / "chart"


def manifests(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    return list(yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")))


def pods_of(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of a RayService, whose own schema is KubeRay's, as pods."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]} for group in groups]


def rendered(**values: Any) -> dict[str, dict[str, Any]]:
    """The chart's manifests by their kinds, as helm renders them."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk isn't installed")
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="demo", namespace="models")
    documents = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {document["kind"]: document for document in documents if document is not None}


EVERYTHING = {"serviceMonitor": {"enabled": True}, "autoscaling": {"enabled": True}}


def test_kubernetes_takes_the_manifests() -> None:
    package = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate isn't installed")
    (service,) = manifests("rayservice.yaml")
    pods = pods_of(service)
    assert len(pods) == 2
    chart = rendered(**EVERYTHING)
    assert chart.pop("ServiceMonitor")["apiVersion"] == "monitoring.coreos.com/v1"  # its schema is the operator's
    assert chart.keys() == {"Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Service"}
    for one in (*pods, *chart.values()):
        package.validate(one, "1.31", strict=True)
    pods[0]["spec"]["containers"][0]["imagePolicy"] = "Always"  # the schema would see a wrong key
    with pytest.raises(package.ValidationError, match="imagePolicy"):
        package.validate(pods[0], "1.31", strict=True)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk isn't installed")
    messages = [message for message in helm.lint(str(CHART))["messages"] if message["severity"] > 1]  # 1: information
    assert messages == []


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"server": {"threads": 0}}, "threads"),
        ({"model": {"bundle": "chat.bundle"}}, "bundle"),
    ],
)
def test_the_chart_refuses_values_that_it_does_not_know(values: dict[str, Any], name: str) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk isn't installed")
    with pytest.raises(helm.HelmError, match=name):
        rendered(**values)


def test_the_deployment_has_options_that_there_are() -> None:
    chart = rendered(server={"drainSeconds": 120, "extraArgs": ["--tenant-metrics", "5"]})
    template = chart["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    flags = {one for one in container["args"] if one.startswith("--")}
    assert "--tenant-metrics" in flags and flags <= options_of("serve")
    assert all(isinstance(one, str) for one in container["args"])
    drain = float(container["args"][container["args"].index("--drain-seconds") + 1])
    assert drain == 120 and template["spec"]["terminationGracePeriodSeconds"] > drain
    assert chart["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in template["spec"]["volumes"]}
    user = template["spec"]["securityContext"]["runAsUser"]
    assert said("USER") == [f"{user}:{user}"]


def test_every_selector_of_the_chart_selects_the_pods() -> None:
    chart = rendered(**EVERYTHING)
    labels = chart["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
        assert chart[kind]["spec"]["selector"]["matchLabels"].items() <= labels, kind
    assert chart["Service"]["spec"]["selector"].items() <= labels
    assert (
        chart["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        <= chart["Service"]["metadata"]["labels"].items()
    )
    (endpoint,) = chart["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["port"] == chart["Service"]["spec"]["ports"][0]["name"]
    scaled = chart["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == chart["Deployment"]["metadata"]["name"]
    assert "replicas" not in chart["Deployment"]["spec"]  # or each upgrade would undo what was scaled
    assert rendered()["Deployment"]["spec"]["replicas"] == 1 and "HorizontalPodAutoscaler" not in rendered()


def test_an_image_is_named_by_its_digest_where_there_is_one() -> None:
    digest = "sha256:" + "0" * 64
    for image, expected in (({"tag": "0.1.0"}, "enginewright:0.1.0"), ({"digest": digest}, f"enginewright@{digest}")):
        (container,) = rendered(image=image)["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == expected


def test_the_chart_has_the_version_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (CHART / "Chart.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^(?:appVersion|version): (\S+)$", text, re.M) == [project["version"]] * 2


def test_the_ray_service_says_what_the_application_takes() -> None:
    import yaml

    (service,) = manifests("rayservice.yaml")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    options = ServerOptions(**app["args"], ray="auto")
    options.check()
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    each = replica_options(options)["threads"]
    assert [group["rayStartParams"]["num-cpus"] for group in workers] == [str(each)]
    assert workers[0]["minReplicas"] == options.replicas and workers[0]["maxReplicas"] == options.max_replicas
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    (pinned,) = [one for one in project["optional-dependencies"]["ray"] if one.startswith("ray[")]
    assert f">={version.rpartition('.')[0]}" in pinned
    assert f"rayproject/ray:{version}" in (KUBERNETES / "rayservice.yaml").read_text(encoding="utf-8")


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_the_ray_service_names_an_application() -> None:
    pytest.importorskip("ray", reason="the extra ray isn't installed")
    import yaml
    from ray.serve.schema import ServeDeploySchema

    (service,) = manifests("rayservice.yaml")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    ServeDeploySchema(**config)
    (app,) = config["applications"]
    module, _, name = app["import_path"].partition(":")
    application = getattr(importlib.import_module(module), name)(app["args"])
    assert type(application).__name__ == "Application"
    with pytest.raises(RequestError, match="threads"):
        getattr(importlib.import_module(module), name)({**app["args"], "llm": {}})
    with pytest.raises(RequestError, match=r"args: .*`replica`"):
        getattr(importlib.import_module(module), name)({**app["args"], "replica": 2})
    with pytest.raises(RequestError, match="nobody needs a key"):
        getattr(importlib.import_module(module), name)({**app["args"], "api_keys": None})
