"""Publishes policy versions to inference engines: an engine that reports v holds exactly v.

A trainer publishes, a receiver on each host brings its engines up to date:

    import numpy as np
    from service_kit.channel import ChannelConfig, open_channel
    from weight_sync import Publisher, RawTensor

    async with open_channel(ChannelConfig(target="127.0.0.1:7103")) as channel:
        publisher = await Publisher.acquire(channel, run="my-run")
        weights = {"w": np.zeros((2, 3), np.float32), "b": RawTensor(bf16_bits, "BF16")}
        version = await publisher.publish(weights, step=1)
"""

from weight_sync.client import Awaited, WeightClient
from weight_sync.config import CollectiveConfig
from weight_sync.core.manifest import Manifest, PayloadFile, PolicyVersion, TensorEntry
from weight_sync.core.shards import ShardTicket, assign_owners
from weight_sync.errors import WeightSyncError
from weight_sync.publisher import PublishConfig, Published, Publisher, RawTensor
from weight_sync.sharded import ShardWriter
from weight_sync.stores import FolderStore, open_store
from weight_sync.transports.collective import CollectiveSender
from weight_sync.types import (
    AnnouncedVersion,
    EngineEndpoint,
    EngineReport,
    Nodes,
    NodeView,
)

__all__ = [
    "AnnouncedVersion",
    "Awaited",
    "CollectiveConfig",
    "CollectiveSender",
    "EngineEndpoint",
    "EngineReport",
    "FolderStore",
    "Manifest",
    "NodeView",
    "Nodes",
    "PayloadFile",
    "PolicyVersion",
    "PublishConfig",
    "Published",
    "Publisher",
    "RawTensor",
    "ShardTicket",
    "ShardWriter",
    "TensorEntry",
    "WeightClient",
    "WeightSyncError",
    "assign_owners",
    "open_store",
]
