"""The benchmark of the tool loop plays what it says."""

from agentgym.trainer.bench_loop import run


def test_the_oracle_solves_what_the_benchmark_plays() -> None:
    rows = run(rollouts=8, passes=2)
    assert [(row["pass"], row["rollouts"], row["solved"]) for row in rows] == [("1", 8, 8), ("2", 8, 8)]
    assert all(row["turns"] >= 16 and row["turns_per_s"] > 0 for row in rows)
