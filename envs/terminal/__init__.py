"""`terminal`: jobs with files, for a model that has a shell in a sandbox.

A task has one to three jobs: create, move, count, extract, sum, fix, sort into folders, find. Its files are written
when the sandbox is first used. The jobs are checked from outside: the environment reads the files through the sandbox's
own channel and compares them byte by byte; no program inside has a say. Tasks are generated from the seed, and the
splits are disjoint for any pair of seeds.
"""

from __future__ import annotations

from agentgym.envs.terminal.env import Terminal

__all__ = ["Terminal"]
