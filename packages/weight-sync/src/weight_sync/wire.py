"""The edge to protobuf: nothing else in this package knows a message."""

from tailrace.common.v1 import version_pb2
from tailrace.weight_sync.v1 import weight_service_pb2 as pb

from weight_sync.core.manifest import PolicyVersion
from weight_sync.core.receiver import Phase
from weight_sync.types import (
    AnnouncedVersion,
    EngineEndpoint,
    EngineReport,
    Nodes,
    NodeView,
)

_PHASE_TO_PROTO = {
    Phase.UNKNOWN: pb.ENGINE_STATE_UNKNOWN,
    Phase.SERVING: pb.ENGINE_STATE_SERVING,
    Phase.PREPARING: pb.ENGINE_STATE_PREPARING,
    Phase.READY: pb.ENGINE_STATE_READY,
    Phase.ACTIVATING: pb.ENGINE_STATE_ACTIVATING,
    Phase.POISONED: pb.ENGINE_STATE_POISONED,
}
# A state that a newer release added is one this release cannot vouch for.
_PHASE_FROM_PROTO = {value: phase for phase, value in _PHASE_TO_PROTO.items()}


def version_to_proto(version: PolicyVersion) -> version_pb2.PolicyVersion:
    """Encode a version."""
    return version_pb2.PolicyVersion(
        run=version.run,
        incarnation=version.incarnation,
        number=version.number,
        step=version.step,
        parent=version.parent,
        root_hash=version.root_hash,
    )


def version_from_proto(message: version_pb2.PolicyVersion) -> PolicyVersion:
    """Decode a version.

    Raises:
        ManifestError: a field is out of its range.
    """
    return PolicyVersion(
        run=message.run,
        incarnation=message.incarnation,
        number=message.number,
        step=message.step,
        parent=message.parent,
        root_hash=message.root_hash,
    )


def announced_to_proto(announced: AnnouncedVersion) -> pb.AnnouncedVersion:
    """Encode an announced version."""
    return pb.AnnouncedVersion(
        version=version_to_proto(announced.version),
        manifest_uri=announced.manifest_uri,
        payload_bytes=announced.payload_bytes,
        base=announced.base,
        traceparent=announced.traceparent,
    )


def announced_from_proto(message: pb.AnnouncedVersion) -> AnnouncedVersion:
    """Decode an announced version.

    Raises:
        ManifestError: a field is out of its range.
    """
    return AnnouncedVersion(
        version=version_from_proto(message.version),
        manifest_uri=message.manifest_uri,
        payload_bytes=message.payload_bytes,
        base=message.base,
        traceparent=message.traceparent,
    )


def endpoint_to_proto(endpoint: EngineEndpoint) -> pb.EngineEndpoint:
    """Encode an engine as registered."""
    return pb.EngineEndpoint(url=endpoint.url, kind=endpoint.kind)


def endpoint_from_proto(message: pb.EngineEndpoint) -> EngineEndpoint:
    """Decode an engine as registered."""
    return EngineEndpoint(url=message.url, kind=message.kind or "embedded")


def report_to_proto(report: EngineReport) -> pb.EngineReport:
    """Encode an engine as reported."""
    return pb.EngineReport(
        url=report.url,
        kind=report.kind,
        state=_PHASE_TO_PROTO[report.phase],
        version=report.version,
        target_version=report.target_version,
        prepare_s=report.prepare_s,
        activate_s=report.activate_s,
        pause_s=report.pause_s,
        payload_bytes=report.payload_bytes,
        versions_behind=report.versions_behind,
        error=report.error,
    )


def report_from_proto(message: pb.EngineReport) -> EngineReport:
    """Decode an engine as reported."""
    return EngineReport(
        url=message.url,
        kind=message.kind,
        phase=_PHASE_FROM_PROTO.get(message.state, Phase.UNKNOWN),
        version=message.version,
        target_version=message.target_version,
        prepare_s=message.prepare_s,
        activate_s=message.activate_s,
        pause_s=message.pause_s,
        payload_bytes=message.payload_bytes,
        versions_behind=message.versions_behind,
        error=message.error,
    )


def node_to_proto(node: NodeView) -> pb.Node:
    """Encode a node."""
    return pb.Node(
        node_id=node.node_id,
        host=node.host,
        rollout_target=node.rollout_target,
        engines=[report_to_proto(engine) for engine in node.engines],
        lease_left_s=node.lease_left_s,
        file_target=node.file_target,
        copy_numbers=node.copy_numbers,
    )


def nodes_from_proto(message: pb.ListNodesResponse) -> Nodes:
    """Decode the live nodes."""
    return Nodes(
        [
            NodeView(
                node.node_id,
                node.host,
                node.rollout_target,
                tuple(report_from_proto(engine) for engine in node.engines),
                node.lease_left_s,
                node.file_target,
                tuple(node.copy_numbers),
            )
            for node in message.nodes
        ],
        message.newest_version,
    )
