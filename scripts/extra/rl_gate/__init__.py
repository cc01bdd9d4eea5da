"""A gate for reinforcement learning: is a rollout from the policy? Numpy alone."""
