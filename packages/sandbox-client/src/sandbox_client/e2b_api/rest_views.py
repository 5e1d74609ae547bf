"""Sandboxes and templates as E2B's REST API shows them, and the queries over them. Pure."""

import datetime
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TypeVar

from sandbox_client.e2b_api.catalog import Template
from sandbox_client.e2b_api.errors import ApiError
from sandbox_client.e2b_api.paging import BadCursorError, page
from sandbox_client.e2b_api.sandboxes import ApiSandbox
from sandbox_client.types import SandboxLimits

__all__ = [
    "ENVD_VERSION",
    "created_view",
    "detail_view",
    "listed_view",
    "select_sandboxes",
    "select_snapshots",
    "snapshot_view",
    "timestamp",
]

ENVD_VERSION = "0.5.7"
"""The SDK goes by it: streamed uploads and closing of input are there, metadata of files is not."""

T = TypeVar("T")

_CLIENT = "tailrace"
_MIB = 1 << 20
_MAX_PAGE = 100


def created_view(sandbox: ApiSandbox) -> dict[str, object]:
    """A sandbox for whoever created or connected to it, with the token for envd."""
    return {
        "templateID": sandbox.template.template_id,
        "sandboxID": sandbox.sandbox_id,
        "clientID": _CLIENT,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": sandbox.access_token,
    }


def listed_view(sandbox: ApiSandbox, limits: SandboxLimits) -> dict[str, object]:
    """A sandbox in a listing."""
    names = sandbox.template.names
    return {
        "templateID": sandbox.template.template_id,
        **({"alias": names[0]} if names else {}),
        "sandboxID": sandbox.sandbox_id,
        "clientID": _CLIENT,
        "startedAt": timestamp(sandbox.started_at),
        "endAt": timestamp(sandbox.ends_at),
        "cpuCount": max(1, round(limits.cpus)),
        "memoryMB": limits.memory_bytes // _MIB,
        "diskSizeMB": limits.disk_bytes // _MIB,
        "state": "paused" if sandbox.paused else "running",
        "envdVersion": ENVD_VERSION,
        "metadata": sandbox.metadata,
    }


def detail_view(sandbox: ApiSandbox, limits: SandboxLimits) -> dict[str, object]:
    """One sandbox by itself."""
    return {
        **listed_view(sandbox, limits),
        "allowInternetAccess": sandbox.network,
        "lifecycle": {"autoResume": False, "onTimeout": "kill"},
    }


def snapshot_view(snapshot: Template) -> dict[str, object]:
    """A snapshot."""
    return {"snapshotID": snapshot.template_id, "names": list(snapshot.names)}


def timestamp(seconds: float) -> str:
    """A moment as the API writes it."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def select_sandboxes(
    sandboxes: Sequence[ApiSandbox], query: Mapping[str, str]
) -> tuple[list[ApiSandbox], str]:
    """The page of a listing that a query asks for, and the cursor of the next.

    Raises:
        ApiError: the query has a wrong value.
    """
    wanted = _pairs(query.get("metadata", ""))
    states = [state for state in query.get("state", "").split(",") if state]
    if unknown := set(states) - {"running", "paused"}:
        raise ApiError(400, f"unknown state {sorted(unknown)[0]!r}; expected running or paused")
    template = query.get("template", "")
    since = _seconds(query.get("startedAfter", ""))
    found = [
        ((sandbox.started_at, sandbox.sandbox_id), sandbox)
        for sandbox in sandboxes
        if wanted.items() <= sandbox.metadata.items()
        and (not states or ("paused" if sandbox.paused else "running") in states)
        and (not template or template in (sandbox.template.template_id, *sandbox.template.names))
        and sandbox.started_at >= since
    ]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"unknown order {order!r}; expected asc or desc")
    return _page(found, query, descending=order == "desc")


def select_snapshots(
    snapshots: Sequence[Template], query: Mapping[str, str]
) -> tuple[list[Template], str]:
    """The page of the snapshots that a query asks for, and the cursor of the next."""
    numbered = [((float(at), made.template_id), made) for at, made in enumerate(snapshots)]
    return _page(numbered, query, descending=False)


def _page(
    items: Sequence[tuple[tuple[float, str], T]], query: Mapping[str, str], *, descending: bool
) -> tuple[list[T], str]:
    limit = query.get("limit", str(_MAX_PAGE))
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_PAGE:
        raise ApiError(400, f"limit must be between 1 and {_MAX_PAGE}, found {limit[:20]!r}")
    try:
        return page(
            items, limit=int(limit), cursor=query.get("nextToken", ""), descending=descending
        )
    except BadCursorError as error:
        raise ApiError(400, str(error)) from None


def _pairs(text: str) -> dict[str, str]:
    # The SDK quotes keys and values before it encodes the whole.
    return {
        urllib.parse.unquote(key): urllib.parse.unquote(value)
        for key, value in urllib.parse.parse_qsl(text, keep_blank_values=True)
    }


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ApiError(400, f"startedAfter is no time: {text[:40]!r}") from None
