"""Decisions of the trainer, free of I/O, clocks, hidden randomness and torch."""
