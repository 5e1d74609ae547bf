"""Whole models from other receivers, for a host that joins late.

A receiver's verified copy spares the newcomer the anchor and every delta after it, and the store
the load of a fleet that grows. A peer is believed as little as a disk: each piece carries a
checksum, and the caller compares every tensor with the manifest.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from service_kit.channel import Channel, ChannelConfig, open_channel
from service_kit.errors import ServiceError
from tailrace.weight_sync.v1 import file_service_pb2

from weight_sync.client import WeightClient
from weight_sync.core.registry import NodeView, peers_with
from weight_sync.errors import WeightSyncError
from weight_sync.files import COPY
from weight_sync.transports.remote import RemoteFiles
from weight_sync.types import AnnouncedVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PeerModels:
    """Asks the registry who has a copy, and fetches it from one of them. Call from threads."""

    def __init__(
        self,
        client: WeightClient,
        channel: ChannelConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        own_host: str,
        call_timeout_s: float,
        idle_timeout_s: float,
        most_peers: int = 3,
        shuffle: Callable[[list[str]], None] = random.shuffle,
    ) -> None:
        """Ask through `client`, whose channel belongs to `loop`.

        Args:
            client: to the WeightService.
            channel: how to reach peers: TLS and token as for the service; the target is replaced.
            loop: runs the calls.
            own_host: this receiver's, which is no peer.
            call_timeout_s: of unary calls.
            idle_timeout_s: longest silence of a peer.
            most_peers: tries so many before it gives up.
            shuffle: spreads newcomers over peers.
        """
        self._client = client
        self._channel = channel
        self._loop = loop
        self._own_host = own_host
        self._call_timeout_s = call_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._most_peers = most_peers
        self._shuffle = shuffle

    def fetch_model(self, announced: AnnouncedVersion, into: Path) -> Sequence[Path]:
        """Fetch the model files of a version from the first peer that hands over all of them."""
        number = announced.version.number
        try:
            nodes = self._nodes()
        except ServiceError as error:
            logger.warning("could not ask for peers: %s", error)
            return []
        targets = peers_with(nodes, number, own_host=self._own_host)
        self._shuffle(targets)
        for target in targets[: self._most_peers]:
            try:
                return self._fetch(target, announced, into)
            except (WeightSyncError, OSError) as error:
                logger.warning("peer %s: %s; trying another source", target, error)
                for path in into.glob("*.safetensors"):
                    path.unlink()
        return []

    def _nodes(self) -> Sequence[NodeView]:
        return self._wait(self._client.list_nodes(timeout_s=self._call_timeout_s)).nodes

    def _fetch(self, target: str, announced: AnnouncedVersion, into: Path) -> list[Path]:
        version = announced.version
        config = self._channel.model_copy(update={"target": target})

        async def opened() -> Channel:
            # A channel belongs to the loop that opens it.
            return open_channel(config, contracts=[file_service_pb2.DESCRIPTOR])

        channel = self._wait(opened())
        try:
            files = RemoteFiles(
                channel,
                self._loop,
                where=target,
                call_timeout_s=self._call_timeout_s,
                idle_timeout_s=self._idle_timeout_s,
            )
            fetched = []
            for file in files.files(version.run, version.number):
                if file.name.startswith(COPY):
                    path = into / Path(file.name).name
                    files.fetch(version.run, version.number, file, path)
                    fetched.append(path)
            return fetched
        finally:
            self._wait(channel.close())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
