"""Settings of the back-end `e2b`."""

from pathlib import Path
from typing import Annotated, Self

import pydantic
from service_kit.config import Config

__all__ = ["E2BConfig"]

_Positive = Annotated[float, pydantic.Field(gt=0)]


class E2BConfig(Config):
    """Back-end `e2b`: sandboxes at E2B, or at any endpoint with its API. Needs the extra `e2b`.

    What is unset here the SDK takes from its own variables (`E2B_API_KEY`, `E2B_DOMAIN`).
    """

    api_key: pydantic.SecretStr | None = None
    """Key of the E2B account. Prefer `api_key_file`."""

    api_key_file: Path | None = None
    """File that holds the key."""

    domain: str = ""
    """Domain of an E2B deployment of one's own."""

    api_url: str = ""
    """Another address of the REST API."""

    sandbox_url: str = ""
    """Another address of what runs inside the sandboxes."""

    user: str = "user"
    """User that commands run as, inside."""

    admin_user: str = "root"
    """User that sandboxes are looked at as: its programs see files that commands have closed, and
    commands without its rights can neither stop nor bend them."""

    python: str = "python3"
    """Python 3.7 or later inside the sandboxes, by which commands and files are handled."""

    base_template: str = "base"
    """Template that trees are put on."""

    base_image: str = ""
    """Image that trees are put on instead."""

    cpus: int = pydantic.Field(default=2, ge=1)
    """Cores of the templates that are built here; more if a sandbox asks for more."""

    memory_mb: int = pydantic.Field(default=4096, ge=128)
    """Memory of the templates that are built here; more if a sandbox asks for more."""

    template_prefix: str = pydantic.Field(default="tailrace", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Begin of the names of built templates; the digest of their recipe follows."""

    build_wait_s: _Positive = 40.0
    """How long a create waits for its template. The build goes on; a later create finds it."""

    build_timeout_s: _Positive = 1800.0
    """Longest time that a build may take."""

    concurrent_builds: int = pydantic.Field(default=4, ge=1)
    """Templates being built at once."""

    creates_per_s: float = pydantic.Field(default=0.0, ge=0)
    """Sandboxes asked for a second in the long run; 0 is no limit. Above it creating is refused."""

    create_burst: int = pydantic.Field(default=32, ge=1)
    """Creates at once while `creates_per_s` holds on average."""

    retries: int = pydantic.Field(default=3, ge=0)
    """Tries after E2B has refused a call for the moment. The SDK waits as `Retry-After` says."""

    retry_after_s: _Positive = 5.0
    """How long no sandbox is asked for after E2B's rate limit has outlasted those tries."""

    request_timeout_s: _Positive = 60.0
    """Longest time of a single request, its tries included."""

    sandbox_timeout_s: int = pydantic.Field(default=300, ge=10)
    """After this time without a word of the service E2B itself ends a sandbox. It is renewed at a
    third of it."""

    reattach: bool = True
    """Take over the sandboxes that an earlier run of this service left; otherwise end them."""

    snapshot_memory: bool = False
    """Keep processes in snapshots as well: they start faster then, with whatever ran in them."""

    writable: tuple[str, ...] = ("/tmp", "/logs", "/tests", "/solution")  # noqa: S108 -- inside the sandbox
    """Folders that commands may rely on beside the work folder."""

    diff_exclude: tuple[str, ...] = (".git", "__pycache__", "*.pyc", ".pytest_cache")
    """Names (with wildcards) of files and folders that a diff leaves out."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("set api_key or api_key_file, not both")
        return self
