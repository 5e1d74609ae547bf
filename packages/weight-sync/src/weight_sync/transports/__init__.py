"""How payload bytes get from a publisher to a receiver's host."""

from weight_sync.transports.base import Fetched, ModelSource, Transport
from weight_sync.transports.fallback import FirstThatWorks
from weight_sync.transports.file import FileTransport
from weight_sync.transports.store import StoreTransport

__all__ = [
    "Fetched",
    "FileTransport",
    "FirstThatWorks",
    "ModelSource",
    "StoreTransport",
    "Transport",
]
