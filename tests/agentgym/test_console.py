"""What a person sees of long work, on a terminal and in a file."""

import io

import pytest

from agentgym.console import Console, RunSummary, duration


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_show_metrics_and_time_left() -> None:
    file, clock = io.StringIO(), Clock()
    with Console(file=file, clock=clock).progress(10, done=2) as progress:
        clock.now += 4.0
        progress.update(4, {"reward/mean": 0.41234, "throughput/tokens_per_s": 5120.4, "actor/lr": 1.0})
    assert file.getvalue() == "step 4/10  reward 0.412  tokens/s 5,120  left 12s\n"


def test_plain_lines_come_every_few_seconds_but_news_and_the_end_at_once() -> None:
    file, clock = io.StringIO(), Clock()
    with Console(file=file, interval=2.0, clock=clock).progress(6) as progress:
        for step in range(1, 7):
            clock.now += 0.5
            progress.update(step, {"reward/mean": 0.5} | ({"val/reward_mean": 0.25} if step == 2 else {}))
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["step 1/6", "step 2/6", "step 6/6"]


def test_the_validation_reward_stays_until_the_next_one() -> None:
    file = io.StringIO()
    with Console(file=file, interval=0.0).progress(3) as progress:
        progress.update(1, {"reward/mean": 0.5, "val/reward_mean": 0.25})
        progress.update(2, {"reward/mean": 0.75})
    assert "reward 0.750  validation 0.250" in file.getvalue().splitlines()[1]


def test_failures_are_shown_only_where_there_are_some() -> None:
    file = io.StringIO()
    with Console(file=file, interval=0.0).progress(2) as progress:
        progress.update(1, {"rollout/failed": 0.0})
        progress.update(2, {"rollout/failed": 3.0})
    assert file.getvalue().splitlines()[0].startswith("step 1/2  left")
    assert file.getvalue().splitlines()[1] == "step 2/2  failed 3"


def test_time_left_follows_the_recent_speed() -> None:
    clock = Clock()
    with Console(file=io.StringIO(), clock=clock).progress(1000) as progress:
        assert progress.seconds_left() is None
        clock.now += 100.0  # the first step compiles something
        progress.update(1, {})
        assert progress.seconds_left() == pytest.approx(99_900)
        for step in range(2, 50):
            clock.now += 1.0
            progress.update(step, {})
        assert progress.seconds_left() == pytest.approx(1000 - 49)


def test_a_terminal_gets_one_bar_that_redraws_and_lines_above_it() -> None:
    file = Terminal()
    console = Console(file=file)
    assert console.live
    with console.progress(5) as progress:
        progress.status("validating")
        progress.update(2, {"reward/mean": 0.5})
        progress.line("saved [a] checkpoint")
        progress.update(5, {"reward/mean": 0.75})
    text = file.getvalue()
    assert "saved [a] checkpoint" in text
    assert "validating" in text
    last = text.split("\r")[-1]
    assert "5/5" in last
    assert "reward 0.750" in last
    assert "validating" not in last
    assert text.endswith("\x1b[?25h")  # the cursor is shown again


def test_a_bar_is_taken_down_when_the_work_fails() -> None:
    file = Terminal()
    with pytest.raises(KeyboardInterrupt), Console(file=file).progress(5):
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[?25h")


def test_a_file_gets_no_control_characters() -> None:
    file = io.StringIO()
    console = Console(file=file)
    with console.progress(1) as progress:
        progress.status("validating")
        progress.line("a line")
        progress.update(1, {"reward/mean": 0.5})
    assert file.getvalue() == "a line\nstep 1/1  reward 0.500\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (130, "2m10s"),
        (3599.9, "1h00m"),
        (3661, "1h01m"),
        (90_000, "25h00m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_has_before_after_and_what_to_do_next() -> None:
    summary = RunSummary(
        run_dir="runs/a", steps=80, seconds=125, reward_before=0.25, reward_after=0.95, next_command="agentgym eval x"
    )
    assert list(summary.lines()) == [
        "run         runs/a",
        "steps       80 in 2m05s",
        "validation  0.250 -> 0.950 (mean reward)",
        "next        agentgym eval x",
    ]
    assert len(RunSummary(run_dir="runs/a", steps=1, seconds=1).lines()) == 2
