"""The shipped reward managers, with real functions, processes, services and a real classifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentgym.errors import ConfigError, EnvError, InfraError
from agentgym.rewards.base import RewardData, RewardManager
from agentgym.rewards.config import RewardConfig, make_reward_manager

FUNCTIONS = """
import asyncio, os, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    print("noise on standard output")
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str), "read": solution_str}


async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(len(solution_str))


def process(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "raise":
        raise KeyError("answer")
    if solution_str == "die":
        os._exit(3)
    return {"score": 1.0, "pid": os.getpid()}


def no_number(data_source, solution_str, ground_truth, extra_info=None):
    return None
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def make(**settings: Any) -> RewardManager:
    manager = make_reward_manager(RewardConfig.model_validate(settings), max_response_length=16)
    assert manager is not None
    return manager


def data(solution: str = "4", truth: Any = "4", **fields: Any) -> RewardData:
    return RewardData(data_source="s", solution_str=solution, ground_truth=truth, task_id="t", **fields)


async def score(manager: RewardManager, *args: Any, **kwargs: Any) -> tuple[float, dict[str, Any]]:
    result = await manager.run_single(data(*args, **kwargs))
    return result["reward_score"], dict(result["reward_extra_info"])


async def test_naive_calls_sync_and_async_functions(file: str) -> None:
    manager = make(path=file, kwargs={"bonus": 0.5})
    assert await score(manager) == (1.5, {"length": 1, "read": "4"})
    assert await score(make(path=f"{file}:later"), "four") == (4.0, {})


async def test_a_value_that_is_no_score_is_an_error_and_not_zero(file: str) -> None:
    with pytest.raises(TypeError, match="returned None"):
        await score(make(path=f"{file}:no_number"))


async def test_composite_adds_weighted_parts_and_shows_each(file: str) -> None:
    parts = [{"path": f"{file}:compute_score"}, {"path": f"{file}:later", "weight": 0.1}, {"path": "env", "weight": 2}]
    manager = make(manager="composite", options={"parts": parts})
    total, info = await score(manager, "4", "4", env_score=0.25)
    assert total == pytest.approx(1.0 + 0.1 * 1 + 2 * 0.25)
    numbers = {name: value for name, value in info.items() if not isinstance(value, str)}
    assert numbers == {"compute_score": 1.0, "compute_score/length": 1, "later": 1.0, "env": 0.25}
    assert manager.uses_env_score("rule")
    with pytest.raises(ConfigError, match="label of its own"):
        make(manager="composite", options={"parts": [parts[0], parts[0]]})
    with pytest.raises(ConfigError, match="wieght"):
        make(manager="composite", options={"parts": [{**parts[0], "wieght": 1}]})


async def test_dapo_shapes_the_score_by_the_model_tokens(file: str) -> None:
    # C18
    manager = make(path=file, manager="dapo", options={"max_length": 10, "buffer": 4})
    total, info = await score(manager, model_tokens=9)
    assert total == pytest.approx(1.0 - 0.75)
    assert (info["score"], info["overlong"]) == (1.0, -0.75)
    # without a function the environment's own score is shaped, up to rollout.max_response_length
    own = make(manager="dapo", options={"buffer": 8})
    assert (await score(own, model_tokens=12, env_score=1.0))[0] == pytest.approx(0.5)


async def test_processes_score_and_hanging_ones_are_killed(file: str) -> None:
    options = {"processes": 1, "timeout": 1.0}
    manager = make(path=f"{file}:process", manager="parallel", options=options)
    try:
        first = (await score(manager))[1]["pid"]
        assert (await score(manager))[1]["pid"] == first
        with pytest.raises(EnvError, match=r"took more than 1 s") as late:
            await score(manager, "hang")
        assert late.value.error_type == "ScorerTimeout"
        with pytest.raises(EnvError, match=r"KeyError: 'answer'") as raised:
            await score(manager, "raise")
        assert (raised.value.error_type, "in process" in raised.value.traceback_text) == ("KeyError", True)
        with pytest.raises(InfraError, match="died"):
            await score(manager, "die")
        assert (await score(manager))[1]["pid"] != first
    finally:
        await manager.aclose()


async def test_what_a_function_in_a_process_prints_is_no_answer(file: str) -> None:
    manager = make(path=file, manager="parallel", options={"processes": 1})
    try:
        assert (await score(manager))[0] == 1.0
    finally:
        await manager.aclose()


Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_remote_service_scores_after_being_busy() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if len(seen) == 1:
            return web.Response(status=503)
        return web.json_response({"score": 0.5, "detail": 2})

    async with service(handler) as url:
        manager = make(manager="remote", options={"url": url})
        assert await score(manager, extra_info={"index": 3}) == (0.5, {"detail": 2})
        await manager.aclose()
    assert len(seen) == 2
    assert seen[1] == {"data_source": "s", "solution_str": "4", "ground_truth": "4", "extra_info": {"index": 3}}
    assert not manager.uses_env_score("rule")


async def test_a_service_that_refuses_or_is_gone_is_told_apart() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=400, text="no such field")

    async with service(handler) as url:
        manager = make(manager="remote", options={"url": url, "retries": 0})
        with pytest.raises(EnvError, match=r"HTTP 400: no such field") as refused:
            await score(manager)
        assert refused.value.error_type == "RemoteScorerError"
        await manager.aclose()
    gone = make(manager="remote", options={"url": url, "retries": 1})
    with pytest.raises(InfraError, match="not reached in 2 tries"):
        await score(gone)
    await gone.aclose()


async def test_requests_keep_to_the_rate() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(1.0)

    async with service(handler) as url:
        manager = make(manager="remote", options={"url": url, "requests_per_second": 20})
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(score(manager) for _ in range(6)))
        assert asyncio.get_running_loop().time() - start >= 5 / 20
        await manager.aclose()


async def test_a_judge_reads_the_answer_and_its_score_is_found() -> None:
    asked: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = "Well. Score: 0.1 at first, but no. **Score:** 0.75" if len(asked) == 1 else "I cannot say"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async with service(handler) as url:
        manager = make(manager="model", options={"endpoint": f"{url}/v1", "judge": "j", "retries": 0})
        assert await score(manager, "the {prompt} answer", style="model", prompt_str="Why?") == (0.75, {})
        with pytest.raises(EnvError, match="no score") as unreadable:
            await score(manager, style="model")
        assert unreadable.value.error_type == "UnreadableJudgement"
        # rows of style rule keep their own score
        assert await score(manager, env_score=0.5) == (0.5, {})
        await manager.aclose()
    assert asked[0]["model"] == "j"
    content = asked[0]["messages"][0]["content"]
    assert "Why?" in content
    assert "the {prompt} answer" in content
    assert (manager.uses_env_score("rule"), manager.uses_env_score("model")) == (True, False)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny sequence classifier with random weights and the shipped model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from agentgym.trainer.model_path import resolve_model_path

    folder = tmp_path_factory.mktemp("classifier")
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def test_a_classifier_scores_rows_of_style_model(classifier: str) -> None:
    manager = make(manager="model", options={"model": classifier, "batch_size": 3})
    answers = ["a", "a longer answer", "b", "another", "a"]
    results = await asyncio.gather(*(score(manager, answer, style="model", prompt_str="Say.") for answer in answers))
    values = [value for value, _ in results]
    assert values[0] == pytest.approx(values[4], abs=1e-5)  # what else is in the batch does not matter
    assert len({round(value, 5) for value in values}) == 4
    assert (await score(manager, "a", style="model", prompt_str="Say."))[0] == pytest.approx(values[0], abs=1e-5)
    await manager.aclose()
    with pytest.raises(ConfigError, match="expected one of them"):
        make(manager="model")
