"""What agentgym adds to vLLM's worker class; runs in vLLM's own processes and is called through ``collective_rpc``."""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

OWNER = "AGENTGYM_ENGINE_OWNER"
"""Environment variable: id of the process that a worker must not outlive."""


class WorkerExtension:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    model_runner: Any
    reload_weights: Any
    """Of vLLM's worker: new weights in place, in the format of a checkpoint."""

    def agentgym_ping(self) -> int:
        """Answers with this process's id when the worker is between two steps."""
        return os.getpid()

    def agentgym_load(self, path: str) -> int:
        """Take the weights of a safetensors file. Returns the checksum of what was taken."""
        from safetensors.torch import load_file

        from agentgym.trainer.rollout.weights import checksum

        weights = load_file(path)
        self.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
        repack_heads(self.model_runner.get_model())
        return checksum(weights)


def repack_heads(model: Any) -> None:
    """Make output layers compute with their current weights.

    On the CPU vLLM computes with packed copies. It does not renew that of an output layer which is tied to the
    embedding, since nothing of that layer is in a checkpoint. Elsewhere this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)


def end_with(owner: int) -> None:
    """End this process as soon as the process ``owner`` is gone, however it ended (on Linux)."""
    if not hasattr(os, "pidfd_open"):
        return

    def wait(process: int) -> None:
        select.select([process], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, args=(os.pidfd_open(owner),), daemon=True).start()


if OWNER in os.environ:
    # vLLM imports this before it loads the model, so that nothing is left behind if the owner dies meanwhile.
    end_with(int(os.environ[OWNER]))
