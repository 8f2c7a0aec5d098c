"""The images: what the Dockerfile says, and its steps that need no container engine, run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from outrider_chart import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
FINAL = ("cpu", "cuda")


def instructions() -> list[tuple[str, str, str]]:
    """Stage, instruction and words, in order."""
    found, stage = [], ""
    for line in re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.M)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        if word:
            found.append((stage, word, rest.strip()))
    return found


def stages() -> set[str]:
    return {name for name, _, _ in instructions() if name}


def chain(stage: str) -> list[tuple[str, str]]:
    """Instructions of a stage and of those that it begins with."""
    mine = [(word, rest) for name, word, rest in instructions() if name == stage]
    before = next(rest.split()[0] for word, rest in mine if word == "FROM")
    return (chain(before) if before in stages() else []) + mine


def allowed(path: str) -> bool:
    """Whether .dockerignore lets a path into the build."""
    inside = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if any(fnmatch(part, pattern) for part in (path, path.split("/", maxsplit=1)[0])):
            inside = line.startswith("!")
    return inside


def test_a_linter_of_dockerfiles_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stage", FINAL)
def test_nobody_is_root(stage: str) -> None:
    users = [rest for word, rest in chain(stage) if word == "USER"]
    assert users[-1:] == ["10001:10001"]


@pytest.mark.parametrize("stage", sorted(stages()))
def test_a_step_names_no_variable_that_its_stage_lacks(stage: str) -> None:
    """An ARG holds to the end of its stage and in those that begin with it; one before the first FROM holds in none."""
    known = {"HOME", "PATH"}
    for word, rest in chain(stage):
        if word == "ARG":
            known.add(rest.partition("=")[0])
        elif word == "ENV":
            known |= {pair.partition("=")[0] for pair in rest.split()}
        elif word in ("RUN", "COPY", "WORKDIR"):
            shown = re.sub(r"'[^']*'", "", rest)  # what the shell leaves alone
            assert {name for name in re.findall(r"\$\{?(\w+)", shown)} <= known, rest


def test_each_variant_is_made_of_its_own_dependencies() -> None:
    for variant in FINAL:
        [(source, _)] = [re.findall(r"--from=(\S+) (\S+)", rest)[0] for word, rest in chain(variant) if word == "COPY"]
        [step] = [rest for word, rest in chain(source) if word == "RUN" and "image.sh dependencies" in rest]
        assert step.split()[3] == variant
        made = [rest for word, rest in chain(source) if word == "RUN" and "image.sh package" in rest]
        assert len(made) == 1
        assert "image.sh sbom" in made[0]


def test_bases_are_pinned_and_nothing_is_fetched_by_hand() -> None:
    images = [rest for _, word, rest in instructions() if word == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert len(images) == 1
    assert re.fullmatch(r"PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+", images[0])
    assert not [rest for _, word, rest in instructions() if word == "ADD"]


def test_what_is_copied_is_there() -> None:
    for _, word, rest in instructions():
        if word == "COPY" and "--from=" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert allowed(source), source


def test_the_build_sees_neither_history_nor_rubbish() -> None:
    for path in (".git", ".venv", ".cache", "tests", "helm"):
        assert not allowed(path), path


def test_the_chart_fits_the_image() -> None:
    environment = dict(
        pair.split("=", 1) for word, rest in chain("cpu") if word == "ENV" for pair in rest.split() if "=" in pair
    )
    program = (CHART / "templates" / "_program.tpl").read_text()
    assert environment["OUTRIDER_STATE_DIR"] in program
    assert environment["TORCH_EXTENSIONS_DIR"] in program
    trial = yaml.safe_load((CHART / "profiles" / "cpu-trial.yaml").read_text())
    [models] = [rest.split()[-1] for _, word, rest in instructions() if word == "COPY" and rest.startswith("models ")]
    for model in (trial["target"]["model"], trial["drafts"][0]["model"]):
        assert model.startswith(f"{models}/")
        assert (ROOT / "models" / model.removeprefix(f"{models}/") / "config.json").is_file()


def test_the_dependencies_are_those_of_routers_and_workers() -> None:
    """What the step `dependencies` asks for is what this environment has, torch and DeepSpeed among it."""
    done = subprocess.run(
        [ROOT / "scripts" / "image.sh", "requirements", sys.prefix],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    wanted = [Requirement(line) for line in done.stdout.splitlines()]
    assert {"torch", "deepspeed", "ray", "transformers", "redis", "grpcio", "typer"} <= {item.name for item in wanted}
    for item in wanted:
        assert item.specifier.contains(version(item.name)), item


def copy_words(source: Path) -> None:
    """What the build sees before it sees the source."""
    for name in ("pyproject.toml", "constraints.txt", "README.md", "scripts/image.sh"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)


def environment_with_everything(home: Path, *, with_pip: bool) -> Path:
    """A virtual environment that finds what is installed here beside its own; its site-packages."""
    venv.create(home, with_pip=with_pip, symlinks=True)
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "theirs.pth").write_text("\n".join(site.getsitepackages()))
    return packages


@pytest.mark.parametrize("variant", FINAL)
def test_the_dependencies_are_installed_at_the_versions_that_are_pinned(tmp_path: Path, variant: str) -> None:
    """Step `dependencies` with the real pip and no network: what is missing here, or of another version, fails it."""
    copy_words(tmp_path)
    home = tmp_path / "venv"
    packages = environment_with_everything(home, with_pip=False)
    before = set(packages.iterdir())

    def dependencies() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "scripts" / "image.sh", "dependencies", str(home), variant, ""],
            env={"PATH": os.environ.get("PATH", os.defpath), "PIP_NO_INDEX": "1", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = dependencies()
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(packages.iterdir()) == before, "everything was there"
    assert "torch" in (home / "requirements.txt").read_text()
    if variant == "cpu":
        pinned = tmp_path / "constraints.txt"
        pinned.write_text(re.sub(r"^torch==.*$", "torch==0.0.1", pinned.read_text(), flags=re.M))
        refused = dependencies()
        assert refused.returncode != 0
        assert "torch" in refused.stderr


def test_another_variant_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "image.sh", "dependencies", str(tmp_path / "venv"), "tpu"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "image.sh: there is no variant tpu, only cpu and cuda\n")
    assert not (tmp_path / "venv").exists()


def test_the_package_is_made_and_listed_without_a_network(tmp_path: Path) -> None:
    """Steps `package` and `sbom` on a copy of what the build sees, in an environment that has the dependencies."""
    source = tmp_path / "src"
    copy_words(source)
    for name in ("cluster", "workers", "router", "kernels", "bench", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    home = tmp_path / "venv"
    packages = environment_with_everything(home, with_pip=False)
    python = home / "bin" / "python"
    debian = tmp_path / "debian-packages"
    debian.write_text("libgomp1:amd64 12.2.0-14\nbase-files 12.4+deb12u6\n")
    for words in (("package", str(home)), ("sbom", str(home), str(tmp_path / "sbom.json"), str(debian))):
        done = subprocess.run(
            [source / "scripts" / "image.sh", *words], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(*words: str | Path) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path, env={})
        return done.stdout.strip()

    assert Path(run(python, "-P", "-c", "import outrider; print(*outrider.__path__)")) == packages / "outrider"
    for name in ("router/__main__.py", "kernels/cpu/ops.cpp", "workers/target/shard.py", "v1/generation_pb2.py"):
        assert (packages / "outrider" / name).is_file(), name
    assert "--grace" in run(home / "bin" / "outrider", "router", "--help")

    bom = json.loads((tmp_path / "sbom.json").read_text())
    names = {component["name"]: component for component in bom["components"]}
    assert {"outrider", "torch", "ray", "grpcio", "redis"} <= names.keys()
    assert names["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert names["base-files"]["purl"] == "pkg:deb/debian/base-files@12.4%2Bdeb12u6"
    assert names["libgomp1:amd64"]["purl"] == "pkg:deb/debian/libgomp1@12.2.0-14"
