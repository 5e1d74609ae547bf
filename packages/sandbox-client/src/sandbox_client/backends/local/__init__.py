"""Sandboxes made of Linux namespaces on this host."""
