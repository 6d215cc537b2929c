"""``agentgym sandbox build``, ``reap`` and ``doctor``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from agentgym.console import Console

sandbox_app = typer.Typer(help="Build, check and clean up sandboxes.", no_args_is_help=True)


@sandbox_app.command()
def build(
    base: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="`host`: this machine's own python3, bash and core utilities, without a network. Or an image with "
            "python3 and bash, pulled if it is not here. `auto`: python:3.11-slim if it can be had, else host.",
        ),
    ] = "auto",
) -> None:
    """Make the image that docker sandboxes run.

    Example: agentgym sandbox build --base host
    """
    from agentgym.tools.sandbox.daemon import Daemon
    from agentgym.tools.sandbox.image import build_image

    daemon = Daemon()
    try:
        daemon.ping()
        built = build_image(daemon.client, base)
    finally:
        daemon.close()
    Console().line(f"{built.tag} ({built.exact_tag}): {built.megabytes:.0f} MB, from {built.base}")


@sandbox_app.command()
def reap() -> None:
    """Remove what sandboxes of dead processes left behind: containers, processes, temp folders.

    What a living process owns is not touched. Happens by itself when a process opens its first sandbox. Exit code 1 if
    something could not be removed.

    Example: agentgym sandbox reap
    """
    from agentgym.tools.sandbox.daemon import Daemon
    from agentgym.tools.sandbox.reaper import reap as reap_leftovers

    daemon = Daemon()
    try:
        report = reap_leftovers(daemon if daemon.unavailable() is None else None)
    finally:
        daemon.close()
    console = Console()
    for kind, names in (
        ("containers", report.containers),
        ("processes", report.processes),
        ("folders", report.folders),
    ):
        console.line(f"{kind:<11} {len(names)} removed{': ' if names else ''}{', '.join(map(str, names))}")
    for failure in report.failures:
        console.line(f"failed: {failure}")
    raise typer.Exit(1 if report.failures else 0)


@sandbox_app.command()
def doctor(
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="docker, namespace or process; repeatable. Default: what works here."),
    ] = None,
) -> None:
    """Attack the sandboxes of this machine and show what holds.

    Exit code 1 if something is not contained, or if no backend works here.

    Example: agentgym sandbox doctor --backend docker
    """
    from agentgym.cli.bench_command import table
    from agentgym.tools.sandbox.doctor import examine

    console = Console()
    findings = asyncio.run(examine(backend or []))
    for line in table([finding.row() for finding in findings]):
        console.line(line)
    raise typer.Exit(0 if findings and all(finding.contained for finding in findings) else 1)
