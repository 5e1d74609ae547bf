"""How payload bytes get from a store to a receiver's host."""

from weight_sync.transports.base import Fetched, Transport
from weight_sync.transports.file import FileTransport

__all__ = ["Fetched", "FileTransport", "Transport"]
