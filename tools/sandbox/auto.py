"""Which backend serves: the one that was named, or the strongest that works; never silently a weaker one."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.sandbox import SandboxBackend, SandboxConfig, sandbox_backends
from agentgym.tool_threads import run_in_thread
from agentgym.tools.sandbox.reaper import reap_in_background

_AUTOMATIC = ("docker", "namespace")
_chosen: dict[str, SandboxBackend] = {}


async def choose_backend(config: SandboxConfig) -> SandboxBackend:
    """The backend of the settings; asked once per process and name. What dead processes left behind of its sandboxes
    is removed then.

    Raises:
        ConfigError: it does not work here, or a setting that it cannot honour; the message says what to do.
    """
    if config.backend not in _chosen:
        names = _AUTOMATIC if config.backend == "auto" else (config.backend,)
        _chosen[config.backend] = await run_in_thread(_first_available, names)
        reap_in_background(_chosen[config.backend])
    backend = _chosen[config.backend]
    backend.check(config)
    return backend


def _first_available(names: tuple[str, ...]) -> SandboxBackend:
    reasons: list[str] = []
    for name in names:
        backend = sandbox_backends.get(name)()
        reason = backend.unavailable()
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    hint = " `sandbox=process` runs the code without any isolation, if that is what you want." if len(names) > 1 else ""
    raise ConfigError(f"no sandbox can be started here. {'; '.join(reasons)}.{hint}")
