"""Who scores a rollout, where the environment's own score does not do: reward functions and reward managers."""
