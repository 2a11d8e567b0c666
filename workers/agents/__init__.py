"""Trajectories of several turns: users' rollout functions, sessions that record what was drawn, the gateway."""
