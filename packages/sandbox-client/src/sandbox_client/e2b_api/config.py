"""Settings of the E2B-compatible endpoint."""

from pathlib import Path
from typing import Annotated, Self

import pydantic
from service_kit.addresses import is_loopback, split_host_port
from service_kit.config import Config
from service_kit.server import MIB

__all__ = ["E2BApiConfig", "E2BTemplateConfig"]

_Positive = Annotated[float, pydantic.Field(gt=0)]

HOME = "/home/user"
"""Where E2B's sandboxes have their user's files."""


class E2BTemplateConfig(Config):
    """What sandboxes of one template start from; with no source, an empty work folder."""

    tree_digest: str = ""
    """Digest of a folder tree that was put into the service."""

    image: str = ""
    """Container image, for back-ends that take one."""

    template: str = ""
    """Template of the back-end's own."""

    workdir: str = HOME
    """Where the tree appears, commands start and relative paths begin."""

    env: dict[str, str] = pydantic.Field(default_factory=dict)
    """Variables of every command."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if sum(map(bool, (self.tree_digest, self.image, self.template))) > 1:
            raise ValueError("set at most one of tree_digest, image and template")
        return self


BASE_TEMPLATE = E2BTemplateConfig(env={"HOME": HOME})


class E2BApiConfig(Config):
    """An endpoint for E2B's SDK over this service's sandboxes. Needs the extra `e2b-api`."""

    bind: str = ""
    """`host:port`; port 0 takes a free one, empty serves no such endpoint. An address that other
    machines can reach needs TLS and an API key."""

    api_key: pydantic.SecretStr | None = None
    """Key that the SDK must send (`E2B_API_KEY`); without one any is taken. Prefer a file."""

    api_key_file: Path | None = None
    """File that holds the key."""

    tls_certificate: Path | None = None
    """PEM file with the certificate chain."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key."""

    address_file: Path | None = None
    """Written with the endpoint's URL once it serves; helps with port 0."""

    templates: dict[str, E2BTemplateConfig] = pydantic.Field(default_factory=dict)
    """Templates by name. `base`, the SDK's default, is an empty `/home/user` unless given here."""

    base_images: dict[str, str] = pydantic.Field(default_factory=dict)
    """Images that a template may be built from, each with the template that stands in for it
    (`*` for all others). No image is ever pulled; without an entry such a build is refused."""

    users: tuple[str, ...] = ("user",)
    """Names under which the SDK may run commands and touch files. All of them mean the sandbox's
    one user: add `root` only for programs that can do without its rights."""

    login_shell: bool = False
    """Run commands by `bash -l`, as E2B does. Profiles take up to a second; without them the
    environment is the sandbox's prepared one."""

    network: bool = False
    """Network of sandboxes whose creator does not say. E2B's default is to have one."""

    default_timeout_s: _Positive = 300.0
    """Life of a sandbox whose creator does not say. The longest is `lease.max_s`."""

    upload_bytes: int = pydantic.Field(default=256 * MIB, ge=MIB)
    """Largest body of an upload. Above 1 MiB it is kept on disk meanwhile."""

    message_bytes: int = pydantic.Field(default=4 * MIB, ge=1024)
    """Largest body or message of any other call."""

    listing_bytes: int = pydantic.Field(default=8 * MIB, ge=1024)
    """Largest listing of a folder."""

    backlog_bytes: int = pydantic.Field(default=MIB, ge=1024)
    """Output of a command that a slow reader may leave waiting before the command has to."""

    connections: int = pydantic.Field(default=2048, ge=1)
    """Requests at once, streams included. Above it they are answered 503."""

    processes: int = pydantic.Field(default=256, ge=1)
    """Commands of one sandbox at once."""

    builds: int = pydantic.Field(default=64, ge=1)
    """Builds of templates remembered, waiting and ended ones included. The templates themselves
    are snapshots and count against `limits.snapshots`."""

    idle_timeout_s: _Positive = 60.0
    """Longest silence while a body is awaited."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("set api_key or api_key_file, not both")
        if not self.bind:
            return self
        split_host_port(self.bind)
        secured = self.tls_certificate and (self.api_key or self.api_key_file)
        if not is_loopback(self.bind) and not secured:
            raise ValueError(
                f"bind {self.bind!r} can be reached from other machines and needs api_key_file, "
                "tls_certificate and tls_key; or bind to 127.0.0.1"
            )
        return self
