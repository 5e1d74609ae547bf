"""Closed sets to and from the generated enums, by name. Part of the edge to protobuf."""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

from service_kit.errors import InvalidArgument
from tailrace.common.v1 import outcome_pb2
from tailrace.rollout.v1 import rollout_service_pb2 as pb

from rollout_engine.ledger.rows import GroupStanding
from rollout_engine.types import Decision, FaultCause, FaultStage, LimitKind, Outcome, Purpose

M = TypeVar("M", bound=enum.StrEnum)
N = TypeVar("N", bound=int)


class _Generated(Protocol[N]):
    def items(self) -> list[tuple[str, N]]: ...


class EnumCodec(Generic[M, N]):
    """Translates between a closed set of ours and a generated enum, by name."""

    def __init__(self, members: type[M], generated: _Generated[N], prefix: str) -> None:
        numbers = dict(generated.items())
        self._name = members.__name__
        self._unspecified = numbers[prefix + "UNSPECIFIED"]
        self._numbers = {member: numbers[prefix + member.value] for member in members}
        self._members = {number: member for member, number in self._numbers.items()}

    def to_proto(self, member: M | None) -> N:
        """Give the generated number; None is the unspecified one."""
        return self._unspecified if member is None else self._numbers[member]

    def from_proto(self, number: N) -> M:
        """Give the member; an unspecified or unknown number is malformed."""
        member = self.optional(number)
        if member is None:
            raise InvalidArgument(
                f"{self._name} is unset; expected one of {', '.join(self._numbers)}"
            )
        return member

    def optional(self, number: N) -> M | None:
        """Give the member, or None for the unspecified number."""
        if number == self._unspecified:
            return None
        member = self._members.get(number)
        if member is None:
            raise InvalidArgument(
                f"{self._name} {number} is unknown; is the peer of a newer version?"
            )
        return member


PURPOSES = EnumCodec(Purpose, pb.Purpose, "PURPOSE_")
OUTCOMES = EnumCodec(Outcome, outcome_pb2.Outcome, "OUTCOME_")
LIMIT_KINDS = EnumCodec(LimitKind, outcome_pb2.LimitKind, "LIMIT_KIND_")
FAULT_STAGES = EnumCodec(FaultStage, outcome_pb2.FaultStage, "FAULT_STAGE_")
FAULT_CAUSES = EnumCodec(FaultCause, outcome_pb2.FaultCause, "FAULT_CAUSE_")
DECISIONS = EnumCodec(Decision, pb.Decision, "DECISION_")
GROUP_STATES = EnumCodec(GroupStanding, pb.GroupState, "GROUP_STATE_")

__all__ = [
    "DECISIONS",
    "FAULT_CAUSES",
    "FAULT_STAGES",
    "GROUP_STATES",
    "LIMIT_KINDS",
    "OUTCOMES",
    "PURPOSES",
    "EnumCodec",
]
