"""Decisions as values: no I/O, no clock, no randomness, no protobuf."""
