"""Packages for sandboxes' own interpreter (`local.site_packages`), taken from this one."""

import compileall
import importlib.util
import shutil
from pathlib import Path

__all__ = ["copy_pytest"]

_PYTEST = ("_pytest", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest")


def copy_pytest(folder: Path) -> None:
    """Copies this interpreter's pytest, without its plug-ins, with byte code as an install has."""
    for name in _PYTEST:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, folder / name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / source.name)
    compileall.compile_dir(folder, quiet=2)
