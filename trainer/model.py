"""Models and tokenizers as Hugging Face folders: finding, loading, saving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentgym.errors import ConfigError, boundary
from agentgym.trainer.model_path import resolve_model_path
from agentgym.trainer.threads import one_thread


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What token ids mean, in short: recorded with a run's rollouts and compared when they are replayed."""

    size: int
    """Ids of the model; those beyond the tokenizer's have no text, yet a model can sample them."""
    digest: str
    """SHA-256 of the tokenizer's tokens with their ids."""

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> Vocabulary:
        """The vocabulary of a Hugging Face tokenizer, for a model of so many ids."""
        tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        return cls(size=size, digest=hashlib.sha256(json.dumps(tokens).encode()).hexdigest())


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(path: str, *, dtype: str, revision: str | None = None) -> Any:
    """A transformers causal LM in eval mode. ``path``: ``tiny``, a folder, a run folder or a hub id."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = resolve_model_path(path)
    with boundary(f"loading the model {path!r}"), one_thread():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], revision=revision).eval()


def load_tokenizer(path: str, *, revision: str | None = None) -> Any:
    """The tokenizer of a model. Raises `ConfigError` where it has no chat template."""
    from transformers import AutoTokenizer

    folder = resolve_model_path(path)
    with boundary(f"loading the tokenizer of {path!r}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision)
    if tokenizer.chat_template is None:
        raise ConfigError(f"model {path!r} has no chat template; add chat_template.jinja to its folder")
    return tokenizer


def save_model_folder(
    folder: Path, weights: dict[str, Tensor], config: Any, generation_config: Any, tokenizer: Any
) -> None:
    """Write a folder that ``from_pretrained`` loads: weights, configs, tokenizer, chat template."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
