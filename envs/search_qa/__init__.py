"""`search-qa`: questions about an invented world, for a model that can search its encyclopedia.

The world (towns, people, buildings, guilds and books) is made from the seed, one for each split, so that no model knows
its facts and none of one split is true in the other. A question takes one to three searches. The answer is the last
``#### ANSWER`` of the last turn, compared exactly but for case, punctuation and a leading article.
"""

from __future__ import annotations

from agentgym.envs.search_qa.env import SearchQA

__all__ = ["SearchQA"]
