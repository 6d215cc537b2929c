"""``agentgym proxy``: a recording endpoint over a model on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentgym.cli.signals import sigterm_interrupts
from agentgym.config import ConfigModel, Names, load_config, section, setting
from agentgym.console import Console
from agentgym.settings import ModelConfig, RolloutConfig


class ProxyConfig(ConfigModel):
    """A model, and where it is served."""

    plugins: Names = setting([], "Modules or Python files that register tool parsers and the like")
    model: ModelConfig = section(ModelConfig, "The model to serve")
    rollout: RolloutConfig = section(RolloutConfig, "Engine, tool format and limits of a session")
    threads: int | None = setting(None, "CPU threads for computing; null: all cores", ge=1)
    seed: int = setting(0, "Seed of the sampling where a request brings none", ge=0)
    host: str = setting("127.0.0.1", "Address to listen on; anyone who reaches it can use the model")
    port: int = setting(8000, "Port to listen on; 0: any free one", ge=0, le=65535)
    output: Path | None = setting(None, "File to which the record of each session is appended when it ends")


def proxy_command(overrides: Sequence[str], files: Sequence[Path]) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit code."""
    from agentgym import plugins
    from agentgym.trainer.preflight import check_model

    config = load_config(ProxyConfig, overrides=overrides, files=files)
    plugins.load(config.plugins)
    check_model(config.model, config.rollout)
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts():
        asyncio.run(serve(config, Console()))
    return 0


async def serve(config: ProxyConfig, console: Console, ready: Callable[[str], None] | None = None) -> None:
    """Serve until the task is cancelled; ``ready`` is told the base URL."""
    from agentgym.loops.base import derive_seed
    from agentgym.proxy.recorder import Recorder
    from agentgym.proxy.server import ProxyServer, ProxySession
    from agentgym.tokens import Renderer, get_parser
    from agentgym.trainer.model import load_tokenizer
    from agentgym.trainer.requests import loop_sampling
    from agentgym.trainer.rollout.engines import RolloutSetup, make_engine

    # Requests come when they come: there is no batch whose order could be kept.
    rollout = config.rollout.model_copy(update={"deterministic": False})
    setup = RolloutSetup(plugins=config.plugins, envs=(), model=config.model, rollout=rollout, threads=config.threads)
    tokenizer = load_tokenizer(config.model.path, revision=config.model.revision)
    renderer = Renderer(tokenizer, template_kwargs=rollout.template_kwargs)
    engine = make_engine(setup, tokenizer)
    releases: set[asyncio.Task[None]] = set()

    def make_recorder(key: str) -> Recorder:
        sampling = loop_sampling(rollout, seed=derive_seed(config.seed, "proxy", key))
        parser = get_parser(rollout.parser)
        return Recorder(generator=engine, renderer=renderer, parser=parser, key=key, sampling=sampling)

    def ended(session: ProxySession) -> None:
        release = asyncio.create_task(engine.release(session.key))
        releases.add(release)
        release.add_done_callback(releases.discard)
        if config.output is not None:
            append(config.output, session)
        console.line(f"session {session.key} ended: {session.recorder.turns} requests, reward {session.reward}")

    server = ProxyServer(model=config.model.path, make_recorder=make_recorder, ended=ended)
    try:
        async with server.serve(config.host, config.port) as url:
            for line in greeting(url, config):
                console.line(line)
            if ready is not None:
                ready(url)
            await asyncio.Event().wait()
    finally:
        await asyncio.gather(*releases)
        await engine.aclose()


def greeting(url: str, config: ProxyConfig) -> list[str]:
    """What a user needs to know to begin."""
    root = url.removesuffix("/v1")
    return [
        f"serving model {config.model.path} at {url}; the API key you send names your session",
        f"  records   GET {root}/sessions/KEY",
        f"  reward    POST {root}/sessions/KEY/reward   {{'reward': 1.0}}",
        f"  the end   DELETE {root}/sessions/KEY"
        + (f"   appends it to {config.output}" if config.output is not None else ""),
    ]


def append(file: Path, session: Any) -> None:
    """One line for the session, in the form of a run's rollouts."""
    from agentgym.rollout import Rollout
    from agentgym.types import Outcome, RolloutStatus

    status = RolloutStatus.TRUNCATED_TOKENS if session.recorder.exhausted else RolloutStatus.COMPLETED
    rollout = Rollout(
        env_id="proxy",
        task_id=session.key,
        group=session.key,
        sample=0,
        outcome=Outcome(status=status, reward=session.reward, num_turns=session.recorder.turns),
        segments=session.recorder.outputs(),
        conversation=session.recorder.conversation,
        seconds=time.monotonic() - session.started,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(rollout.to_dict(), ensure_ascii=True, default=str) + "\n")
