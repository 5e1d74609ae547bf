"""Decisions: pure functions of their arguments, without I/O, clock or hidden randomness."""
