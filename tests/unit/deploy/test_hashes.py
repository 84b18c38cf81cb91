"""Check that the images' list of hashes fits constraints.txt and pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tools.image_hashes import EXTRAS, is_of_cuda

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy/docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    line.split("==")[0]: line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
}


def _printed(*extras: str) -> dict[str, str]:
    """Return the requirements that an image with these extras installs, by name."""
    done = subprocess.run(
        [sys.executable, DOCKER / "requirements.py", *extras],
        capture_output=True,
        text=True,
        check=True,
    )
    blocks = re.split(r"\n(?! )", done.stdout.rstrip("\n"))
    return {block.partition("==")[0]: block for block in blocks}


def _direct(extra: str) -> set[str]:
    """Return the names that an extra asks for, with those of the extras within it."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    names: set[str] = set()
    for line in lines:
        inner = re.fullmatch(r"scorekit\[([\w,-]+)\]", line)
        if inner:
            names |= set().union(*map(_direct, inner[1].split(",")))
        else:
            match = re.match(r"[\w.-]+", line)
            assert match is not None
            names.add(match[0].lower().replace("_", "-"))
    return names


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_has_all_that_it_asks_for_at_the_version_of_the_constraints(extra):
    """Check what a change of pyproject.toml or constraints.txt breaks; `make lock` mends it."""
    packages = _printed(extra)
    direct_names = {name for name in _direct(extra) if not is_of_cuda(name)}
    assert direct_names <= packages.keys()
    for name, block in packages.items():
        version = re.match(rf"{re.escape(name)}==(\S+)", block)
        assert version is not None
        assert version[1] == PINS.get(name, version[1]), name
        assert not is_of_cuda(name)


def test_every_package_has_hashes_of_its_files():
    packages = _printed(*EXTRAS, "torch", "torch-cuda")
    assert len(packages) > 150
    for name, block in packages.items():
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}(?= \\\n|$)", block)
        assert hashes, name
        assert block.count("--hash") == len(hashes), name


def test_packages_outside_the_constraints_are_only_those_of_cuda_and_of_markers():
    packages = _printed(*EXTRAS, "torch")
    unknown = {name for name in packages if name not in PINS}
    assert all(";" in packages[name].partition("\\")[0] for name in unknown), unknown


def test_torch_and_cuda_are_in_the_layer_of_torch_alone():
    assert PINS["torch"] == _printed("torch-cuda")["torch"].split()[0].partition("==")[2]
    assert "torch" not in _printed("torch")
    assert {"sympy", "jinja2", "networkx"} <= _printed("torch").keys()
    assert any(name.startswith("nvidia-") for name in _printed("torch-cuda"))


def test_the_extras_of_all_images_have_hashes():
    extras: set[str] = set()
    for name in ("docker-compose.yml", "compose.gpu.yml"):
        # `!override` is Compose's own
        text = re.sub(r"!(override|reset)", "", (ROOT / name).read_text(encoding="utf-8"))
        for line in re.findall(r"EXTRAS: \"?([\w -]+)", text):
            extras |= set(line.split())
    for path in [DOCKER / "Dockerfile", *(ROOT / "deploy/k8s").rglob("*.yaml")]:
        for line in re.findall(r'EXTRAS="([\w -]+)"', path.read_text(encoding="utf-8")):
            extras |= set(line.split())
    assert {"metricx", "trainer", "ray"} <= extras <= {*EXTRAS}


def test_an_extra_without_hashes_is_refused():
    done = subprocess.run(
        [sys.executable, DOCKER / "requirements.py", "metricx", "teacher"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("teacher: no extra of an image")


def test_an_image_installs_nothing_else_but_torch_and_vllm():
    script = (DOCKER / "install.sh").read_text(encoding="utf-8")
    (body,) = re.findall(r"^install_hashed\(\) \{(.*?)^\}", script, re.DOTALL | re.MULTILINE)
    assert "install --no-deps --require-hashes -r requirements.txt" in body
    outside = script.replace(body, "")
    assert re.findall(r"^\s*install .*$", outside, re.MULTILINE) == []


def test_grafana_has_no_account_with_a_known_password():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    settings = services["grafana"]["environment"]
    assert not any("PASSWORD" in name for name in settings)
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert all(port.startswith("127.0.0.1:") for port in services["grafana"]["ports"])
