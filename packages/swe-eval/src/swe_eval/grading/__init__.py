"""Grading: an agent's diff and the hidden tests meet in a fresh sandbox, and nowhere else."""
