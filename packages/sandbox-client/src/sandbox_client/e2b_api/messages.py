"""The bodies that the SDK sends, checked. Names are those on the wire."""

from typing import Annotated, TypeVar

import pydantic

from sandbox_client.e2b_api.errors import ApiError, EnvdError

__all__ = [
    "BuildStart",
    "ConnectSandbox",
    "ForkSandbox",
    "ListDir",
    "Move",
    "NewSandbox",
    "NewSnapshot",
    "NewTemplate",
    "PathRequest",
    "PauseSandbox",
    "ProcessConfig",
    "Selector",
    "SendInput",
    "SendSignal",
    "SetTimeout",
    "StartProcess",
    "StreamInput",
    "api_body",
    "envd_message",
]

_Timeout = Annotated[int, pydantic.Field(ge=0)]
_Name = Annotated[str, pydantic.Field(min_length=1, max_length=255)]


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)


# -- the REST API


class AutoResume(_Body):
    """Whether a paused sandbox resumes when it is used."""

    enabled: bool = False


class NewSandbox(_Body):
    """`POST /v2/sandboxes`."""

    templateID: _Name  # noqa: N815
    timeout: _Timeout | None = None
    metadata: dict[str, str] = pydantic.Field(default_factory=dict)
    envVars: dict[str, str] = pydantic.Field(default_factory=dict)  # noqa: N815
    allow_internet_access: bool | None = None
    autoPause: bool = False  # noqa: N815
    autoResume: AutoResume = AutoResume()  # noqa: N815
    network: dict[str, object] | None = None
    mcp: dict[str, object] | None = None
    iam: dict[str, object] | None = None
    volumeMounts: list[object] | None = None  # noqa: N815


class SetTimeout(_Body):
    """`POST /sandboxes/{id}/timeout`."""

    timeout: _Timeout


class ConnectSandbox(_Body):
    """`POST /v2/sandboxes/{id}/connect`. `memory` false: resume without what was in memory."""

    timeout: _Timeout | None = None
    memory: bool = True


class PauseSandbox(_Body):
    """`POST /sandboxes/{id}/pause`. `memory` false: keep the files alone."""

    memory: bool = True


class NewSnapshot(_Body):
    """`POST /sandboxes/{id}/snapshots`. `memory` true asks for the processes as well."""

    name: str = pydantic.Field(default="", max_length=255)
    memory: bool | None = None


class ForkSandbox(_Body):
    """`POST /sandboxes/{id}/fork`."""

    timeout: _Timeout | None = None
    count: int = pydantic.Field(default=1, ge=1, le=20)


class NewTemplate(_Body):
    """`POST /v3/templates`."""

    name: _Name
    tags: list[str] = pydantic.Field(default_factory=list)
    cpuCount: int | None = pydantic.Field(default=None, ge=1)  # noqa: N815
    memoryMB: int | None = pydantic.Field(default=None, ge=1)  # noqa: N815


class BuildStep(_Body):
    """One instruction of a template: COPY, ENV, RUN, USER or WORKDIR."""

    type: str
    args: list[str] = pydantic.Field(default_factory=list)
    filesHash: str = ""  # noqa: N815


class BuildStart(_Body):
    """`POST /v2/templates/{id}/builds/{id}`."""

    fromImage: str = ""  # noqa: N815
    fromTemplate: str = ""  # noqa: N815
    steps: list[BuildStep] = pydantic.Field(default_factory=list, max_length=1000)
    startCmd: str = ""  # noqa: N815


# -- envd, `process.Process`


class ProcessConfig(_Body):
    """What to run."""

    cmd: str
    args: list[str] = pydantic.Field(default_factory=list)
    envs: dict[str, str] = pydantic.Field(default_factory=dict)
    cwd: str = ""


class StartProcess(_Body):
    """`Start`. Standard input is open unless it is refused."""

    process: ProcessConfig
    pty: dict[str, object] | None = None
    tag: str = ""
    stdin: bool = True


class Selector(_Body):
    """A process by its number or by its tag."""

    pid: int | None = None
    tag: str | None = None


class _OnProcess(_Body):
    process: Selector


class ConnectProcess(_OnProcess):
    """`Connect` and `CloseStdin`."""


class SendSignal(_OnProcess):
    """`SendSignal`."""

    signal: str = "SIGNAL_UNSPECIFIED"


class ProcessInput(_Body):
    """Bytes for standard input."""

    stdin: pydantic.Base64Bytes | None = None
    pty: pydantic.Base64Bytes | None = None


class SendInput(_OnProcess):
    """`SendInput`."""

    input: ProcessInput


class _InputData(_Body):
    input: ProcessInput


class StreamInput(_Body):
    """One message of `StreamInput`: which process, then data and signs of life."""

    start: _OnProcess | None = None
    data: _InputData | None = None


# -- envd, `filesystem.Filesystem`


class PathRequest(_Body):
    """`Stat`, `MakeDir` and `Remove`."""

    path: str = ""


class ListDir(_Body):
    """`ListDir`. Depth 0 means 1."""

    path: str = ""
    depth: int = pydantic.Field(default=1, ge=0, le=1000)


class Move(_Body):
    """`Move`."""

    source: str
    destination: str


_M = TypeVar("_M", bound=pydantic.BaseModel)


def api_body(kind: type[_M], data: bytes) -> _M:
    """A REST body; an empty one is an empty object."""
    try:
        return kind.model_validate_json(data or b"{}")
    except pydantic.ValidationError as error:
        raise ApiError(400, _told(error)) from None


def envd_message(kind: type[_M], data: bytes) -> _M:
    """A Connect message; an empty one is an empty object."""
    try:
        return kind.model_validate_json(data or b"{}")
    except pydantic.ValidationError as error:
        raise EnvdError("invalid_argument", _told(error)) from None


def _told(error: pydantic.ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, found['loc'])) or 'body'}: {found['msg']}"
        for found in error.errors(include_url=False, include_input=False)
    )
