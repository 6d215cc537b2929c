"""What vLLM is started with: its options, arguments and environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from agentgym.errors import ConfigError
from agentgym.settings import VllmConfig
from agentgym.trainer.rollout.vllm_worker import OWNER
from agentgym.trainer.rollout.weights import cache_bytes_per_token
from agentgym.trainer.threads import openmp_environment

BLOCK = 32
"""Tokens per block of the KV cache on the CPU, whose kernels want multiples of 32; only whole blocks are reused."""

CPU_BATCHED_TOKENS = 8192
"""Most tokens of one forward pass on the CPU, unless a sequence is longer."""

EXTENSION = "agentgym.trainer.rollout.vllm_worker.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What one engine is made of. Plain data: it travels to the engine's process."""

    model: str
    """Folder or hub id."""
    revision: str | None = None
    dtype: str = "float32"
    max_slots: int = 64
    max_length: int = 2048
    threads: int = 1
    """CPU threads of this engine."""
    share: float = 1.0
    """This engine's share of the machine's memory, where it runs on the CPU."""
    gpu: bool = False
    colocated: bool = False
    """The trainer uses the same GPUs."""
    devices: Sequence[str] = ()
    """GPUs of this machine to use; empty: those that the process sees."""
    transfer: Literal["ipc", "nccl"] | None = None
    """How the trainer hands over weights; None: through host memory alone."""
    settings: VllmConfig


def engine_arguments(options: EngineOptions, config: Any) -> dict[str, Any]:
    """Arguments of vLLM's ``AsyncEngineArgs``."""
    settings = options.settings
    arguments: dict[str, Any] = {
        "model": options.model,
        "revision": options.revision,
        "tokenizer_revision": options.revision,
        "dtype": options.dtype,
        "max_model_len": options.max_length,
        "max_num_seqs": options.max_slots,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else "uni",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enforce_eager": settings.eager if settings.eager is not None else not options.gpu,
    }
    if settings.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = settings.max_batched_tokens
    if options.gpu:
        shared = 0.5 if options.colocated else 0.9
        arguments["gpu_memory_utilization"] = settings.gpu_memory if settings.gpu_memory is not None else shared
        arguments["enable_sleep_mode"] = options.colocated
        if settings.kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gb * 2**30)
        return arguments
    # A seeded request whose prompt is computed in pieces crashes vLLM 0.32 on the CPU ("CPU Generator does not use
    # offset"), so prompts are computed whole.
    batched = arguments.setdefault("max_num_batched_tokens", max(CPU_BATCHED_TOKENS, options.max_length))
    if batched < options.max_length:
        raise ConfigError(
            f"rollout.vllm.max_batched_tokens={batched} is below the longest sequence of {options.max_length} tokens; "
            f"on the CPU a prompt is computed whole: raise it to at least that, or null"
        )
    return arguments | {
        "enable_chunked_prefill": False,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": cache_bytes(options, config),
    }


def cache_bytes(options: EngineOptions, config: Any) -> int:
    """Bytes for keys and values on the CPU: as set, or room for every slot, up to a quarter of the memory."""
    if options.settings.kv_cache_gb is not None:
        return int(options.settings.kv_cache_gb * 2**30)
    per_slot = -(-options.max_length // BLOCK) * BLOCK * cache_bytes_per_token(config, options.dtype)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = int(0.25 * options.share * memory)
    return max(64 * 2**20, min(int(1.25 * options.max_slots * per_slot), most))


@contextmanager
def environment(options: EngineOptions) -> Iterator[None]:
    """The environment variables that vLLM and its processes read when they start; the old ones come back.

    vLLM changes the environment itself, too (it preloads libraries into every child): sandboxes must not inherit that.
    """
    before = dict(os.environ)
    os.environ.update(
        VLLM_LOGGING_LEVEL=options.settings.log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        **openmp_environment(options.threads),
    )
    os.environ[OWNER] = str(os.getpid())
    if options.settings.log_level == "error":
        os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    if options.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(options.devices)
    if options.transfer == "ipc":
        # Handles of GPU memory go from process to process of this run; vLLM has no other way to send them.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if not options.gpu:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if options.settings.tensor_parallel == 1:
            # The worker then lives in vLLM's engine process: one process less to start and to talk to.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def quiet(options: EngineOptions) -> Iterator[None]:
    """Keep what is said before vLLM's log level holds (by vLLM while it is imported, by libraries) off standard error.

    vLLM's processes inherit that for good; their errors go to standard output.
    """
    if options.settings.log_level != "error":
        yield
        return
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def silent_statistics() -> Any:
    """A logger that makes vLLM keep each request's statistics, and replaces those that publish them."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Silent(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        def record(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, *_args: Any, **_kwargs: Any) -> None:
            pass

    return Silent
