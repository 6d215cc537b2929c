"""`python-math`: numeric problems in parts, for a model that has a Python session.

The first part defines a list of numbers and asks for something about it. Every further part is told when the one
before has been answered: it changes the list, and asks again. So the variables of the session are worth keeping.
Problems are generated from the seed, and the splits are disjoint for any pair of seeds. Answers are the last
``#### NUMBER`` of a turn, compared exactly.
"""

from __future__ import annotations

from agentgym.envs.python_math.env import PythonMath

__all__ = ["PythonMath"]
