"""Several transports in the order in which they are tried."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import StoreFull, TransportUnavailable, WeightSyncError
from weight_sync.transports.base import Fetched, Transport

logger = logging.getLogger(__name__)


class FirstThatWorks:
    """Tries each transport in turn; raises the last one's error if none works.

    A full disk here is nobody else's fault and is raised at once.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        on_fetched: Callable[[Transport, float], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use these transports.

        Args:
            transports: at least one.
            on_fetched: told which transport brought a payload, and in how many seconds.
            clock: for durations.
        """
        if not transports:
            raise ValueError("expected at least one transport, found none")
        self._transports = tuple(transports)
        self._on_fetched = on_fetched
        self._clock = clock

    def read_manifest(self, uri: str) -> Manifest:
        """Read it from the first that has it."""
        for transport in self._transports[:-1]:
            try:
                return transport.read_manifest(uri)
            except (WeightSyncError, ValueError, OSError) as error:
                _told(transport, error)
        return self._transports[-1].read_manifest(uri)

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Fetch it from the first that has it."""
        for transport in self._transports[:-1]:
            try:
                return self._fetch(transport, manifest_uri, payload, into, read)
            except StoreFull:
                raise
            except (WeightSyncError, ValueError, OSError) as error:
                _told(transport, error)
                into.unlink(missing_ok=True)
        return self._fetch(self._transports[-1], manifest_uri, payload, into, read)

    def _fetch(
        self,
        transport: Transport,
        manifest_uri: str,
        payload: PayloadFile,
        into: Path,
        read: bool,
    ) -> Fetched:
        began_s = self._clock()
        fetched = transport.fetch(manifest_uri, payload, into, read=read)
        if self._on_fetched is not None:
            self._on_fetched(transport, self._clock() - began_s)
        return fetched


def _told(transport: Transport, error: Exception) -> None:
    # A store that this host does not see is a matter of configuration, told once a version.
    level = logging.DEBUG if isinstance(error, TransportUnavailable) else logging.INFO
    logger.log(level, "%s: %s; trying the next transport", type(transport).__name__, error)
