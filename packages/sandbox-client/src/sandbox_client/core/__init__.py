"""Decisions of the sandbox service: no I/O, no clock, no randomness."""
