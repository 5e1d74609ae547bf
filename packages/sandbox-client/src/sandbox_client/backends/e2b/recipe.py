"""What a template is built from, and the name that says so. Pure."""

import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["ARCHIVE", "DOCKERFILE", "Recipe", "template_size"]

DOCKERFILE = ".tailrace/Dockerfile"
"""A tree that holds this file is the build context of that Dockerfile."""
ARCHIVE = "environment.tar"
"""Name of the tree's archive among the files of a build."""
_FORMAT = 1
_DIGEST_CHARS = 40
_MIB = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """A template's recipe. The same recipe gives the same name, on every host."""

    tree_digest: str = ""
    dockerfile: bool = False
    """The tree is the context of the Dockerfile in it."""
    image: str = ""
    """Image to start from."""
    base_template: str = ""
    """Template to start from."""
    workdir: str = ""
    folders: tuple[str, ...] = ()
    """Folders that must be there, the work folder among them."""
    user: str = ""
    """Whom they belong to."""
    admin_user: str = ""
    """Who puts them there."""
    cpus: int = 0
    memory_mb: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 over all that the template depends on."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def name(self, prefix: str) -> str:
        """The template's name."""
        return f"{prefix}-{self.digest[:_DIGEST_CHARS]}"

    def commands(self) -> Sequence[str]:
        """What the administrator runs in the build, the tree's archive lying at `/tmp/ARCHIVE`."""
        folders = " ".join(map(shlex.quote, self.folders))
        steps = [f"mkdir -p {folders}"]
        if self.tree_digest and not self.dockerfile:
            archive = f"/tmp/{ARCHIVE}"  # noqa: S108 -- inside the sandbox
            steps.append(f"tar -xf {archive} -C {shlex.quote(self.workdir)}")
            steps.append(f"rm -f {archive}")
        if self.admin_user != self.user:
            steps.append(f"chown -R {shlex.quote(self.user + ':')} {folders}")
        return steps


def template_size(least: tuple[int, int], cpus: float, memory_bytes: int) -> tuple[int, int]:
    """Cores and MiB of memory of a template for sandboxes that ask for so much.

    Whole cores and an even number of MiB, as E2B takes them, and never less than `least`.
    """
    mib = math.ceil(memory_bytes / _MIB / 2) * 2
    return max(least[0], math.ceil(cpus)), max(least[1], mib)
