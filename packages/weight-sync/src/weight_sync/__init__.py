"""Publishes policy versions to inference engines: an engine that reports v holds exactly v."""
