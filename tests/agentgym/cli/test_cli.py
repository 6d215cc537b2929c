"""The command line as a user meets it: exit codes, messages, help."""

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentgym.cli import run

TOY = f"plugins={Path(__file__).parent / 'toy_env.py'}"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 17}}</tool_call>'


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def process(*arguments: str, cwd: Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"import sys; from agentgym.cli import main; sys.argv = ['agentgym', *{list(arguments)!r}]; main()"
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = [{root!r}, *[p for p in sys.path if p]]; {code}"],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        # F2
        (
            ["train", "env=toy-sums", "trainer.totl_steps=9"],
            ["'totl_steps'", "section 'trainer'", "'trainer.total_steps'"],
        ),
        (["train", "env=toy-sums", "+trainer.totl_steps=9"], ["'totl_steps'", "'trainer.total_steps'"]),
        (["train", "env=toy-sums", "trainer..total_steps=9"], ["section 'trainer'", "'trainer.total_steps'"]),
        (["train", "env=toy-sums", "lr=1"], ["'lr'", "top level", "'trainer.lr'"]),
        (["train", "env=toy-sums", "trainer.total_steps=many"], ["trainer.total_steps='many'", "integer"]),
        (["train", "env=toy-sums", "trainer.total_steps=0"], ["trainer.total_steps=0"]),
        (
            ["train", TOY, "env=toy-sum", "env.digits=3"],
            ["'toy-sum'", "Did you mean 'toy-sums'?", "calculator-math"],
        ),  # F6
        (["train", TOY, "env=toy-sums", "env.size=5", "data.batch_size=8"], ["data.batch_size=8", "5 training"]),  # E9
        (["train", TOY, "env=toy-sums", "rollout.temperature=0"], ["rollout.temperature=0"]),
        (["train", TOY, "env=toy-sums", "model=./nope"], ["model=./nope"]),
        (["train", "toy-sums"], ["env=toy-sums"]),
        (["train"], ["env=... is missing"]),
        (["train", "--config", "nope.yaml"], ["nope.yaml", "no such file"]),
        (["train", "--resume", "runs/nope"], ["--resume runs/nope"]),
        (["train", "plugins=nope.py", "env=x"], ["nope.py"]),
        (["train", "env=a b"], ["'a b'"]),
        (["config", "train", TOY, "env=toy-sums", "algo.advantage=grop"], ["'grpo'"]),
        (["config", "eval", TOY, "env=toy-sum"], ["'toy-sums'"]),
        (["eval", TOY, "env=toy-sums", "agent=orcle"], ["agent='orcle'", "'oracle'"]),
        (["eval", TOY, "env=toy-sums", "agent=json:loads"], ["agent='json:loads'", "async"]),
        (["eval", "--resume", "output=nope"], ["output=nope", "no evaluation there"]),
        (["eval", TOY, "env=toy-sums", "splt=train"], ["'splt'", "'split'"]),
        (["eval", TOY, "env=toy-sums", "split=test"], ["split=test", "train and validation"]),
        (["check", "toy-sum", TOY], ["'toy-sums'"]),
        (["play", "toy-sum", TOY], ["'toy-sums'"]),
        (["play", "toy-sums", TOY, "--task", "train-77"], ["'train-77'", "'train-7'"]),
        (["bench", "rolout"], ["'rolout'", "'rollout'"]),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], command: list[str], parts: list[str]
) -> None:
    code, out, err = cli(capsys, *command)
    assert code == 2
    assert [part for part in parts if part not in err] == []
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["tran"], "Did you mean 'train'?"),
        (["train", "--confg", "x"], "--config"),
        (["play"], "ENV"),
        (["play", "toy-sums", "--seed", "x"], "--seed"),
    ],
)
def test_wrong_options_are_exit_code_2(capsys: pytest.CaptureFixture[str], command: list[str], part: str) -> None:
    code, _, err = cli(capsys, *command)
    assert code == 2
    assert part in err
    assert "Traceback" not in err


def test_a_mistake_in_a_file_is_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env: toy-sums\ntrainer:\n  learning-rate: 1\n")
    code, _, err = cli(capsys, "train", "--config", str(file))
    assert code == 2
    assert "run.yaml: unknown key 'learning-rate' in section 'trainer'. Did you mean 'trainer.lr'?" in err


def test_dry_run_checks_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(capsys, "train", "--dry-run", TOY, "env=toy-sums", "trainer.total_steps=7")
    assert (code, err) == (0, "")
    assert "20 training and 20 validation tasks" in out
    assert "7, each of" in out
    assert list(tmp_path.iterdir()) == []


def test_config_train_prints_yaml_that_train_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["config", "train", TOY, "env=toy-sums", "env.size=30", "trainer.lr=2e-5"]
    code, out, _ = cli(capsys, *arguments)
    assert code == 0
    assert yaml.safe_load(out)["trainer"]["lr"] == 2e-5
    file = tmp_path / "run.yaml"
    file.write_text(out)
    again = cli(capsys, "config", "train", "--config", str(file))
    assert again == (0, out, "")
    code, out, _ = cli(capsys, "train", "--dry-run", "--config", str(file), "data.batch_size=30")
    assert code == 0
    assert "30 training" in out


def test_config_eval_prints_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "config", "eval", TOY, "env=toy-sums", "n=4")
    assert code == 0
    assert yaml.safe_load(out)["rollout"]["temperature"] == 1.0


def test_presets_of_training_leave_to_an_evaluation_what_it_has_keys_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capsys, "config", "eval", "env=calculator-math", "model=tiny")
    assert (code, err) == (0, "")
    assert "batch_size" not in yaml.safe_load(out)["data"]


def test_a_run_is_evaluated_as_it_was_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = ["env=toy-sums", "env.size=30", "rollout.temperature=0.5", "rollout.max_response_length=300"]
    _, out, _ = cli(capsys, "config", "train", TOY, *settings, "rollout.parser=mistral", "model.dtype=bfloat16")
    (tmp_path / "config.yaml").write_text(out)

    def evaluated(*overrides: str) -> dict[str, Any]:
        code, out, err = cli(capsys, "config", "eval", f"model={tmp_path}", *overrides)
        assert (code, err) == (0, "")
        loaded: dict[str, Any] = yaml.safe_load(out)
        return loaded

    config = evaluated()
    assert (config["env"]["name"], config["env"]["size"]) == ("toy-sums", 30)
    assert (config["rollout"]["parser"], config["rollout"]["max_response_length"]) == ("mistral", 300)
    assert config["rollout"]["temperature"] == 0.0  # sampling is the evaluation's own
    assert config["model"]["dtype"] == "bfloat16"
    assert evaluated("env.size=40", "n=2")["env"]["size"] == 40
    assert evaluated("n=2")["rollout"]["temperature"] == 1.0
    assert "size" not in evaluated("env=twenty-questions")["env"]


def test_envs_without_arguments_lists_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "envs")
    assert code == 0
    assert "calculator-math" in out
    assert "twenty-questions" in out


def test_envs_lists_shipped_ones_and_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "envs", TOY)
    assert code == 0
    assert any(line.split() == ["toy-sums", "sums", "with", "17"] for line in out.splitlines())
    assert any(line.startswith("calculator-math ") for line in out.splitlines())


def test_play_takes_turns_from_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CALL}\nThe answer \\\nis 20\nnever read\n"))
    code, out, _ = cli(capsys, "play", "toy-sums", TOY, "--task", "train-3")
    assert code == 0
    assert "add(a, b)  Add two numbers." in out
    assert "What is 3 plus 17?" in out
    assert "[tool add]\n20\n" in out
    assert "The end: completed. Reward 1 after 2 turns." in out


def test_play_ends_with_its_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("<tool_call>garbage\n"))
    code, out, _ = cli(capsys, "play", "toy-sums", TOY, "--seed", "3")
    assert code == 0
    assert "You left before the end: no reward." in out


def test_play_keeps_the_turn_limit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CALL}\n{CALL}\n{CALL}\n"))
    code, out, _ = cli(capsys, "play", "toy-sums", TOY, "env.max_turns=2")
    assert code == 0
    assert "The end: truncated_turns. Reward 0 after 2 turns." in out


def test_check_passes_a_good_environment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capsys, "check", "toy-sums", TOY)
    assert (code, err) == (0, ""), out


def test_check_reports_a_bad_environment_with_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = (
        Path(__file__)
        .with_name("toy_env.py")
        .read_text()
        .replace('id="toy-sums"', 'id="bad-sums"')
        .replace("content=answer", "content='no idea'")
    )
    (tmp_path / "bad_env.py").write_text(bad)
    code, out, _ = cli(capsys, "check", "bad-sums", f"plugins={tmp_path / 'bad_env.py'}")
    assert code == 1
    assert "oracle" in out


def test_interruption_is_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, size: int = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert cli(capsys, "play", "toy-sums", TOY)[0] == 130


def test_a_fault_of_the_environment_is_exit_code_1_with_its_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "faulty_env.py").write_text(
        Path(__file__)
        .with_name("toy_env.py")
        .read_text()
        .replace('id="toy-sums"', 'id="faulty-sums"')
        .replace('{"train": 0', '{"train": 1 / 0')
    )
    code, _, err = cli(capsys, "train", "env=faulty-sums", f"plugins={tmp_path / 'faulty_env.py'}")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "faulty_env.py" in err


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = cli(capsys, "--help")
    commands = [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()]
    assert commands[:2] == ["train", "eval"]  # what a newcomer looks for stands first
    assert {"score", "view", "compare", "proxy", "envs", "check", "play", "smoke", "serve-tools", "bench"} <= set(
        commands
    )
    groups = {"config", "sandbox"}  # of commands that have examples of their own
    for command in [*([name] for name in commands if name not in groups), ["config", "train"], ["config", "eval"]]:
        code, out, _ = cli(capsys, *command, "--help")
        assert code == 0
        assert f"Example: agentgym {' '.join(command)}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "--version")
    assert code == 0
    assert out.startswith("agentgym 0.")


def test_help_is_quick_and_light(tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("--help", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0
    assert "agentgym train env=calculator-math" in done.stdout
    assert seconds < 3.0  # the aim is 1 s on a quiet machine


def test_the_working_directory_is_importable(tmp_path: Path) -> None:
    toy = Path(__file__).with_name("toy_env.py").read_text()
    (tmp_path / "my_module.py").write_text(toy.replace("toy-sums", "cwd-sums"))
    done = process("train", "--dry-run", "env=cwd-sums", "plugins=my_module", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20 training" in done.stdout


def test_wrong_input_has_no_traceback_in_a_process(tmp_path: Path) -> None:
    done = process("train", "env=toy-sums", "trainer.totl_steps=9", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: trainer.totl_steps=9: unknown key 'totl_steps' in section 'trainer'. "
        "Did you mean 'trainer.total_steps'?\n"
    )
