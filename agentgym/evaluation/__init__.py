"""Offline evaluation: the same sessions and loops as in training, for any model, endpoint or agent.

`evaluate` plays tasks and reports; `compare` puts two evaluations side by side; `rescore` and `replay` work on recorded
rollouts without a model.
"""

from agentgym.evaluation.report import EvalReport
from agentgym.evaluation.run import evaluate

__all__ = ["EvalReport", "evaluate"]
