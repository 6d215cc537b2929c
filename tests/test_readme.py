"""The README shows what is there."""

import re
from pathlib import Path

from agentgym.cli import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_programs_in_the_readme_are_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    examples = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.py"))
    assert [block for block in blocks if block not in examples] == []
    assert any("agentgym.register(" in block for block in blocks)


def test_every_place_in_the_readme_exists() -> None:
    table = README.partition("## Where is what")[2].partition("\n\n`envs/`")[0]
    places = re.findall(r"`([^`]+)`", table)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_command_in_the_readme_is_one(capsys: object) -> None:
    commands = set(re.findall(r"^(?:pip install \. && )?agentgym ([\w-]+)", README, flags=re.MULTILINE))
    assert {"train", "eval", "check", "play", "config"} <= commands
    assert [command for command in sorted(commands) if run([command, "--help"]) != 0] == []
