"""The environment `dataset`: what it plays, and that every malformed file is refused with file, row and column."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import agentgym
from agentgym.checks import check_env
from agentgym.data import write_rows
from agentgym.errors import ConfigError
from agentgym.types import Task

TOOLS = '''
from agentgym import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first.
        b: second.
    """
    return a + b


@function_tool
def double(a: int) -> int:
    """Double a number.

    Args:
        a: the number.
    """
    return 2 * a
'''


def row(i: int, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"split": "train", "index": i, **extra},
    }


Rows = list[dict[str, Any]]


@pytest.fixture
def tool_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """As other systems write: parquet through Arrow, or JSON lines."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def make(train: str, val: str, **kwargs: Any) -> Any:
    return agentgym.make("dataset", train_files=[train], val_files=[val], **kwargs)


def files(folder: Path, rows: Rows | None = None, kind: str = "parquet") -> tuple[str, str]:
    rows = [row(i) for i in range(20)] if rows is None else rows
    return write(folder / f"train.{kind}", rows), write(folder / f"val.{kind}", [row(i) for i in range(20, 24)])


def test_rows_become_tasks(tmp_path: Path) -> None:
    env = make(*files(tmp_path))
    tasks = env.tasks("train")
    assert len(tasks) == 20
    assert tasks[17].id == "train-17"
    assert tasks[17].prompt == [{"role": "user", "content": "What is 17 + 17?"}]
    assert tasks[17].data["reward_model"]["ground_truth"] == "34"
    assert tasks[17].data["extra_info"]["index"] == 17
    assert tasks[17].data_source == "openai/gsm8k"
    assert [task.id for task in env.tasks("validation")] == [f"val-{i}" for i in range(4)]


def test_an_episode_is_played_with_tools_and_scored(tmp_path: Path, tool_file: Path) -> None:
    env = make(*files(tmp_path), tool_files=[str(tool_file)])
    observation, _ = env.reset(seed=0, options={"task_id": "train-3", "split": "train"})
    assert observation == ({"role": "user", "content": "What is 3 + 3?"},)
    assert [tool.name for tool in env.tools] == ["add", "double"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 3}}</tool_call>'
    observation, reward, terminated, _, _ = env.step(call)
    assert (observation[0]["content"], reward, terminated) == ("6", 0.0, False)
    _, reward, terminated, _, _ = env.step("The sum is #### 6")
    assert (reward, terminated) == (1.0, True)
    env.close()


def test_the_environment_keeps_the_contract(tmp_path: Path, tool_file: Path) -> None:
    train, val = files(tmp_path)
    spec = agentgym.spec("dataset")
    agentgym.register(
        "dataset-contract-test",
        spec.entry_point,
        kwargs={"train_files": [train], "val_files": [val], "tool_files": [str(tool_file)]},
        max_turns=4,
    )
    report = check_env("dataset-contract-test")
    assert report.ok, str(report)


def test_the_same_rows_come_from_every_format(tmp_path: Path) -> None:
    found = [make(*files(tmp_path, kind=kind)).tasks("train") for kind in ("parquet", "jsonl")]
    write_rows(tmp_path / "train.json", [row(i) for i in range(20)])
    found.append(make(str(tmp_path / "train.json"), files(tmp_path)[1]).tasks("train"))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ([], []),
        (None, ["add", "double"]),
        (["add"], ["add"]),
        (np.array(["double"]), ["double"]),
        (np.array(["double", "add"]), ["add", "double"]),
        ("absent", ["add", "double"]),
    ],
)
def test_a_row_selects_its_tools(tmp_path: Path, tool_file: Path, selection: Any, names: list[str]) -> None:
    # E5
    extra = {} if isinstance(selection, str) else {"tool_selection": selection}
    given = [row(i, **extra) for i in range(3)]
    source = tmp_path / "rows.py"
    source.write_text("ROWS = {}\n\ndef rows(files, split):\n    return ROWS[split]\n")
    env = make("a", "b", dataset=f"{source}:rows", tool_files=[str(tool_file)])
    from agentgym.objects import load_object

    load_object(f"{source}:ROWS", what="test").update({"train": given, "validation": given})
    env.reset(options={"task_id": env.tasks("train")[0].id, "split": "train"})
    assert [tool.name for tool in env.tools] == names


def test_create_arguments_of_a_row_are_its_own(tmp_path: Path) -> None:
    # E2
    tools = tmp_path / "stateful.py"
    tools.write_text(
        "from agentgym import BaseTool, ToolResponse\n"
        "def schema(name):\n"
        "    return {'type': 'function', 'function': {'name': name, 'description': name}}\n"
        "class Calc(BaseTool):\n"
        "    async def create(self, instance_id=None, precision=0):\n"
        "        self.precision = precision\n"
        "        return instance_id, ToolResponse()\n"
        "    async def execute(self, instance_id, parameters):\n"
        "        return ToolResponse(text=f'precision {self.precision}'), 0.0, {}\n"
        "class Search(BaseTool):\n"
        "    async def create(self, instance_id=None, k=1):\n"
        "        return instance_id, ToolResponse()\n"
        "calc, search = Calc({}, schema('calc')), Search({}, schema('search'))\n"
    )
    kwargs = [{"calc": {"create_kwargs": {"precision": 2}}}, {"search": {"create_kwargs": {"k": 3}}}, {}]
    env = make(*files(tmp_path, [row(i, tools_kwargs=k) for i, k in enumerate(kwargs)]), tool_files=[str(tools)])
    assert [task.tools_kwargs for task in env.tasks("train")] == kwargs
    env.reset(options={"task_id": "train-0", "split": "train"})
    [message] = env.step('<tool_call>{"name": "calc", "arguments": {}}</tool_call>')[0]
    assert message["content"] == "precision 2"
    env.close()


def test_a_tool_list_as_other_systems_write_it_loads(tmp_path: Path) -> None:
    (tmp_path / "dataset_tools_module.py").write_text(
        "from agentgym import BaseTool, ToolResponse\n"
        "class Echo(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=parameters['text']), 0.0, {}\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: dataset_tools_module.py:Echo\n"
        "    config:\n"
        "      type: native\n"
        "    tool_schema:\n"
        "      type: function\n"
        "      function:\n"
        "        name: echo\n"
        "        description: Says it again.\n"
        "        parameters:\n"
        "          type: object\n"
        "          properties: {text: {type: string, description: what to say}}\n"
        "          required: [text]\n"
    )
    env = make(*files(tmp_path), tool_files=[str(tmp_path / "tools.yaml")])
    env.reset(seed=0)
    [message] = env.step('<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>')[0]
    assert message["content"] == "hi"
    env.close()


# -- what is malformed -------------------------------------------------------------------------------------------------


def change(index: int, **values: Any) -> Callable[[Rows], Rows]:
    def apply(rows: Rows) -> Rows:
        rows[index] = {**rows[index], **values}
        return rows

    return apply


def without(column: str) -> Callable[[Rows], Rows]:
    return lambda rows: [{k: v for k, v in one.items() if k != column} for one in rows]


def renamed(column: str, name: str) -> Callable[[Rows], Rows]:
    return lambda rows: [{name if k == column else k: v for k, v in one.items()} for one in rows]


MALFORMED: list[tuple[str, Callable[[Rows], Rows], list[str]]] = [
    # E4
    ("no reward_model", without("reward_model"), ["'reward_model'", "Columns:", "ability"]),
    ("no data_source", without("data_source"), ["'data_source'", "Columns:"]),
    ("prompt misspelt", renamed("prompt", "promt"), ["'prompt'", "Did you mean 'promt'", "Columns:"]),
    (
        "null truth in row 17",
        change(17, reward_model={"style": "rule", "ground_truth": None}),
        ["row 17", "reward_model.ground_truth", "null", "Columns:", "ability"],
    ),
    ("null reward_model in row 17", change(17, reward_model=None), ["row 17", "reward_model", "null"]),
    ("null prompt", change(4, prompt=None), ["row 4", "column prompt", "null"]),
    ("empty prompt", change(4, prompt=[]), ["row 4", "column prompt", "[]", "list of messages"]),
    ("unknown role", change(4, prompt=[{"role": "usr", "content": "x"}]), ["row 4", "prompt[0].role", "'usr'", "user"]),
    ("null content", change(4, prompt=[{"role": "user", "content": None}]), ["row 4", "prompt[0].content"]),
    ("null source", change(4, data_source=None), ["row 4", "data_source"]),
    # E5
    (
        "unknown tool",
        change(5, extra_info={"index": 5, "tool_selection": ["ad"]}),
        ["row 5", "extra_info", "tool_selection", "'ad'", "Did you mean 'add'", "double"],
    ),
    (
        "arguments for an unknown tool",
        change(6, extra_info={"index": 6, "tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}}),
        ["row 6", "extra_info", "tools_kwargs", "'search'", "add"],
    ),
    (
        "unserialisable object",
        change(7, extra_info={"index": 7, "image": b"\x89PNG"}),
        ["row 7", "extra_info.image", "bytes", "JSON"],
    ),
    (
        "unknown user",
        change(8, extra_info={"index": 8, "interaction_kwargs": {"name": "nobody"}}),
        ["row 8", "interaction_kwargs", "'nobody'"],
    ),
    ("unknown style", change(9, reward_model={"style": "rle", "ground_truth": "1"}), ["row 9", "style", "'rle'"]),
]


@pytest.mark.parametrize(("change", "parts"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_a_malformed_file_is_refused_with_file_row_and_column(
    tmp_path: Path, tool_file: Path, change: Callable[[Rows], Rows], parts: list[str]
) -> None:
    rows = change(copy.deepcopy([row(i) for i in range(20)]))
    env = make(*files(tmp_path, rows), tool_files=[str(tool_file)])
    with pytest.raises(ConfigError) as caught:
        env.tasks("train")
    message = str(caught.value)
    assert [part for part in ["train.parquet", *parts] if part not in message] == []


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        (without("ability"), ["val.parquet", "column ability", "train.parquet has this column"]),
        (lambda rows: [{**one, "more": 1} for one in rows], ["val.parquet", "column more"]),
        (
            lambda rows: [{**one, "reward_model": {"style": "rule", "ground_truth": 4}} for one in rows],
            ["val.parquet", "row 0", "reward_model.ground_truth", "numbers", "text"],
        ),
        (lambda rows: [{**one, "prompt": "hi"} for one in rows], ["val.parquet", "column prompt", "text", "lists"]),
    ],
)
def test_a_validation_file_of_another_schema_is_refused(
    tmp_path: Path, changed: Callable[[Rows], Rows], parts: list[str]
) -> None:
    train, _ = files(tmp_path)
    val = write(tmp_path / "val.parquet", changed([row(i) for i in range(4)]))
    env = make(train, val)
    env.tasks("train")
    with pytest.raises(ConfigError) as caught:
        env.tasks("validation")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_dataset_class_gives_the_rows(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "class Squares:\n"
        "    def __init__(self, files, split, power):\n"
        "        self.numbers, self.power = range(3), power\n"
        "    def __len__(self):\n"
        "        return 3\n"
        "    def __getitem__(self, i):\n"
        "        if i >= 3:\n"
        "            raise IndexError\n"
        "        return {'prompt': f'{i} to {self.power}?', 'data_source': 'exact',\n"
        "                'reward_model': {'ground_truth': i ** self.power}}\n"
    )
    env = make("x", "y", dataset=f"{source}:Squares", dataset_kwargs={"power": 2})
    tasks: Sequence[Task] = env.tasks("train")
    assert [task.prompt for task in tasks] == ["0 to 2?", "1 to 2?", "2 to 2?"]
    source.write_text("def rows(files, split):\n    return [{'prompt': 'x', 'data_source': object()}]\n")
    broken = tmp_path / "broken.py"
    broken.write_text(source.read_text())
    with pytest.raises(ConfigError, match=r"there is no column 'reward_model'"):
        make("x", "y", dataset=f"{broken}:rows").tasks("train")


def test_an_object_of_a_dataset_class_that_is_no_data_is_named(tmp_path: Path) -> None:
    source = tmp_path / "objects.py"
    source.write_text(
        "def rows(files, split):\n"
        "    good = {'prompt': 'x', 'data_source': 'exact', 'reward_model': {'ground_truth': 1}, 'extra_info': {}}\n"
        "    return [good, {**good, 'extra_info': {'grader': object()}}]\n"
    )
    with pytest.raises(ConfigError, match=r"row 1, column extra_info.grader: <object object .* of type object"):
        make("x", "y", dataset=f"{source}:rows").tasks("train")


def test_files_are_needed_for_the_split_that_is_asked_for(tmp_path: Path) -> None:
    env = agentgym.make("dataset", val_files=[files(tmp_path)[1]])
    assert len(env.tasks("validation")) == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"needs data.train_files"):
        env.tasks("train")  # type: ignore[attr-defined]


def test_a_source_without_a_scorer_is_known_before_the_run(tmp_path: Path) -> None:
    env = make(*files(tmp_path, [{**row(0), "data_source": "gsm8"}]))
    with pytest.raises(ConfigError, match=r"'gsm8'\. Did you mean 'gsm8k'\?"):
        env.check_scoring(env.tasks("train")[0])
