"""Calls to an EvalService: evaluations followed to their end, and their trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from service_kit.errors import ServiceError
from service_kit.streams import with_idle_deadline
from tailrace.eval.v1 import eval_service_pb2 as pb

from tailrace_cli.patience import Patience

if TYPE_CHECKING:
    from tailrace.eval.v1.eval_service_pb2_grpc import EvalServiceAsyncStub

STREAM_IDLE_S = 120.0

Event = pb.EvaluationPlan | pb.EvaluationProgress | pb.EvaluationReport


async def follow_evaluation(
    stub: EvalServiceAsyncStub, request: pb.EvaluateRequest
) -> AsyncIterator[Event]:
    """The plan of an evaluation, its progress, and its report last; plans again after restarts."""
    patience = Patience(f"evaluation {request.name}")
    while True:
        call = stub.Evaluate(request)
        try:
            async for event in with_idle_deadline(call, STREAM_IDLE_S, "evaluation"):
                patience.renew()
                match event.WhichOneof("event"):
                    case "plan":
                        yield event.plan
                    case "progress":
                        yield event.progress
                    case "report":
                        yield event.report
                        return
        except ServiceError as error:
            await patience.after(error)


async def fetch_trajectories(stub: EvalServiceAsyncStub, name: str, folder: Path) -> int:
    """Copies the trajectories of an evaluation into a folder, whole files or none.

    Returns:
        How many files came.
    """
    patience = Patience(f"trajectories of {name}")
    after, files = "", 0
    while True:
        call = stub.GetTrajectories(pb.GetTrajectoriesRequest(name=name, after=after))
        pieces: list[bytes] = []
        try:
            async for piece in with_idle_deadline(call, STREAM_IDLE_S, "trajectories"):
                patience.renew()
                pieces.append(piece.chunk)
                if piece.last:
                    await asyncio.to_thread(_save, folder, piece.file, b"".join(pieces))
                    after, pieces, files = piece.file, [], files + 1
        except ServiceError as error:
            await patience.after(error)
        else:
            return files


def _save(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Its last part alone: a service's word is no path of this machine.
    path = folder / Path(name).name
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
