"""The `scripted` engine: it plays given texts, so that loops, environments and trainers run without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.env import Env
from agentgym.errors import ConfigError
from agentgym.generation import Generation, SamplingParams
from agentgym.tokens.parsers import get_parser
from agentgym.trainer.rollout.sampling import check_params
from agentgym.types import Task

Script = Callable[[str, int, Sequence[int]], str]
"""``(session_id, turn_index, prompt_ids) -> text`` of the session's turn; turns count from 0."""


class ScriptedEngine:
    """An `agentgym.generation.Generator` that plays texts; every log-prob is 0.0.

    A text that runs to its end is followed by a stop id, as a model would sample it: the tokenizer's end-of-sequence
    id if the request stops there, else the request's first. Stop ids, stop strings and ``max_tokens`` cut a text.

    Example:
        ``ScriptedEngine(texts({"s": ["<tool_call>...</tool_call>", "#### 42"]}), tokenizer=tokenizer)``
    """

    def __init__(self, script: Script, *, tokenizer: Any) -> None:
        """Play what ``script`` gives for each turn, encoded by ``tokenizer``."""
        self._script = script
        self._tokenizer = tokenizer
        self._turns: dict[str, int] = {}
        self._generated = 0
        self._requests = 0
        self.version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> Generation:
        """Play the session's next turn. Raises `ConfigError` for sampling parameters that no engine takes."""
        check_params(sampling)
        turn = self._turns.get(session_id, 0)
        ids = self._ids(self._script(session_id, turn, prompt_ids), sampling)
        self._turns[session_id] = turn + 1
        stops = set(sampling.stop_token_ids)
        end = next((at + 1 for at, token in enumerate(ids) if token in stops), len(ids))
        length = min(end, sampling.max_tokens)
        self._requests += 1
        self._generated += length
        return Generation(
            token_ids=ids[:length],
            logprobs=[0.0] * length,
            finish_reason="stop" if length == end else "length",
            weight_version=self.version,
        )

    def _ids(self, text: str, sampling: SamplingParams) -> list[int]:
        ends = [at + len(stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
        text = text[: min(ends)] if ends else text
        ids = list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        if not ends and sampling.stop_token_ids:
            eos = self._tokenizer.eos_token_id
            ids.append(eos if eos in sampling.stop_token_ids else sampling.stop_token_ids[0])
        return ids

    async def release(self, session_id: str) -> None:
        """Forget at which turn the session is."""
        self._turns.pop(session_id, None)

    def begin_batch(self, _keys: Sequence[str], _limit: int) -> None:
        """Nothing to arrange: a script does not depend on what else is played."""

    def finish(self, key: str) -> None:
        """Forget at which turn the session is."""
        self._turns.pop(key, None)

    async def update_weights(self, _weights: Mapping[str, Any], version: int) -> None:
        """Take the version; a script has no weights."""
        self.version = version

    checksum: int | None = None
    """Not computed: the weights are handed over within the process."""

    async def ready(self) -> None:
        """It is, from the start."""

    async def rest(self) -> None:
        """Nothing to free."""

    def stats(self) -> dict[str, float]:
        """Requests and tokens since the engine was made."""
        return {"requests": self._requests, "generated_tokens": self._generated}

    async def aclose(self) -> None:
        """Nothing is held."""


def texts(by_session: Mapping[str, Sequence[str]]) -> Script:
    """A script that plays a list of texts per session."""

    def script(session_id: str, turn: int, _prompt_ids: Sequence[int]) -> str:
        known = by_session.get(session_id, ())
        if turn >= len(known):
            raise ConfigError(
                f"the script has {len(known)} texts for session {session_id!r}, turn {turn} was asked for: add one"
            )
        return known[turn]

    return script


def oracle_player(envs: Sequence[Env], parser: str, tokenizer: Any) -> Script:
    """A script that plays what the environments' ``oracle`` answers, written in the format of tool parser ``parser``.

    The task is found by its prompt: the longest prompt of the environments' tasks that the session's first prompt
    contains. Raises `ConfigError` where that is no task, or several with different answers, or the oracle has no
    further turn.
    """
    write = get_parser(parser).render
    tasks: dict[str, list[tuple[Env, Task]]] = {}
    for env in envs:
        for split in ("train", "validation"):
            for task in env.tasks(split):
                tasks.setdefault(_prompt_text(task), []).append((env, task))
    longest_first = sorted(tasks, key=len, reverse=True)
    unplayed: dict[str, list[str]] = {}

    def script(session_id: str, turn: int, prompt_ids: Sequence[int]) -> str:
        if turn == 0:
            text = tokenizer.decode(prompt_ids)
            found = next((tasks[prompt] for prompt in longest_first if prompt in text), [])
            shown = [[write(answer) for answer in env.oracle(task)] for env, task in found]
            if not shown or any(other != shown[0] for other in shown):
                raise ConfigError(
                    f"session {session_id!r} shows the prompt of {len(found)} tasks; the oracle needs one, or the same "
                    f"answers for all: give each task its own prompt"
                )
            unplayed[session_id] = shown[0]
        answers = unplayed.pop(session_id, [])
        if not answers:
            raise ConfigError(f"the oracle has no turn {turn} for session {session_id!r}: it expected the end by now")
        if answers[1:]:
            unplayed[session_id] = answers[1:]
        return answers[0]

    return script


def _prompt_text(task: Task) -> str:
    """What the first prompt must contain: the task's prompt, or the text of its last message."""
    content = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")
