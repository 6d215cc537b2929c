"""`ToolEnv`: tasks, tools and a score make an environment."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic

from agentgym.env import Action, Env, Info, Observation
from agentgym.errors import ConfigError, EnvError, ToolError, boundary
from agentgym.interaction import Interaction, make_interaction, respond
from agentgym.messages import assistant_message, error_message
from agentgym.resources import Resources
from agentgym.task_lists import TaskList, task_list
from agentgym.tool import BaseTool, FunctionTool, ToolContext
from agentgym.tool_results import TokenCutter
from agentgym.tool_threads import run_in_thread
from agentgym.toolbox import Toolbox, ToolLimits, read_tools_kwargs, select_tools
from agentgym.types import AssistantTurn, Message, ParseError, RolloutStatus, Task

if TYPE_CHECKING:
    from agentgym.sandbox import LazySandbox, Sandbox, SandboxConfig

Score = float | Mapping[str, Any]
"""A number, or a dict with ``score`` and further numbers, which are logged as reward components."""

MAX_CUT_TURNS = 2
"""As many turns in a row may be cut by the length limit in the middle of a call; the last of them ends the episode."""

_CUT = "the turn was cut by the length limit, so none of its calls was run. Write a shorter one"


class ToolEnv(Env, abstract=True):
    """An environment in which a model uses tools to solve tasks, each scored once at its end.

    An author gives `tasks`, `score` and usually `tools` and `system_prompt`. Every episode has a toolbox of its own:
    tools keep their state from call to call, and a new episode starts with fresh ones.

    What answers a turn:

    * Calls are executed, and each is answered by a tool message, in their order; then each malformed call by a tool
      message named ``error``. The episode goes on, also when a call failed.
    * A turn cut by the length limit (``finish_reason="length"``) never runs a call: each is answered by an ``error``
      message, and a second such turn in a row ends the episode as truncated. Without calls it is the final answer,
      scored, and the episode is truncated.
    * Any other turn goes to the simulated user, if there is an `interaction`, and is the final answer otherwise.

    The reward of the last step is the score. Tool rewards and the user's turn scores are reported in ``info`` and enter
    the reward with ``tool_reward_weight`` and ``turn_score_weight``. An episode ended by a limit is scored with an
    empty answer.

    Args:
        split: where tasks are drawn from: ``"train"`` or ``"validation"``.
        seed: of the tasks, for environments that generate them; which task is drawn depends on ``reset(seed=...)``.
        limits: of tool calls.
        tool_reward_weight: instead of the class's.
        turn_score_weight: instead of the class's.
        sandbox: instead of the class's: settings, or the name of a backend.

    Example:
        >>> @function_tool
        ... def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>>
        >>> class Sums(ToolEnv):
        ...     tools = (add,)
        ...
        ...     def tasks(self, split):
        ...         start = 0 if split == "train" else 50
        ...         return [
        ...             Task(id=f"{split}-{i}", prompt=f"What is {i} plus 17?", data={"answer": str(i + 17)})
        ...             for i in range(start, start + 50)
        ...         ]
        ...
        ...     def score(self, task, answer):
        ...         return float(task.data["answer"] in answer.split())
    """

    tools: Sequence[BaseTool] = ()
    """What the author offers; after `reset`, those that the task selects."""
    system_prompt: str | None = None
    """First message of every conversation, unless the task brings a system message of its own."""
    interaction: str | type[Interaction] | Mapping[str, Any] | None = None
    """The simulated user: a class, a registered name or ``{"_target_": ...}``. A task may name another one."""
    interaction_config: Mapping[str, Any] = {}
    sandbox: SandboxConfig | Mapping[str, Any] | str | None = None
    """Where the code of tools runs: settings of `agentgym.sandbox.SandboxConfig` or a backend's name; None: nowhere.

    Every episode has a sandbox of its own, which starts at the first call that needs it."""
    tool_reward_weight: float = 0.0
    turn_score_weight: float = 0.0

    task: Task
    messages: list[Message]
    """The conversation so far."""
    toolbox: Toolbox
    """The live tools of the episode."""
    user: Interaction | None = None
    """The simulated user of the episode."""
    scored_elsewhere: bool = False
    """True: somebody else scores the episode; `score` is not called, and what it would give counts 0."""
    terminal_score: float | None = None
    """What `score` gave for the episode."""

    def __init__(
        self,
        *,
        split: str = "train",
        seed: int = 0,
        limits: ToolLimits | Mapping[str, Any] | None = None,
        tool_reward_weight: float | None = None,
        turn_score_weight: float | None = None,
        sandbox: SandboxConfig | Mapping[str, Any] | str | None = None,
    ) -> None:
        self.split = split
        self.seed = seed
        self.limits = _tool_limits(limits)
        if tool_reward_weight is not None:
            self.tool_reward_weight = tool_reward_weight
        if turn_score_weight is not None:
            self.turn_score_weight = turn_score_weight
        self.sandbox = _sandbox_config(type(self).sandbox if sandbox is None else sandbox)
        self.resources = Resources()
        """What the episode holds; the session adopts it and releases it before the environment."""
        self._lists: dict[str, TaskList] = {}
        self._offered: tuple[BaseTool, ...] | None = None
        self._token_cutter: TokenCutter | None = None
        self._num_errors = 0
        self._cut_turns = 0

    # -- what authors give ------------------------------------------------------------------------------------------

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split; disjoint for ``"train"`` and ``"validation"``.

        They depend on the constructor's arguments only: a registered environment is asked once per process for each set
        of arguments, on a thread, and its sessions share the list. Every episode gets a copy of its task.
        """
        raise ConfigError(f"environment {self.name!r} has no tasks: define tasks(split)")

    def score(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """How good the final answer is. Sync code runs on a thread; an async form is awaited.

        Args:
            answer: content of the last turn; empty where a limit ended the episode before there was one.
        """
        raise ConfigError(f"environment {self.name!r} has no score: define score(task, answer)")

    async def prepare_sandbox(self, sandbox: Sandbox) -> None:
        """Put what the task needs into a sandbox that has just started, before the first call in it.

        It is also called for the sandbox that replaces one which the model destroyed.
        """

    # -- the environment --------------------------------------------------------------------------------------------

    @property
    def token_cutter(self) -> TokenCutter | None:
        """Counts and cuts the text of tools; the agent loop sets one that knows the model's tokens."""
        return self._token_cutter

    @token_cutter.setter
    def token_cutter(self, cutter: TokenCutter | None) -> None:
        self._token_cutter = cutter
        if cutter is not None and hasattr(self, "toolbox"):
            self.toolbox.cutter = cutter

    def check_task(self, task: Task) -> None:
        """Raise `ConfigError` if the task selects or configures tools that do not exist; `reset` does the same."""
        where = f"task {task.id!r} of environment {self.name!r}"
        select_tools(self._offer(), task.tool_selection, where=where)
        read_tools_kwargs(self._offer(), task.tools_kwargs, where=where)

    def check_scoring(self, task: Task) -> None:
        """Raise `ConfigError` if `score` cannot score the task; asked where no reward manager scores instead."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.resources.release()  # of an earlier episode
        options = options or {}
        self.task = task = await self._choose(options.get("split") or self.split, options.get("task_id"))
        self.check_task(task)
        self._num_errors = self._cut_turns = 0
        self.terminal_score = None
        sandbox = self._plan_sandbox()
        self.toolbox = Toolbox(
            self._offer(),
            selection=task.tool_selection,
            tools_kwargs=task.tools_kwargs,
            limits=self.limits,
            cutter=self._token_cutter,
            context=ToolContext(session_id=self.resources.owner, task=task, state={}, sandbox=sandbox),
        )
        self.tools = self.toolbox.tools
        self.resources.push("tools", self.toolbox.release)
        self.messages = []
        self.user = await self._invite_user(task)
        return self._observe(self._first_messages(task)), {}

    async def astep(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        turn = self.to_turn(action)
        self.messages.append(assistant_message(turn))
        calls = bool(turn.tool_calls or turn.errors)
        cut = turn.finish_reason == "length"
        self._cut_turns = self._cut_turns + 1 if calls and cut else 0
        if calls:
            return await (self._refuse_calls(turn) if cut else self._use_tools(turn))
        if self.user is not None and not cut:
            return await self._ask_user(self.user, turn)
        reward, info = await self._final(turn.content, {})
        return (), reward, not cut, cut, info

    async def atruncate(self, status: RolloutStatus) -> float | None:
        reward, _ = await self._final("", {})
        return reward

    async def aclose(self) -> None:
        await self.resources.release()

    # -- one turn ---------------------------------------------------------------------------------------------------

    async def _use_tools(self, turn: AssistantTurn) -> tuple[Observation, float, bool, bool, Info]:
        results = await self.toolbox.execute(turn.tool_calls)
        rewards = [float(result.reward) for result in results if result.reward is not None]
        metrics: dict[str, float] = {}
        for result in results:
            for key, value in result.metrics.items():
                if isinstance(value, numbers.Real):
                    name = f"tool/{result.call.name}/{key}"
                    metrics[name] = metrics.get(name, 0.0) + float(value)
        info: Info = {
            "tool_calls": len(results),
            "tool_errors": sum(result.error for result in results),
            "parse_errors": len(turn.errors),
            "tool_rewards": rewards,
            "metrics": metrics,
        }
        answers = [result.message() for result in results] + self._answer_errors(turn.errors)
        return self._observe(answers), self.tool_reward_weight * sum(rewards), False, False, info

    async def _refuse_calls(self, turn: AssistantTurn) -> tuple[Observation, float, bool, bool, Info]:
        errors = [ParseError(message=_CUT)] * max(1, len(turn.tool_calls) + len(turn.errors))
        info: Info = {"parse_errors": len(errors)}
        observation = self._observe(self._answer_errors(errors))
        if self._cut_turns < MAX_CUT_TURNS:
            return observation, 0.0, False, False, info
        reward, info = await self._final("", info)
        return observation, reward, False, True, info

    async def _ask_user(self, user: Interaction, turn: AssistantTurn) -> tuple[Observation, float, bool, bool, Info]:
        reply = await respond(user, self.messages)
        info: Info = {"metrics": {name: float(value) for name, value in reply.metrics.items()}}
        reward = 0.0
        if reply.reward is not None:
            info["turn_score"] = float(reply.reward)
            reward = self.turn_score_weight * float(reply.reward)
        observation = self._observe([{"role": "user", "content": reply.text}])
        if reply.done:
            final, info = await self._final(turn.content, info)
            reward += final
        return observation, reward, reply.done, False, info

    async def _final(self, answer: str, info: Info) -> tuple[float, Info]:
        """Score the episode: the reward, and ``info`` with the components of it."""
        score, components = (0.0, {}) if self.scored_elsewhere else await self.score_answer(self.task, answer)
        self.terminal_score = score
        rewards = await self.toolbox.rewards()
        components |= {f"tool/{name}": float(reward) for name, reward in rewards.items()}
        reward = score + self.tool_reward_weight * sum(rewards.values())
        return reward, {**info, "reward_components": components}

    async def score_answer(self, task: Task, answer: str) -> tuple[float, dict[str, float]]:
        """What `score` gives for an answer, and its components. Raises `EnvError` where that fails."""
        with boundary(f"score of environment {self.name!r}", task_id=task.id):
            if inspect.iscoroutinefunction(self.score):
                value: Any = await self.score(task, answer)
            else:
                value = await run_in_thread(self.score, task, answer)
                if inspect.isawaitable(value):
                    value = await value
            return _read_score(value)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _offer(self) -> tuple[BaseTool, ...]:
        """The author's tools; `tools` itself shows the selection of the current task."""
        if self._offered is None:
            # A tool that is a method of the environment was listed in the class body, before there was an instance.
            self._offered = tuple(
                tool.__get__(self, type(self)) if isinstance(tool, FunctionTool) else tool for tool in self.tools
            )
        return self._offered

    def _plan_sandbox(self) -> LazySandbox | None:
        """The episode's sandbox, not started yet; released after the tools."""
        config = _sandbox_config(self.sandbox)
        if config is None:
            return None
        from agentgym.sandbox import LazySandbox

        sandbox = LazySandbox(config, prepare=self._prepare)
        self.resources.push("sandbox", sandbox.close)
        return sandbox

    async def _prepare(self, sandbox: Sandbox) -> None:
        what = f"prepare_sandbox of environment {self.name!r}"
        try:
            with boundary(what, task_id=self.task.id):
                await self.prepare_sandbox(sandbox)
        except ToolError as error:  # nothing that the model did
            raise EnvError(f"{what}: {error}", task_id=self.task.id) from error

    async def _choose(self, split: str, task_id: str | None) -> Task:
        where = f"environment {self.name!r} in split {split!r}"
        if split not in self._lists:
            self._lists[split] = task_list(type(self), None if self.spec is None else self.spec.kwargs, split)
        found = self._lists[split]
        if not found.loaded:
            with boundary(f"tasks of {where}"):
                await run_in_thread(found.load, lambda: self.tasks(split))
        if not len(found.tasks):
            raise ConfigError(f"{where} has no tasks; expected at least one")
        if task_id is None:
            return copy.deepcopy(found.tasks[int(self.np_random.integers(len(found.tasks)))])
        return copy.deepcopy(found.find(task_id, where=where))

    async def _invite_user(self, task: Task) -> Interaction | None:
        settings = dict(task.interaction_kwargs)
        which = settings.pop("name", None) or self.interaction
        if which is None:
            return None
        user = make_interaction(which, self.interaction_config)

        async def start() -> None:
            with boundary(f"start of interaction {type(user).__qualname__}", task_id=task.id):
                await user.start(task, **settings)

        async def finish(_: None) -> None:
            await user.finish()

        await self.resources.acquire("interaction", start, finish)
        return user

    def _first_messages(self, task: Task) -> list[Message]:
        if isinstance(task.prompt, str):
            prompt: list[Message] = [{"role": "user", "content": task.prompt}]
        else:
            prompt = [copy.deepcopy(message) for message in task.prompt]
        if self.system_prompt is None or any(message["role"] == "system" for message in prompt):
            return prompt
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _answer_errors(self, errors: Sequence[ParseError]) -> list[Message]:
        first = self._num_errors + 1
        self._num_errors += len(errors)
        return [error_message(error, number) for number, error in enumerate(errors, first)]

    def _observe(self, messages: Sequence[Message]) -> Observation:
        """Add to the conversation; the observation is a copy, so that nobody changes the conversation through it."""
        self.messages.extend(messages)
        return tuple(copy.deepcopy(message) for message in messages)


def _tool_limits(limits: ToolLimits | Mapping[str, Any] | None) -> ToolLimits:
    if isinstance(limits, ToolLimits):
        return limits
    try:
        return ToolLimits.model_validate(dict(limits or {}))
    except pydantic.ValidationError as error:
        raise ConfigError(f"limits={dict(limits or {})}: {error}") from error


def _sandbox_config(value: SandboxConfig | Mapping[str, Any] | str | None) -> SandboxConfig | None:
    if value is None:
        return None
    from agentgym.sandbox import read_sandbox_config  # most environments have no sandbox, and the settings take time

    return read_sandbox_config(value)


def _read_score(value: Any) -> tuple[float, dict[str, float]]:
    """Split what `score` returned into the score and its components. Raises for anything that is not a number."""
    parts = value if isinstance(value, Mapping) else {"score": value}
    if "score" not in parts:
        raise TypeError(f"score() returned a dict with {sorted(map(str, parts))}, expected the key 'score'")
    components = {str(name): float(part) for name, part in parts.items() if isinstance(part, numbers.Real)}
    score = components.pop("score", math.nan)
    if not math.isfinite(score):
        raise TypeError(f"score() returned {value!r}, expected a finite number or a dict with a finite 'score'")
    return score, components
