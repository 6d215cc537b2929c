"""The wheel and the sdist: everything is in them, once, under the right names."""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import agentgym
from agentgym import registration

ROOT = Path(__file__).parents[1]
LINKED = ("envs", "tools", "trainer")
SOURCES = ("agentgym", *LINKED, "pyproject.toml", "README.md", "LICENSE")
MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which Python finds the build backend that pyproject.toml asks for."""
    installed = [d.version for d in importlib.metadata.distributions(name="setuptools")]
    if installed and int(installed[0].partition(".")[0]) >= 77:
        return {**os.environ}
    target = tmp_path_factory.mktemp("backend")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "setuptools>=77"]
    if subprocess.run(install, check=False).returncode != 0:
        pytest.skip("setuptools 77 or newer is neither installed nor to be had")
    return {**os.environ, "PYTHONPATH": str(target)}


def build(kind: str, source: Path, backend: dict[str, str]) -> Path:
    """Run the backend's ``build_wheel`` or ``build_sdist`` in ``source``; the path of what it made."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('out'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=backend, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return source / "out" / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from, links kept, so that no build folder appears in the working tree."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, backend: dict[str, str]) -> Path:
    return build("wheel", checkout, backend)


@pytest.fixture(scope="module")
def sdist(checkout: Path, backend: dict[str, str]) -> Path:
    return build("sdist", checkout, backend)


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def files_of(folder: Path, pattern: str) -> set[str]:
    """Paths of the files below ``folder``, links followed, as they stand in the wheel."""
    found = set()
    for parent, _, files in os.walk(folder, followlinks=True):
        found |= {str((Path(parent) / file).relative_to(folder.parent)) for file in files if Path(file).match(pattern)}
    return found


@pytest.mark.parametrize("name", LINKED)
def test_the_three_folders_are_linked_into_the_package(name: str) -> None:
    link = ROOT / "agentgym" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {Path(file).parent for file in files_of(ROOT / "agentgym", "*.py")}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_the_wheel_has_every_module_once_and_nothing_generic(wheel: Path) -> None:
    names = names_in(wheel)
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {"agentgym", f"agentgym-{agentgym.__version__}.dist-info"}
    assert {name for name in names if name.endswith(".py")} == files_of(ROOT / "agentgym", "*.py")
    assert "agentgym/py.typed" in names


def test_the_wheel_has_the_data_that_the_trainer_reads(wheel: Path) -> None:
    data = {
        name
        for folder in ("models", "presets")
        for name in files_of(ROOT / "trainer" / folder, "*")
        if not name.endswith((".py", ".pyc"))
    }
    assert {f"agentgym/trainer/{name}" for name in data} <= set(names_in(wheel))


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 10 * MEGABYTE


def test_the_metadata_say_what_the_package_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"agentgym-{agentgym.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Name"] == "agentgym"
    assert metadata["Version"] == agentgym.__version__ == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"vllm", "mcp", "wandb", "mlflow", "test", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    assert "agentgym = agentgym.cli:main" in entry_points


def test_the_unpacked_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, 'site')\n"
        "import agentgym, agentgym.envs, agentgym.tools, agentgym.trainer\n"
        "print(agentgym.__file__); print(agentgym.trainer.__file__); print(agentgym.list_envs())\n"
        "env = agentgym.make('twenty-questions'); env.reset(seed=0); env.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, trainer, names = done.stdout.splitlines()
    assert Path(package).resolve() == tmp_path / "site" / "agentgym" / "__init__.py"
    assert Path(trainer).resolve() == tmp_path / "site" / "agentgym" / "trainer" / "__init__.py"
    assert names == str(sorted(registration.SHIPPED))


def test_the_wheel_that_comes_from_the_sdist_is_the_same(
    sdist: Path, wheel: Path, backend: dict[str, str], tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / f"agentgym-{agentgym.__version__}", backend)
    assert set(names_in(again)) == set(names_in(wheel))
