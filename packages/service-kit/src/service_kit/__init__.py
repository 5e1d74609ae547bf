"""Servers, channels, errors, config and telemetry shared by Tailrace's services."""
