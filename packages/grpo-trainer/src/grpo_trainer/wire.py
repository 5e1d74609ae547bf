"""The edge to protobuf: the trainer's contract from and to this package's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service_kit.errors import InvalidArgument
from tailrace.common.v1 import version_pb2
from tailrace.trainer.v1 import trainer_service_pb2 as pb
from weight_sync.core.manifest import PolicyVersion

from grpo_trainer.events import Event, EventKind
from grpo_trainer.registry import RunStatus, StageRecord
from grpo_trainer.stage import StageKind, StageState

_KINDS = {
    StageKind.SFT: pb.STAGE_KIND_SFT,
    StageKind.GRPO: pb.STAGE_KIND_GRPO,
}
_KINDS_FROM: Mapping[int, StageKind] = {number: kind for kind, number in _KINDS.items()}
_STATES = {
    StageState.RUNNING: pb.STAGE_STATE_RUNNING,
    StageState.FINISHED: pb.STAGE_STATE_FINISHED,
    StageState.STOPPED: pb.STAGE_STATE_STOPPED,
    StageState.FAILED: pb.STAGE_STATE_FAILED,
}


def kind_from_proto(number: int) -> StageKind:
    """Read a stage's kind.

    Raises:
        InvalidArgument: It is unspecified, or of a newer contract.
    """
    kind = _KINDS_FROM.get(number)
    if kind is None:
        raise InvalidArgument(
            f"kind: expected {sorted(k.value for k in StageKind)}, found number {number}"
        )
    return kind


def version_to_proto(version: PolicyVersion) -> version_pb2.PolicyVersion:
    """Write a version."""
    return version_pb2.PolicyVersion(
        run=version.run,
        incarnation=version.incarnation,
        number=version.number,
        step=version.step,
        parent=version.parent,
        root_hash=version.root_hash,
    )


def event_to_proto(event: Event) -> pb.WatchStageResponse:
    """Write an event of a stage."""
    data: Mapping[str, Any] = event.data
    response = pb.WatchStageResponse(cursor=event.cursor)
    match event.kind:
        case EventKind.STEP:
            response.step.step = data["step"]
            response.step.values.update(data["values"])
            response.step.counts.update(data["counts"])
        case EventKind.VERSION:
            response.version.version.CopyFrom(version_pb2.PolicyVersion(**data))
        case EventKind.CHECKPOINT:
            response.checkpoint.step = data["step"]
            response.checkpoint.path = data["path"]
        case EventKind.ENDED:
            response.ended.state = _STATES[StageState(data["state"])]
            response.ended.steps = data["steps"]
            response.ended.error = data["error"]
        case EventKind.NOTE:
            response.note = data["text"]
    return response


def heartbeat() -> pb.WatchStageResponse:
    """Make a heartbeat of a watch."""
    return pb.WatchStageResponse(heartbeat=pb.Heartbeat())


def status_to_proto(status: RunStatus, package_version: str) -> pb.GetStatusResponse:
    """Write where a run is."""
    return pb.GetStatusResponse(
        run=status.run,
        incarnation=status.incarnation,
        version=package_version,
        stages=[_stage_to_proto(record) for record in status.stages],
        policy=None if status.policy is None else version_to_proto(status.policy),
        groups_in_flight=status.groups_in_flight,
        groups_ready=status.groups_ready,
        staleness_bound=status.staleness_bound,
    )


def _stage_to_proto(record: StageRecord) -> pb.StageStatus:
    return pb.StageStatus(
        name=record.name,
        kind=_KINDS[record.kind],
        state=_STATES[record.state],
        step=record.step,
        steps_total=record.steps_total,
    )
