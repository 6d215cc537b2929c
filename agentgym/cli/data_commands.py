"""``agentgym data prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentgym.console import Console

data_app = typer.Typer(no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Make data files for env=dataset.

    Example: agentgym data prepare gsm8k
    """


@data_app.command()
def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gsm8k.")],
    source: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with the data set's files; without it they are downloaded."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; default: data/NAME.", show_default=False)
    ] = None,
) -> None:
    """Turn a well-known data set into train.parquet and val.parquet.

    Example: agentgym data prepare gsm8k --source downloads/gsm8k
    """
    from agentgym.data.prepare import prepare as write

    console, folder = Console(), output if output is not None else Path("data") / name
    for line in write(name, source=source, output=folder):
        console.line(line)
    files = f"data.train_files={folder}/train.parquet data.val_files={folder}/val.parquet"
    console.line(f"next        agentgym train env=dataset {files} model=...")
