"""Weights on their way from the trainer to an engine: their checksum, their shapes, and a file in shared memory."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from agentgym.errors import ConfigError, boundary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_MEMORY = Path("/dev/shm")


def checksum(weights: Mapping[str, Tensor]) -> int:
    """A 32-bit CRC over names, formats and bytes of all tensors, in the order of the names."""
    total = 0
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        data: Any = tensor.flatten().view(torch.uint8).numpy()
        total = zlib.crc32(data, total)
    return total


@contextmanager
def shared_file(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """A safetensors file that other processes of this machine map; in memory where the system has such a place.

    It is removed at the end of the block: whoever maps it by then keeps what is mapped.
    """
    from safetensors.torch import save_file

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    handle, path = tempfile.mkstemp(prefix="agentgym-weights-", suffix=".safetensors", dir=_place(size))
    os.close(handle)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, path)
        yield path
    finally:
        os.unlink(path)


def _place(size: int) -> Path | None:
    """Shared memory if there is room for ``size`` bytes, else the folder for temporary files."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize > 1.1 * size:
            return SHARED_MEMORY
    return None


class Shapes:
    """Names and shapes of a model's full weights, to check new ones before anything is changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config
        self.vocabulary = int(self.config.get_text_config().vocab_size)
        """Number of token ids."""
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._tied = set(getattr(model, "all_tied_weights_keys", None) or ())

    @classmethod
    def read(cls, model: str, revision: str | None = None) -> Self:
        """Those of a folder or hub id; only its configuration is read."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with boundary(f"reading the configuration of {model!r}"):
            config = AutoConfig.from_pretrained(model, revision=revision)
            with torch.device("meta"):
                return cls(AutoModelForCausalLM.from_config(config))

    def untied(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights without those that are another name of one."""
        return {name: tensor for name, tensor in weights.items() if name not in self._tied}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `ConfigError` unless these are all weights of such a model (tied ones may be left out)."""
        unknown = sorted(set(weights) - set(self._shapes))
        missing = sorted(set(self._shapes) - set(weights) - self._tied)
        if unknown or missing:
            raise ConfigError(
                f"the weights do not fit the model: {len(unknown)} unknown names {unknown[:3]}, {len(missing)} missing "
                f"{missing[:3]}: send the full state dict of a model of the same class"
            )
        for name, tensor in weights.items():
            if tensor.shape != self._shapes[name]:
                raise ConfigError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, expected {tuple(self._shapes[name])}: send the "
                    "state dict of a model of the same configuration"
                )


def cache_bytes_per_token(config: Any, dtype: str) -> int:
    """Bytes of keys and values that a model keeps per token, for models of plain attention layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2))
