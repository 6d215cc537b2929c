"""Are the files of a model folder what they claim to be? Found out before anything starts and without loading it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentgym.errors import ConfigError, EnvError, boundary

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Any one of them makes a folder that of a tokenizer."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in SINGLE)

AGAIN = "fetch the model again"


def check_tokenizer_files(folder: Path, *, what: str) -> None:
    """Raise `ConfigError` where the folder has no tokenizer, or a ``tokenizer.json`` that cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{what}: no tokenizer in {folder}; expected tokenizer.json (or tokenizer.model)")
    path = folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        _try_to_read(path, partial(Tokenizer.from_file, str(path)), what=what, kind="tokenizer")


def check_weight_files(folder: Path, *, what: str) -> None:
    """Raise `ConfigError` where weights are missing, or where the header of a file of tensors cannot be read."""
    files = [folder / name for name in SINGLE if (folder / name).is_file()][:1]
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if not files and index is not None:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{what}: {index} cannot be read: {error}; {AGAIN}") from None
        files = [folder / name for name in names]
    if not files:
        raise ConfigError(f"{what}: no weights in {folder}; expected {SINGLE[0]} (or {INDEXES[0]} with its parts)")
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{what}: {path} is missing; {AGAIN}")
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            _try_to_read(path, partial(safe_open, path, framework="numpy"), what=what, kind="file of weights")


def _try_to_read(path: Path, read: Callable[[], object], *, what: str, kind: str) -> None:
    # Both libraries raise plain `Exception`s; the boundary makes an `EnvError` of whatever it is.
    try:
        with boundary(f"reading {path}"):
            read()
    except EnvError as error:
        reason = str(error.__cause__).partition("\n")[0]
        raise ConfigError(f"{what}: {path} is not a readable {kind}: {reason}; {AGAIN}") from None
