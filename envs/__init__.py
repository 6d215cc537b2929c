"""The environments that ship with agentgym, one file or folder each."""

if __name__ != "agentgym.envs":
    raise ImportError(f"import this package as 'agentgym.envs', not as {__name__!r}")
