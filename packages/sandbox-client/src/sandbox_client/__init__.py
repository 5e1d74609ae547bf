"""Isolated sandboxes for coding agents behind one gRPC contract."""
