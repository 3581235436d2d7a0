"""The examples of deploy/ name what exists: flags, routes, ports, extras, files, times."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from fixtures.servers import Served
from sparseengine.cli.main import parser_of
from sparseengine.server.middleware import OPEN_PATHS
from sparseengine.server.settings import ServerSettings, server_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def test_every_example_is_looked_at() -> None:
    known = {*DOCKERFILES, "sparseengine.service", "kubernetes.yaml"}
    assert {p.name for p in DEPLOY.iterdir()} == known


def lines(name: str) -> dict[str, list[str]]:
    """Instructions of a Dockerfile or keys of a unit, with all their values."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+)[ =](.*)", line)
        if match:
            found.setdefault(match[1], []).append(match[2].strip())
    return found


def settings_of(argv: list[str]) -> ServerSettings:
    """The server's settings as `serve` reads them; unknown flags end the test."""
    assert argv[0] == "serve"
    return server_settings(parser_of("serve").parse_args(argv[1:]))


def tells_health(served: Served, path: str) -> bool:
    """Whether a server answers there, to those without a key, too, with the engine's health."""
    found = served.get(path)
    return path in OPEN_PATHS and found.status_code == 200 and b'"status":"ok"' in found.content


def test_not_every_route_tells_health(served: Served) -> None:
    others = ("/", "/version", "/v1/models", "/healthz")
    assert tells_health(served, "/ping")
    assert not any(tells_health(served, path) for path in others)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_start_a_server_that_exists(name: str, served: Served) -> None:
    found = lines(name)
    entry, command = json.loads(found["ENTRYPOINT"][0]), json.loads(found["CMD"][0])
    assert entry[0] == "sparseengine"
    args = settings_of([*entry[1:], *command])
    assert found["EXPOSE"] == [str(args.port)]
    probed = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", found["HEALTHCHECK"][0])
    assert probed is not None
    assert int(probed[1]) == args.port
    assert tells_health(served, probed[2]), probed[2]
    for copy in found["COPY"]:
        *sources, _ = copy.split()
        assert all((ROOT / source).exists() for source in sources), copy
    extras = re.search(r"\.\[([\w,]+)\]", found["RUN"][-1])
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(known["optional-dependencies"])


def test_the_unit_waits_longer_than_a_drain() -> None:
    found = lines("sparseengine.service")
    args = settings_of(shlex.split(found["ExecStart"][0])[1:])
    assert int(found["TimeoutStopSec"][0]) > args.drain_timeout
    variables = " ".join(found["Environment"])
    assert "SPARSEENGINE_CACHE_DIR" in variables


def test_pods_are_probed_where_the_server_answers(served: Served) -> None:
    secret, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    args = settings_of(["serve", *container["args"]])
    assert spec["terminationGracePeriodSeconds"] > args.drain_timeout
    (port,) = [p["containerPort"] for p in container["ports"]]
    assert port == args.port
    assert [p["port"] for p in service["spec"]["ports"]] == [port]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port
        assert tells_health(served, asked["path"]), probe
    notes = deployment["spec"]["template"]["metadata"]["annotations"]
    assert int(notes["prometheus.io/port"]) == port
    assert b"sparseengine:num_requests_running" in served.get(notes["prometheus.io/path"]).content
    (variable,) = container["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"]
    assert reference["key"] in secret["stringData"]
    assert variable["name"] == "SPARSEENGINE_API_KEY"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
