"""Noting which module imports which. Imports nothing itself, so that nothing goes unnoticed."""

import builtins
import sys

__all__ = ["Recorder"]


class Recorder:
    """Stands in for `__import__` from its making until `stop`."""

    def __init__(self) -> None:
        self.edges: dict[str, set[str]] = {}
        """Importing module -> what it imports, packages above included."""
        self._real_import = builtins.__import__
        builtins.__import__ = self._record

    def stop(self) -> None:
        """Puts the real function back."""
        builtins.__import__ = self._real_import

    def _record(self, name, globals_=None, locals_=None, fromlist=(), level=0):  # type: ignore[no-untyped-def]
        module = self._real_import(name, globals_, locals_, fromlist, level)
        importer = (globals_ or {}).get("__spec__")
        # Only what comes with the module itself: an import in a function may never happen.
        if importer is None or not getattr(importer, "_initializing", False):
            return module
        edges = self.edges.setdefault(importer.name, set())
        if level == 0:
            parts = name.split(".")
            edges.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        base = module.__name__ if fromlist or level else name
        edges.add(base)
        edges.update(f"{base}.{part}" for part in fromlist or () if f"{base}.{part}" in sys.modules)
        return module
