"""Putting a delivered group together again from the pieces of its attempts."""

from __future__ import annotations

from service_kit.errors import DataLoss
from tailrace.rollout.v1 import rollout_service_pb2 as pb

from rollout_engine import wire
from rollout_engine.types import FinishedGroup, GroupKey


class GroupAssembly:
    """The groups of one stream that are on their way.

    Args:
        max_attempt_bytes: Largest serialised attempt that is taken in.

    """

    def __init__(self, max_attempt_bytes: int) -> None:
        self._max_attempt_bytes = max_attempt_bytes
        self._groups: dict[GroupKey, dict[int, _Pieces]] = {}

    def add(self, chunk: pb.AttemptChunk) -> None:
        """Take a piece.

        Raises:
            DataLoss: It does not follow the one before, or the attempt is too large.

        """
        key = GroupKey(chunk.group_id, chunk.assignment_epoch)
        attempts = self._groups.setdefault(key, {})
        attempt = attempts.get(chunk.index)
        if attempt is None:
            if not 0 < chunk.total <= self._max_attempt_bytes:
                raise DataLoss(
                    f"attempt {chunk.index} of group {key} has {chunk.total} bytes; expected 1 to "
                    f"{self._max_attempt_bytes} (max_attempt_bytes)"
                )
            attempt = attempts[chunk.index] = _Pieces(chunk.total)
        attempt.add(chunk)

    def take(self, finished: pb.GroupFinished) -> FinishedGroup:
        """Give a group whose pieces have all come.

        Raises:
            DataLoss: Something is missing or does not match its checksum.

        """
        key = GroupKey(finished.group_id, finished.assignment_epoch)
        pieces = self._groups.pop(key, {})
        if set(pieces) != set(range(finished.attempts)):
            raise DataLoss(
                f"group {key} came with attempts {sorted(pieces)}; expected {finished.attempts}"
            )
        return FinishedGroup(
            key=key,
            task_id=finished.task_id,
            cursor=finished.cursor,
            attempts=tuple(
                wire.attempt_from_bytes(pieces[index].whole(key, index)) for index in sorted(pieces)
            ),
            quarantined=wire.fault_from_proto(finished.quarantined)
            if finished.HasField("quarantined")
            else None,
            faulted_tries=tuple(
                wire.faulted_try_from_proto(faulted) for faulted in finished.faulted_tries
            ),
        )

    def drop(self, key: GroupKey) -> None:
        """Forget a group's pieces."""
        self._groups.pop(key, None)

    def clear(self) -> None:
        """Forget all pieces: the stream has ended."""
        self._groups.clear()


class _Pieces:
    """One attempt's bytes as they come in."""

    def __init__(self, total: int) -> None:
        self._data = bytearray(total)
        self._filled = 0
        self._checksum = 0

    def add(self, chunk: pb.AttemptChunk) -> None:
        end = chunk.offset + len(chunk.data)
        if chunk.offset != self._filled or end > len(self._data) or chunk.total != len(self._data):
            raise DataLoss(
                f"attempt {chunk.index} of group {chunk.group_id}: a piece of {len(chunk.data)} "
                f"bytes at {chunk.offset} of {chunk.total} does not follow {self._filled} of "
                f"{len(self._data)}"
            )
        self._data[chunk.offset : end] = chunk.data
        self._filled = end
        self._checksum = chunk.checksum

    def whole(self, key: GroupKey, index: int) -> bytes:
        if self._filled != len(self._data):
            raise DataLoss(
                f"attempt {index} of group {key} has {self._filled} of {len(self._data)} bytes"
            )
        data = bytes(self._data)
        found = wire.checksum(data)
        if found != self._checksum:
            raise DataLoss(
                f"attempt {index} of group {key} has checksum {found:016x}; "
                f"expected {self._checksum:016x}"
            )
        return data


__all__ = ["GroupAssembly"]
