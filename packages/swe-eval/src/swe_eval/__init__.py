"""Coding tasks, honest grading and pass@k with error bars."""
