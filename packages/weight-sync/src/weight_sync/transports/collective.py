"""Payloads by broadcast: from the publisher's host to every receiver at once, over gloo or NCCL.

The publisher offers each file of a new version; receivers that come within `join_s` form a group
with it, the others take another transport. The group is formed anew for each file, so members may
come and go; one that dies fails the group, and nobody waits longer than `timeout_s`.
"""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from weight_sync.config import CollectiveConfig
from weight_sync.core.manifest import Manifest, PayloadFile
from weight_sync.errors import ChecksumMismatch, NotOffered, TransportFailed
from weight_sync.stores.folder import path_of
from weight_sync.transports.base import Fetched
from weight_sync.transports.worker import CollectiveWorker

logger = logging.getLogger(__name__)


def key_of(manifest_uri: str, payload: PayloadFile) -> str:
    """Return a file's name in the store where members meet: run, version, file."""
    return "/".join([*manifest_uri.split("/")[-3:-1], payload.name])


class CollectiveTransport:
    """Receives what a `CollectiveSender` offers."""

    def __init__(self, settings: CollectiveConfig) -> None:
        """Start the worker.

        Raises:
            TransportUnavailable: torch is not installed.
        """
        self._worker = CollectiveWorker(settings)
        self._worker.start()

    def read_manifest(self, uri: str) -> Manifest:
        """Refuse: only payloads are broadcast.

        Raises:
            PayloadMissing: always; another transport has it.
        """
        raise NotOffered(f"{uri}: manifests are not broadcast")

    def fetch(
        self, manifest_uri: str, payload: PayloadFile, into: Path, *, read: bool = False
    ) -> Fetched:
        """Take part in the broadcast of a payload.

        Raises:
            PayloadMissing: it is not offered, or this host came too late.
            TransportFailed: the group failed.
            ChecksumMismatch: other bytes arrived.
        """
        if payload.size_bytes == 0:
            into.touch()
            return Fetched(into, 0)
        settings = self._worker.settings
        try:
            answer = self._worker.call(
                "receive",
                timeout_s=settings.timeout_s,
                key=key_of(manifest_uri, payload),
                path=str(into),
                size_bytes=payload.size_bytes,
            )
        except (NotOffered, TransportFailed):
            into.unlink(missing_ok=True)
            raise
        if answer["checksum"] != payload.checksum:
            into.unlink()
            raise ChecksumMismatch(
                f"{payload.name} by broadcast: expected checksum {payload.checksum}, found "
                f"{answer['checksum']}. Fetch it again"
            )
        return Fetched(into, payload.size_bytes)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


class CollectiveSender:
    """The publisher's side. Give it to `Publisher.acquire` as `sender`.

    A version is broadcast in a thread while the trainer goes on; one that comes before the last is
    through waits for it. Failures are logged: receivers have other transports.
    """

    def __init__(self, settings: CollectiveConfig, *, expected: int) -> None:
        """Make a sender.

        Args:
            settings: the receivers' own.
            expected: receivers to wait for, at most `join_s`.
        """
        self._expected = expected
        self._worker = CollectiveWorker(settings)
        self._worker.start()
        self._serving = False
        self._threads: list[threading.Thread] = []
        self.delivered: dict[str, int] = {}
        """By the file's key: how many receivers acknowledged all of it."""

    def open(self, manifest_uri: str, manifest: Manifest) -> None:
        """Say that a version's files will be offered; before it is announced."""
        timeout_s = self._worker.settings.timeout_s
        with suppress(TransportFailed):
            for payload in manifest.payloads:
                if not self._serving:
                    self._worker.call("serve", timeout_s=timeout_s)
                    self._serving = True
                self._worker.call("open", timeout_s=timeout_s, key=key_of(manifest_uri, payload))
            return
        self._serving = False
        logger.warning("version %d is not offered by broadcast", manifest.version.number)

    def start(self, manifest_uri: str, manifest: Manifest) -> None:
        """Offer the files in a thread; after the version was announced."""
        thread = threading.Thread(target=self._offer, args=(manifest_uri, manifest), daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until what was started is over."""
        for thread in self._threads:
            thread.join(timeout_s)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _offer(self, manifest_uri: str, manifest: Manifest) -> None:
        folder = path_of(manifest_uri).parent
        for payload in manifest.payloads:
            if payload.size_bytes == 0:
                continue
            key = key_of(manifest_uri, payload)
            try:
                answer = self._worker.call(
                    "offer",
                    timeout_s=self._worker.settings.timeout_s,
                    key=key,
                    path=str(folder / payload.name),
                    expected=self._expected,
                )
            except TransportFailed as error:
                # The store died with the worker: the next version opens another.
                self._serving = False
                logger.warning("broadcast of %s failed: %s", key, error)
                return
            self.delivered[key] = answer["delivered"]
