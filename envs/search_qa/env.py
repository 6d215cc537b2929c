"""The environment: questions as tasks, the search tool, and the score."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentgym.envs.generated import check_level, check_sizes, draw_level, size_of
from agentgym.envs.search_qa.questions import Question, draw, is_right
from agentgym.envs.search_qa.world import make_world
from agentgym.errors import ConfigError
from agentgym.tool import BaseTool, ToolContext, function_tool
from agentgym.tool_env import ToolEnv
from agentgym.toolbox import ToolLimits
from agentgym.tools.retrieval import Bm25Index, Document
from agentgym.types import AssistantTurn, Task, ToolCall

LEVEL_WEIGHTS = {1: 0.3, 2: 0.4, 3: 0.3}
"""Shares of the levels in the default mix."""
MAX_QUERY = 300
"""Characters of a query; the rest is left out."""
MAX_MISSES = 2000
"""After so many questions in a row that are known already, there are no further ones."""


class SearchQA(ToolEnv):
    """Questions that take one to three searches in the encyclopedia of an invented world.

    Args:
        level: articles that the answer takes: 1, 2, 3 or ``"mix"`` (30 %, 40 % and 30 %).
        topk: articles per search.
        train_size: number of training tasks.
        validation_size: number of validation tasks.
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the worlds and the questions.
        limits: of tool calls.
    """

    system_prompt = 'Answer with the help of the search tool. End with "#### " and the answer, a name or a number.'

    def __init__(
        self,
        *,
        level: int | str = "mix",
        topk: int = 2,
        train_size: int = 1000,
        validation_size: int = 200,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(split=split, seed=seed, limits=limits)
        self.level = check_level(level, LEVEL_WEIGHTS)
        self.topk = topk
        self.sizes = check_sizes(train=train_size, validation=validation_size)
        if topk < 1:
            raise ConfigError(f"topk={topk}: expected at least 1")

    @function_tool
    def search(self, query: str, context: ToolContext) -> str:
        """Search the encyclopedia.

        Args:
            query: the words to look for, best a name.
        """
        assert context.task is not None
        index = _encyclopedia(self.seed, context.task.data["split"])
        hits = index.search(query[:MAX_QUERY], self.topk)
        return "\n".join(hit.document.text for hit in hits) or "Nothing found."

    tools: Sequence[BaseTool] = (search,)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, made when first asked for."""
        return _tasks(split, self.seed, self.level, size_of(self.sizes, split))

    def score(self, task: Task, answer: str) -> float:
        """1.0 if the final answer is right, else 0.0."""
        return float(is_right(answer, task.data["answer"]))

    def oracle(self, task: Task) -> list[AssistantTurn]:
        """Search for one name after the other, then answer."""
        calls = [ToolCall(name="search", arguments={"query": name}) for name in task.data["path"]]
        return [
            *(AssistantTurn(tool_calls=(call,)) for call in calls),
            AssistantTurn(content=f"#### {task.data['answer']}"),
        ]


@lru_cache(maxsize=8)
def _encyclopedia(seed: int, split: str) -> Bm25Index:
    entities = make_world(seed, split).values()
    return Bm25Index([Document(id=entity.name, title=entity.name, text=entity.article) for entity in entities])


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, level: int | str, size: int) -> tuple[Task, ...]:
    """Shared by the environments of a process."""
    rng = random.Random(f"{seed}/{split}/{level}")
    world = make_world(seed, split)
    questions: dict[str, tuple[int, Question]] = {}
    misses = 0
    while len(questions) < size:
        hops = draw_level(rng, level, LEVEL_WEIGHTS)
        question = draw(rng, world, hops)
        misses = misses + 1 if question.text in questions else 0
        if misses > MAX_MISSES:
            raise ConfigError(f"{split}_size={size}: the world has about {len(questions)} questions of level={level!r}")
        questions.setdefault(question.text, (hops, question))
    return tuple(
        Task(
            id=f"{split}-{number:06d}",
            prompt=question.text,
            data={"answer": question.answer, "path": list(question.path), "level": hops, "split": split},
            data_source="search-qa",
        )
        for number, (hops, question) in enumerate(questions.values())
    )
