"""The trainer: algorithms, batches, workers, rollout engines, checkpoints and the fit loop."""

if __name__ != "agentgym.trainer":
    raise ImportError(f"import this package as 'agentgym.trainer', not as {__name__!r}")
