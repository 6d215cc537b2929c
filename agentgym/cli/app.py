"""The commands. Help texts are for someone who sees agentgym for the first time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentgym.cli.data_commands import data_app
from agentgym.cli.sandbox_commands import sandbox_app

app = typer.Typer(
    name="agentgym",
    help="Gymnasium for LLM agents, with the trainer in the box.\n\nStart with: agentgym train env=calculator-math",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show every setting of a command as YAML.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(data_app, name="data")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings, e.g. env=calculator-math trainer.total_steps=50", show_default=False
    ),
]
Files = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file with settings; repeatable, later ones win."),
]
EnvName = Annotated[str, typer.Argument(metavar="ENV", help="Name of an environment; `agentgym envs` lists them.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"agentgym {version('agentgym')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Gymnasium for LLM agents, with the trainer in the box.

    Start with: agentgym train env=calculator-math
    """


@app.command()
def train(
    overrides: Overrides = None,
    config: Files = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Continue this run, e.g. runs/my-run.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that can be checked, start nothing.")
    ] = False,
) -> None:
    """Train a model in an environment.

    Needs no GPU and no download with the shipped model. Results go to runs/NAME.
    `agentgym config train env=NAME` shows every setting.

    Example: agentgym train env=calculator-math trainer.total_steps=50
    """
    from agentgym.cli.train_command import train_command

    raise typer.Exit(train_command(overrides or [], config or [], resume=resume, dry_run=dry_run))


@app.command(name="eval")
def evaluate(
    overrides: Overrides = None,
    config: Files = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with an evaluation: play only what is missing or failed, keep the rest."),
    ] = False,
) -> None:
    """Measure a model or an agent: mean reward with a confidence interval, pass@k, and a report with plots.

    What plays is one of:

    \b
    model=tiny|FOLDER|RUN          a model on this machine (RUN: its best checkpoint, its environment and settings)
    endpoint=URL model=NAME        a model behind an OpenAI-compatible API; the key comes from OPENAI_API_KEY
    agent=my_file.py:my_agent      your own async function of the session, with any framework inside
    agent=oracle, agent=noop       the environment's perfect player; empty answers

    Further settings: n=SAMPLES per task, split=validation, tasks=LIMIT, output=FOLDER (default: evals/ENV-POLICY),
    rollout.session_limit=ROLLOUTS played at once. `agentgym config eval env=NAME` shows all of them.

    Every rollout is written as it ends. After Ctrl-C, a crash or failures: agentgym eval --resume output=FOLDER.
    Rollouts that could not be scored count as errors, never as 0.

    Example: agentgym eval env=calculator-math model=tiny n=4
    """
    from agentgym.cli.eval_command import eval_command

    raise typer.Exit(eval_command(overrides or [], config or [], resume=resume))


@app.command()
def score(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rollouts: a jsonl file, or the folder of an evaluation or a run.")
    ],
    overrides: Overrides = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Step the recorded turns through the environment and compare its answers.")
    ] = False,
) -> None:
    """Score recorded rollouts again, without a model.

    FILE holds rollouts as agentgym writes them, or plain message logs: a line each, {"messages": [...]} in OpenAI's
    form, with "task_id" (or "ground_truth" and what else the reward takes) beside it.

    \b
    reward=my_reward.py            your compute_score(data_source, solution_str, ground_truth, extra_info)
    env=NAME                       the environment's own score; default: the environment that was recorded
    output=FOLDER                  write the rollouts with their new rewards, for `agentgym compare`

    With --replay nothing is scored anew: the recorded turns are stepped through a fresh session, and the first place
    where the environment answers or rewards differently is named. Exit code 1 if there is one.

    Example: agentgym score evals/calculator-math-tiny reward=my_reward.py
    """
    from agentgym.cli.score_command import score_command

    raise typer.Exit(score_command(path, overrides or [], replay=replay))


@app.command()
def view(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rollouts: a jsonl file, or the folder of an evaluation or a run.")
    ],
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only this task.", show_default=False)] = None,
    sample: Annotated[int | None, typer.Option(help="Only this sample.", show_default=False)] = None,
    only: Annotated[
        str | None,
        typer.Option(help="failed, solved, unsolved, or a status such as truncated_turns.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="Show so many.", min=1)] = 3,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show tokens instead of messages: sampled ones (trained on) in green.")
    ] = False,
) -> None:
    """Read recorded rollouts: conversations, calls, rewards, errors.

    Example: agentgym view evals/calculator-math-tiny --only unsolved --limit 2
    """
    from agentgym.cli.view_command import view_command

    raise typer.Exit(view_command(path, task=task, sample=sample, only=only, limit=limit, tokens=tokens))


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(metavar="RUN", help="A run (its best checkpoint), or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; must not exist.")],
) -> None:
    """Copy a trained model to a Hugging Face folder of its own.

    Weights, tokenizer and chat template; no optimizer. transformers, vLLM and others load it as it is.

    Example: agentgym export runs/calculator-math-tiny-grpo my-model
    """
    from agentgym.cli.export_command import export_command

    raise typer.Exit(export_command(model, out))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of an evaluation, e.g. evals/my-env-tiny.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Folder of another one on the same tasks.")],
    everything: Annotated[bool, typer.Option("--all", help="List every task that changed, not the first 20.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Put two evaluations side by side: is B better than A, and on which tasks?

    Rewards are compared task by task, which takes the difficulty of the tasks out: the interval of the difference B - A
    tells chance from progress. Tasks that could not be scored in both are left out.

    Example: agentgym compare evals/calculator-math-tiny evals/calculator-math-oracle
    """
    from agentgym.cli.compare_command import compare_command

    raise typer.Exit(compare_command(first, second, everything=everything, as_json=json))


@app.command()
def proxy(overrides: Overrides = None, config: Files = None) -> None:
    """Serve a model as an OpenAI-compatible endpoint that records exact tokens.

    An agent written in any framework talks to it unchanged. The API key it sends (or the header X-Session, or the path
    /s/KEY/v1) names its session; of each session the token ids, masks and log-probs are recorded, ready to train on.

    \b
    Settings: model=tiny|FOLDER|RUN, port=8000, output=FILE (a line for each session that ends),
              rollout.max_prompt_length, rollout.max_response_length (tokens of a session), rollout.parser.

    To evaluate or train with such an agent no server of your own is needed:

    \b
    agentgym eval env=NAME model=tiny agent=my_file.py:my_agent
    agentgym train env=NAME rollout.agent_loop.name=external rollout.agent_loop.agent=my_file.py:my_agent

    where my_agent is an async function of (session, endpoint): endpoint has base_url, api_key and model.

    Example: agentgym proxy model=tiny port=8000 output=sessions.jsonl
    """
    from agentgym.cli.proxy_command import proxy_command

    raise typer.Exit(proxy_command(overrides or [], config or []))


@app.command()
def envs(overrides: Overrides = None) -> None:
    """List the environments that can be used.

    Example: agentgym envs plugins=examples/write_an_env.py
    """
    from agentgym.cli.env_commands import envs_command

    raise typer.Exit(envs_command(overrides or []))


@app.command()
def check(env: EnvName, overrides: Overrides = None) -> None:
    """Check that an environment keeps the contract.

    For authors of environments. Runs Gymnasium's own checker and agentgym's: the oracle solves its tasks, equal seeds
    give equal episodes, garbage is answered, the splits are disjoint. Exit code 1 if something is wrong.

    Example: agentgym check my-env plugins=examples/write_an_env.py
    """
    from agentgym.cli.env_commands import check_command

    raise typer.Exit(check_command([f"env={env}", *(overrides or [])]))


@app.command()
def play(
    env: EnvName,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of the episode; draws the task unless --task is given.")] = 0,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Play this task.", show_default=False)] = None,
) -> None:
    """Play an environment yourself, in the place of the model.

    A turn is one line (end it with a backslash to go on in the next one). A tool call is typed as the model writes it:
    <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>

    Example: agentgym play calculator-math --seed 3
    """
    from agentgym.cli.play_command import play_command

    raise typer.Exit(play_command([f"env={env}", *(overrides or [])], seed=seed, task_id=task))


@app.command()
def smoke(overrides: Overrides = None) -> None:
    """Play some tasks with the perfect player, through all that training uses.

    The environment's oracle plays tasks of both splits through sessions, agent loop, tools, sandbox and the model's
    tokens. Prints rewards, tool calls, what is left behind and where the time goes. Exit code 1 if a task is not
    solved, an episode fails (the first is shown with its traceback) or something is left.

    Example: agentgym smoke env=calculator-math tasks=5
    """
    from agentgym.cli.smoke_command import smoke_command

    raise typer.Exit(smoke_command(overrides or []))


@app.command(name="serve-tools")
def serve_tools(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Tool files: .yaml or .py")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8000,
    unix: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on this unix socket instead.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the token, made if it is missing; default: AGENTGYM_TOOLS_TOKEN, or a new one.",
            show_default=False,
        ),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(metavar="BACKEND", help="Sandbox of each session: docker, namespace, auto.", show_default=False),
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions at the same time.")] = 1024,
    lease: Annotated[float, typer.Option(help="Seconds after which an unused session is released.")] = 300.0,
) -> None:
    """Serve tools over HTTP, with state for each session.

    A tool file elsewhere uses them with an entry `- server: http://HOST:PORT`. /openapi.json describes the service.

    Example: agentgym serve-tools tools.yaml --port 8000
    """
    from agentgym.cli.serve_command import serve_command

    raise typer.Exit(
        serve_command(
            files,
            host=host,
            port=port,
            unix=unix,
            token_file=token_file,
            sandbox=sandbox,
            max_sessions=max_sessions,
            lease=lease,
        )
    )


@config_app.command(name="train")
def config_train(overrides: Overrides = None, config: Files = None) -> None:
    """Show the configuration that `agentgym train` would run with, as YAML.

    Example: agentgym config train env=calculator-math trainer.lr=2e-5 > run.yaml
    """
    from agentgym.cli.train_command import show_train_config

    show_train_config(overrides or [], config or [])


@config_app.command(name="eval")
def config_eval(overrides: Overrides = None, config: Files = None) -> None:
    """Show the configuration that `agentgym eval` would run with, as YAML.

    Example: agentgym config eval env=calculator-math model=tiny
    """
    from agentgym.cli.eval_command import show_eval_config

    show_eval_config(overrides or [], config or [])


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="rollout, step, loop, advantages or sandbox.")],
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
) -> None:
    """Measure speed on this machine.

    rollout: tokens/s of the engine beside Hugging Face generate. step: where a training step's time goes.
    loop: turns/s of the tool loop. advantages: the estimators. sandbox: starts, calls and memory of every backend.

    Example: agentgym bench rollout
    """
    from agentgym.cli.bench_command import bench_command

    raise typer.Exit(bench_command(name, as_json=json))
