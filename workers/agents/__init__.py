"""Rollouts of several turns: what users' agents call, and the exact tokens of what they do."""
