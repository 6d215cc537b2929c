"""Rollout engines: what samples turns for the agent loops of the trainer."""
