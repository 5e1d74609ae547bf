"""Standard modules imported beforehand, hidden until a program imports them.

A warm program must not see more in `sys.modules` than a fresh interpreter has, nor get a standard
module where its own folder has one of that name. So the modules lie in a stash; a finder hands a
module out, together with all it had imported itself, when the program asks for it and no folder
that comes before the standard library has any of these names.
"""

import atexit
import os
import sys
import time
from collections.abc import Iterable, Mapping, Set
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["Stash"]


class Stash:
    """The hidden modules. It stands in `sys.meta_path` in a program's process."""

    def __init__(self, baseline: frozenset[str]) -> None:
        self.baseline = baseline
        """Names in `sys.modules` of a fresh interpreter."""
        self._modules: dict[str, ModuleType] = {}
        self._closures: dict[str, frozenset[str]] = {}
        self._last_baseline = ""
        self._logging_at_exit = False

    # -- before: in the fork-server

    def preload(self, names: Iterable[str]) -> None:
        """Imports modules for later; one that this interpreter lacks is left out."""
        for name in names:
            try:
                __import__(name)
            except ImportError:
                continue

    def close(self, imports: Mapping[str, Set[str]], keep_out: Iterable[str]) -> None:
        """Hides all that was imported since the baseline.

        Modules under the names in `keep_out` are hidden too, but not handed out again. Whoever
        runs on holds what it needs; an import in a function gets a stashed module back.
        """
        left_out = tuple(keep_out)
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in self.baseline
            and name.split(".")[0] not in left_out
            and getattr(module, "__spec__", None) is not None
        }
        for name in self._modules:
            self._closures[name] = self._closure(name, imports)
        # Now and not in each program's process: there it would copy every page it touches.
        for name in [name for name in sys.modules if name not in self.baseline]:
            del sys.modules[name]
        self._last_baseline = next(reversed(sys.modules))
        if atexit._ncallbacks() == 1 and "logging" in self._modules:
            # It is logging's; see below.
            atexit._clear()
            self._logging_at_exit = True
        sys.meta_path.insert(0, self)

    def _closure(self, name: str, imports: Mapping[str, Set[str]]) -> frozenset[str]:
        found: set[str] = set()
        todo = [name]
        while todo:
            current = todo.pop()
            if current in found or current not in self._modules:
                continue
            found.add(current)
            todo.extend(imports.get(current, ()))
            if "." in current:
                todo.append(current.rpartition(".")[0])
        return frozenset(found)

    # -- after: in a program's process

    def added(self) -> list[str]:
        """Names that have come into `sys.modules` since, latest first, without `__main__`.

        Only these are looked at: every object that is touched is a page to be copied.
        """
        names = []
        for name in reversed(sys.modules):
            if name == self._last_baseline:
                break
            if name != "__main__":
                names.append(name)
        return names

    def is_own(self, name: str) -> bool:
        """Whether the module of this name is the interpreter's own and not the program's."""
        return self._modules.get(name) is sys.modules[name]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds a stashed module, unless the program has its own of a name it needs."""
        module = self._modules.get(name)
        if module is None:
            return None
        parent = name.rpartition(".")[0]
        if parent and sys.modules.get(parent) is not self._modules.get(parent):
            return None
        missing = self._closures[name] - sys.modules.keys()
        if any(sys.modules[n] is not self._modules[n] for n in self._closures[name] - missing):
            return None
        if any(self._is_shadowed(n) for n in missing & self._names_before_standard_ones()):
            return None
        for needed in missing:
            self._catch_up(needed, self._modules[needed])
            if needed != name:
                sys.modules[needed] = self._modules[needed]
        is_package = hasattr(module, "__path__")
        return ModuleSpec(name, _Given(module), is_package=is_package)  # type: ignore[arg-type]

    def _catch_up(self, name: str, module: ModuleType) -> None:
        """Does what the module's import, or a fork that it knows of, would have done just now."""
        known: Any = module
        if name == "random":
            known.seed()
        elif name == "threading":
            known._after_fork()
        elif name == "logging":
            known._startTime = time.time()
            if self._logging_at_exit:
                atexit.register(known.shutdown)

    def _folders_before_standard_ones(self) -> list[str]:
        before = []
        for entry in sys.path:
            if entry in _standard_folders():
                break
            before.append(entry)
        return before

    def _names_before_standard_ones(self) -> set[str]:
        """What the program's own folders might shadow, by a look at their listings."""
        names: set[str] = set()
        for folder in self._folders_before_standard_ones():
            try:
                names.update(entry.partition(".")[0] for entry in os.listdir(folder or "."))  # noqa: PTH208
            except OSError:
                names.update(self._modules)  # an archive, or nothing: ask the real finders
        return names

    def _is_shadowed(self, name: str) -> bool:
        spec = PathFinder.find_spec(name, self._folders_before_standard_ones())
        # A mere folder of that name gives way to a real module further on.
        return spec is not None and spec.loader is not None


class _Given:
    """Loader of a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_folders: list[str] = []


def _standard_folders() -> list[str]:
    if not _folders:
        base = f"{sys.base_prefix}/{sys.platlibdir}/python"
        major, minor = sys.version_info[:2]
        _folders.extend([f"{base}{major}{minor}.zip", f"{base}{major}.{minor}"])
    return _folders
