"""The edge to protobuf: messages to and from the values of `types`."""

import os
from collections.abc import Iterator

from tailrace.sandbox.v1 import sandbox_service_pb2 as pb

from sandbox_client.errors import WrongRequest
from sandbox_client.types import (
    DEFAULT_WORKDIR,
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

__all__ = [
    "CHUNK_BYTES",
    "chunks",
    "command_from_proto",
    "command_to_proto",
    "ended_from_result",
    "file_from_proto",
    "file_to_proto",
    "image_from_proto",
    "image_to_proto",
    "info_from_proto",
    "info_to_proto",
    "result_from_proto",
    "snapshot_from_proto",
    "snapshot_to_proto",
    "spec_from_proto",
    "spec_to_proto",
    "status_from_proto",
    "status_to_proto",
    "text",
]

CHUNK_BYTES = 256 * 1024
"""Size of the pieces in which files, trees and diffs travel."""


def text(name: str) -> str:
    """A file's name as protobuf takes it: bytes that are no UTF-8 are replaced."""
    return os.fsencode(name).decode(errors="replace")


def chunks(data: bytes) -> Iterator[bytes]:
    """Cuts bytes into pieces; empty data gives none."""
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES]


def spec_from_proto(request: pb.CreateSandboxRequest) -> SandboxSpec:
    """What a create asks for."""
    given = request.environment
    if given.WhichOneof("source") is None:
        raise WrongRequest(
            "environment: one of tree_digest, image, template and snapshot_id must be set"
        )
    environment = EnvironmentRef(
        tree_digest=given.tree_digest,
        image=given.image,
        template=given.template,
        snapshot=given.snapshot_id,
        workdir=given.workdir or DEFAULT_WORKDIR,
        env=dict(given.env),
    )
    limits = SandboxLimits(
        memory_bytes=request.limits.memory_bytes,
        pids=request.limits.pids,
        cpus=request.limits.cpus,
        disk_bytes=request.limits.disk_bytes,
        network=request.limits.network,
    )
    return SandboxSpec(environment, limits)


def spec_to_proto(spec: SandboxSpec) -> tuple[pb.Environment, pb.SandboxLimits]:
    """The two messages of a create that describe the sandbox."""
    given = spec.environment
    environment = pb.Environment(workdir=given.workdir, env=given.env)
    if given.image:
        environment.image = given.image
    elif given.template:
        environment.template = given.template
    elif given.snapshot:
        environment.snapshot_id = given.snapshot
    else:
        environment.tree_digest = given.tree_digest
    limits = pb.SandboxLimits(
        memory_bytes=spec.limits.memory_bytes,
        pids=spec.limits.pids,
        cpus=spec.limits.cpus,
        disk_bytes=spec.limits.disk_bytes,
        network=spec.limits.network,
    )
    return environment, limits


def command_from_proto(command: pb.Command) -> Command:
    """A command."""
    return Command(
        shell=command.shell,
        argv=tuple(command.argv),
        cwd=command.cwd,
        env=dict(command.env),
        timeout_s=command.timeout_s,
        max_output_bytes=command.max_output_bytes,
        merge_stderr=command.merge_stderr,
        user=command.user,
    )


def command_to_proto(sandbox_id: str, command: Command) -> pb.Command:
    """A command for a sandbox."""
    return pb.Command(
        sandbox_id=sandbox_id,
        shell=command.shell,
        argv=command.argv,
        cwd=command.cwd,
        env=command.env,
        timeout_s=command.timeout_s,
        max_output_bytes=command.max_output_bytes,
        merge_stderr=command.merge_stderr,
        user=command.user,
    )


def ended_from_result(result: ExecResult) -> pb.ExecEnded:
    """How a command ended, without its output."""
    return pb.ExecEnded(
        exit_code=result.exit_code,
        signal=result.signal,
        timed_out=result.timed_out,
        out_of_memory=result.out_of_memory,
        stdout_omitted_bytes=result.stdout_omitted_bytes,
        stderr_omitted_bytes=result.stderr_omitted_bytes,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
    )


def result_from_proto(
    ended: pb.ExecEnded, stdout: bytes, stderr: bytes, max_output_bytes: int
) -> ExecResult:
    """A command's result."""
    return ExecResult(
        exit_code=ended.exit_code,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        signal=ended.signal,
        timed_out=ended.timed_out,
        out_of_memory=ended.out_of_memory,
        stdout_omitted_bytes=ended.stdout_omitted_bytes,
        stderr_omitted_bytes=ended.stderr_omitted_bytes,
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
        max_output_bytes=max_output_bytes,
    )


def file_from_proto(file: pb.FileContent) -> FileContent:
    """A file to be written."""
    return FileContent(file.path, file.content, file.mode)


def file_to_proto(file: FileContent) -> pb.FileContent:
    """A file to be written."""
    return pb.FileContent(path=file.path, content=file.content, mode=file.mode)


def info_to_proto(info: SandboxInfo) -> pb.SandboxInfo:
    """One line of a listing."""
    return pb.SandboxInfo(
        sandbox_id=info.sandbox_id,
        owner=info.owner,
        labels=info.labels,
        age_s=info.age_s,
        lease_left_s=info.lease_left_s,
        running_commands=info.running_commands,
    )


def info_from_proto(info: pb.SandboxInfo) -> SandboxInfo:
    """One line of a listing."""
    return SandboxInfo(
        info.sandbox_id,
        info.owner,
        dict(info.labels),
        info.age_s,
        info.lease_left_s,
        info.running_commands,
    )


def snapshot_to_proto(made: SnapshotInfo) -> pb.SnapshotSandboxResponse:
    """A snapshot that was made."""
    return pb.SnapshotSandboxResponse(
        snapshot_id=made.snapshot_id,
        lease_s=made.lease_s,
        size_bytes=made.size_bytes,
        workdir=made.workdir,
    )


def snapshot_from_proto(made: pb.SnapshotSandboxResponse) -> SnapshotInfo:
    """A snapshot that was made."""
    return SnapshotInfo(made.snapshot_id, made.lease_s, made.size_bytes, made.workdir)


def image_to_proto(image: ImageStatus) -> pb.ImageStatus:
    """How far a prefetched image is."""
    stage = pb.ImageStage.Value(f"IMAGE_STAGE_{image.stage.name}")
    return pb.ImageStatus(image=image.image, stage=stage, message=image.message)


def image_from_proto(image: pb.ImageStatus) -> ImageStatus:
    """How far a prefetched image is."""
    stage = ImageStage[pb.ImageStage.Name(image.stage).removeprefix("IMAGE_STAGE_")]
    return ImageStatus(image.image, stage, image.message)


def status_to_proto(status: ServiceStatus) -> pb.GetStatusResponse:
    """The service as a whole."""
    return pb.GetStatusResponse(
        backend=status.backend,
        version=status.version,
        sandboxes=status.sandboxes,
        limiters=[
            pb.LimiterStatus(
                name=limiter.name,
                limit=limiter.limit,
                in_use=limiter.in_use,
                waiting=limiter.waiting,
                wait_p50_s=limiter.wait_p50_s,
                wait_max_s=limiter.wait_max_s,
            )
            for limiter in status.limiters
        ],
        missing_protections=status.missing_protections,
    )


def status_from_proto(status: pb.GetStatusResponse) -> ServiceStatus:
    """The service as a whole."""
    return ServiceStatus(
        status.backend,
        status.version,
        status.sandboxes,
        tuple(
            LimiterStatus(
                limiter.name,
                limiter.limit,
                limiter.in_use,
                limiter.waiting,
                limiter.wait_p50_s,
                limiter.wait_max_s,
            )
            for limiter in status.limiters
        ),
        tuple(status.missing_protections),
    )
