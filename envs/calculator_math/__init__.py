"""`calculator-math`: word and expression problems whose numbers are out of reach of mental arithmetic.

A problem takes one to three calculator calls. Problems are generated from the seed, and the splits are disjoint for
any pair of seeds. The answer is the last ``#### NUMBER`` or ``\\boxed{NUMBER}`` of the last turn, compared exactly.
"""

from __future__ import annotations

from agentgym.envs.calculator_math.env import CalculatorMath

__all__ = ["CalculatorMath"]
