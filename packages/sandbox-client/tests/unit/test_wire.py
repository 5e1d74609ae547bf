import pytest
from sandbox_client import wire
from sandbox_client.errors import WrongRequest
from sandbox_client.types import (
    Command,
    EnvironmentRef,
    ExecResult,
    FileContent,
    ImageStage,
    ImageStatus,
    LimiterStatus,
    SandboxInfo,
    SandboxLimits,
    SandboxSpec,
    ServiceStatus,
    SnapshotInfo,
)
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb


@pytest.mark.parametrize(
    "environment",
    [
        EnvironmentRef(tree_digest="ab", workdir="/testbed", env={"A": "1"}),
        EnvironmentRef(image="python:3.11"),
        EnvironmentRef(template="t"),
        EnvironmentRef(snapshot="sn-1", env={"A": "1"}),
    ],
)
def test_a_specification_survives_the_wire(environment: EnvironmentRef) -> None:
    spec = SandboxSpec(environment, SandboxLimits(1, 2, 3.5, 4, network=True))
    given, limits = wire.spec_to_proto(spec)
    request = pb.CreateSandboxRequest(environment=given, limits=limits)
    assert (
        wire.spec_from_proto(pb.CreateSandboxRequest.FromString(request.SerializeToString()))
        == spec
    )


def test_a_create_without_a_source_is_refused() -> None:
    with pytest.raises(WrongRequest, match="tree_digest"):
        wire.spec_from_proto(pb.CreateSandboxRequest())


def test_an_empty_work_folder_means_the_default() -> None:
    request = pb.CreateSandboxRequest(environment=pb.Environment(tree_digest="ab"))
    assert wire.spec_from_proto(request).environment.workdir == "/workspace"


def test_a_command_survives_the_wire() -> None:
    command = Command("echo", ("a", "b"), "pkg", {"A": "1"}, 2.5, 99, True, "agent")
    message = wire.command_to_proto("sb", command)
    assert message.sandbox_id == "sb"
    assert wire.command_from_proto(message) == command


def test_a_result_survives_the_wire() -> None:
    result = ExecResult(137, b"o\xff", b"e", 9, True, True, 5, 6, 1.5, 0.5, 99)
    ended = wire.ended_from_result(result)
    assert wire.result_from_proto(ended, b"o\xff", b"e", 99) == result


def test_files_listings_and_status_survive_the_wire() -> None:
    file = FileContent("a", b"\0", 0o755)
    assert wire.file_from_proto(wire.file_to_proto(file)) == file
    info = SandboxInfo("sb", "me", {"k": "v"}, 1.5, 2.5, 3)
    assert wire.info_from_proto(wire.info_to_proto(info)) == info
    made = SnapshotInfo("sn-1", 2.5, 7, "/w")
    assert wire.snapshot_from_proto(wire.snapshot_to_proto(made)) == made
    limiters = (LimiterStatus("commands", 8.0, 2.0, 1, 0.5, 0.7),)
    status = ServiceStatus("local", "0.1.0", 3, limiters, ("no cgroups",))
    assert wire.status_from_proto(wire.status_to_proto(status)) == status


def test_pieces_make_up_the_whole_and_stay_below_a_messages_size() -> None:
    data = bytes(range(256)) * 5000
    pieces = list(wire.chunks(data))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= wire.CHUNK_BYTES < 1 << 20
    assert list(wire.chunks(b"")) == []


@pytest.mark.parametrize("stage", list(ImageStage))
def test_an_images_stage_survives_the_wire(stage: ImageStage) -> None:
    image = ImageStatus("python:3.11", stage, "why")
    assert wire.image_from_proto(wire.image_to_proto(image)) == image
