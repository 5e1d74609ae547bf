"""Sandboxes made of containers of a dockerd on this host."""
