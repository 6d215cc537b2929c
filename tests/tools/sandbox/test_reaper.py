"""The reaper removes what dead owners left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentgym.sandbox_labels import ENVIRONMENT_KEY, FOLDER_PREFIX, Labels, Owner
from agentgym.tools.sandbox.reaper import ReapReport, kill_processes, reap

DEAD = replace(Owner.current(), start=1)


@pytest.fixture(autouse=True)
def own_temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def sleeper(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the labels that the test's parameter gives."""
    labels: Labels = request.param
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**os.environ, ENVIRONMENT_KEY: labels.word},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sleeper", [Labels(owner=DEAD)], indirect=True)
def test_a_process_of_a_dead_owner_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert reap(None).processes == [sleeper.pid]
    assert sleeper.wait(5) == -9


@pytest.mark.parametrize("sleeper", [Labels(expires=0)], indirect=True)
def test_a_process_of_a_living_owner_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    assert not reap(None)
    assert sleeper.poll() is None


@pytest.mark.parametrize("sleeper", [Labels(session="this-one")], indirect=True)
def test_only_what_is_wanted_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert kill_processes(lambda labels: labels.session == "another") == ([], True)
    assert kill_processes(lambda labels: labels.session == "this-one") == ([sleeper.pid], True)


def test_folders_of_dead_owners_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    dead, alive, foreign, link = (
        tmp_path / f"{FOLDER_PREFIX}{word}"
        for word in (Labels(owner=DEAD).word, Labels().word, "notes", Labels(owner=DEAD).word)
    )
    for folder in (dead, alive, foreign):
        (folder / "inner").mkdir(parents=True)
    (dead / "inner" / "link").symlink_to(target)
    link.symlink_to(target)
    assert reap(None) == ReapReport(folders=[str(dead)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (alive, foreign, link, target)
    )
    assert (target / "kept").exists()


def test_nothing_left_behind_is_an_empty_report() -> None:
    assert not ReapReport()
    assert ReapReport(failures=["x"])
