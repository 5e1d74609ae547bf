"""A request's sandbox and user: who may do what where in it."""

import base64
import binascii
import hmac
import posixpath
from dataclasses import dataclass

from starlette.requests import Request

from sandbox_client.core.paths import PathRefusedError, normalize
from sandbox_client.e2b_api.config import E2BApiConfig
from sandbox_client.e2b_api.errors import ApiError, EnvdError, gone
from sandbox_client.e2b_api.sandboxes import ApiSandbox, Sandboxes
from sandbox_client.types import ExecResult

__all__ = ["Guest", "addressed", "admit"]


@dataclass(frozen=True)
class Guest:
    """A caller who may work in a sandbox."""

    sandbox: ApiSandbox
    sandboxes: Sandboxes

    def resolve(self, path: str) -> str:
        """The absolute path that a caller means.

        Relative ones begin in the work folder, `~` is the home.

        Raises:
            EnvdError: it leaves the root, or is no path.
        """
        if path == "~" or path.startswith("~/"):
            path = self.sandbox.home + path[1:]
        try:
            return normalize(posixpath.join(self.sandbox.workdir, path), base="/")
        except PathRefusedError as error:
            raise EnvdError("invalid_argument", str(error)) from None

    async def run(self, *argv: str) -> ExecResult:
        """Runs a helper with the sandbox user's rights."""
        return await self.sandboxes.run(self.sandbox, argv)


def addressed(request: Request) -> str:
    """The sandbox that a call to envd is meant for.

    Raises:
        ApiError: the call does not say.
    """
    sandbox_id = request.headers.get("e2b-sandbox-id", "")
    if not sandbox_id:
        raise ApiError(
            400,
            "the header E2b-Sandbox-Id is missing; set E2B_SANDBOX_URL to this endpoint's address",
        )
    if request.headers.get("e2b-sandbox-port", "49983") != "49983":
        raise gone(sandbox_id)
    return sandbox_id


def admit(request: Request, sandboxes: Sandboxes, settings: E2BApiConfig) -> Guest:
    """The caller's access to the sandbox that it names.

    Raises:
        GoneError: the sandbox does not run.
        EnvdError: the access token or the user is wrong.
    """
    sandbox = sandboxes.running(addressed(request))
    token = request.headers.get("x-access-token", "")
    if not hmac.compare_digest(token.encode(), sandbox.access_token.encode()):
        raise EnvdError("unauthenticated", "X-Access-Token is not the one of this sandbox")
    user = request.query_params.get("username") or _basic_user(request)
    if user and user not in settings.users:
        raise EnvdError(
            "unauthenticated",
            f"invalid username: '{user}'; this endpoint knows {', '.join(settings.users)} "
            "(e2b_api.users)",
        )
    return Guest(sandbox, sandboxes)


def _basic_user(request: Request) -> str:
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise EnvdError("unauthenticated", "the Authorization header is unreadable") from None
