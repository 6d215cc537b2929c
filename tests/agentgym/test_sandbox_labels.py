"""Labels: told apart are living owners, dead ones, and those that nobody here can judge."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from agentgym.sandbox_labels import EXPIRES_KEY, OWNER_KEY, SESSION_KEY, Labels, Owner


def test_labels_survive_both_ways_of_writing_them() -> None:
    labels = Labels(session="math-3-7")
    assert Labels.parse(labels.word) == labels
    assert Labels.from_mapping(labels.as_mapping()) == labels
    assert set(labels.word) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")


@pytest.mark.parametrize("word", ["", "x", "1_2_3", "1_2__4_5-s", "a_2_b_4_5-s", "1_2_b_4_x-s"])
def test_a_foreign_word_is_not_a_label(word: str) -> None:
    assert Labels.parse(word) is None


def test_a_container_of_someone_else_is_not_ours() -> None:
    assert Labels.from_mapping({"com.example": "1"}) is None
    assert Labels.from_mapping({SESSION_KEY: "s", OWNER_KEY: "nonsense", EXPIRES_KEY: "1"}) is None


def test_this_process_is_alive_and_what_it_owns_is_never_left_behind() -> None:
    labels = Labels(expires=0)
    assert labels.owner.pid == os.getpid()
    assert labels.owner.alive() is True
    assert not labels.left_behind()


def test_a_process_that_ended_is_dead_also_as_a_zombie() -> None:
    code = "from agentgym.sandbox_labels import Labels; print(Labels(session='s').word, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        labels = Labels.parse(process.stdout.readline().strip())
        assert labels is not None
        assert labels.owner.pid == process.pid
        assert labels.owner.alive() is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert labels.owner.alive() is False  # a zombie until it is waited for
    assert labels.left_behind()


def test_a_process_with_a_used_again_id_is_another_owner() -> None:
    owner = Owner.current()
    assert replace(owner, start=owner.start + 1).alive() is False


@pytest.mark.parametrize("foreign", [{"boot": "0" * 32}, {"namespace": 1}])
def test_an_owner_elsewhere_is_judged_by_the_time_alone(foreign: dict[str, object]) -> None:
    owner = replace(Owner.current(), **foreign)  # type: ignore[arg-type]
    assert owner.alive() is None
    labels = Labels(owner=owner, expires=1000)
    assert not labels.left_behind(now=999.0)
    assert labels.left_behind(now=1001.0)
