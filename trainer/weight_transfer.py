"""Weights from the GPUs of the trainer to those of the engines, by vLLM's own transfer engines.

CUDA IPC where an engine shares its GPUs with the trainer: it maps the trainer's tensors. NCCL where it has GPUs of its
own: rank 0 of the trainer broadcasts. Both gather the shards of one parameter at a time, on every rank of the trainer.
Elsewhere (CPU, trainer.cluster=inline) weights go through host memory: `RolloutGroup.sync_weights`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from agentgym.errors import InfraError, boundary

Backend = Literal["ipc", "nccl"]

CONNECT_ATTEMPTS = 3
"""A free port may be taken between its choice and its use."""


class TrainedWeights:
    """All parameters under Hugging Face names, gathered one by one; every rank must iterate, in step with the others.

    Args:
        model: a `PolicyModel`, sharded or not.
        leave_out: parameters that are another name of an input embedding.
    """

    def __init__(self, model: nn.Module, leave_out: set[str]) -> None:
        self._model = model
        self._leave_out = leave_out

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._model.named_parameters():
            if name not in self._leave_out:
                yield name.removeprefix("lm."), parameter

    def metadata(self) -> list[Any]:
        """vLLM's description of what iteration yields; nothing is gathered for it."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, p.dtype, tuple(p.shape)) for name, p in self._parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            yield name, whole.detach()


class EngineClient:
    """What vLLM's trainer side calls on the engines: Ray actors of `VllmActor`, all at once.

    Args:
        actors: of the engines.
        per_engine: processes of each engine; they follow each other in the NCCL group.
    """

    def __init__(self, actors: Sequence[Any], per_engine: int) -> None:
        self._actors = actors
        self._per_engine = per_engine

    def _all(self, method: str, arguments: Sequence[dict[str, Any]]) -> None:
        import ray

        ray.get([a.transfer.remote(method, one) for a, one in zip(self._actors, arguments, strict=True)])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect each engine, at its own place in the group."""
        infos = [dict(init_info) for _ in self._actors]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._per_engine
        self._all("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        """Get ready for new weights."""
        self._all("start_weight_update", [{}] * len(self._actors))

    def update_weights(self, update_info: Any) -> None:
        """Receive."""
        self._all("update_weights", [{"update_info": update_info}] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All weights are there."""
        self._all("finish_weight_update", [{}] * len(self._actors))


class WeightSender:
    """One trainer rank's side of the transfer; connects anew when the engines are others than before.

    Args:
        source: the weights.
        rank: of this trainer process; rank 0 talks to the engines.
    """

    def __init__(self, source: TrainedWeights, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._sender: Any = None
        self._actors: Sequence[Any] = ()

    def send(self, backend: Backend, actors: Sequence[Any], per_engine: int) -> None:
        """Give all engines the current weights. Every rank must be asked, with the same arguments.

        Raises:
            InfraError: an engine was lost on the way, or none could be reached.
        """
        with boundary("sending weights to the engines"):
            if self._sender is None or list(actors) != list(self._actors):
                self._sender = self._connect(backend, actors, per_engine)
                self._actors = list(actors)
            self._sender.send_weights()

    def _connect(self, backend: Backend, actors: Sequence[Any], per_engine: int) -> Any:
        client = EngineClient(actors, per_engine)
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            info = IPCTrainerInitInfo(rank=self._rank, packed=True)
            return IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        host = socket.gethostbyname(socket.gethostname())
        problem: OSError | None = None
        for _ in range(CONNECT_ATTEMPTS):
            info = NCCLTrainerInitInfo(host, free_port(), 1 + len(actors) * per_engine, rank=self._rank)
            try:
                return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)
            except OSError as error:
                problem = error
        raise InfraError(f"no NCCL group of trainer and engines at {host}: {problem}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
