"""The edge to protobuf: messages of `tailrace.eval.v1` to and from this package's values.

A task leaves here by its open side alone: nothing in this module reads a grader or a reference.
"""

from collections.abc import Iterator

from service_kit.errors import InvalidArgument
from tailrace.common.v1 import outcome_pb2, version_pb2
from tailrace.eval.v1 import eval_service_pb2 as pb

from swe_eval.core import evaluation
from swe_eval.core.statistics import Interval
from swe_eval.core.verdict import TestResult, Verdict
from swe_eval.evaluate import EvaluationRequest, Event
from swe_eval.grading.run import Grade
from swe_eval.tasks.sets import TaskRef
from swe_eval.tasks.task import Environment, EnvironmentSource, Task

CHUNK_BYTES = 256 * 1024
"""Largest piece of an environment in one message."""

_VERDICTS = {
    Verdict.SOLVED: outcome_pb2.VERDICT_SOLVED,
    Verdict.UNSOLVED: outcome_pb2.VERDICT_UNSOLVED,
}


def ref_to_proto(ref: TaskRef) -> pb.TaskRef:
    """A task in a listing."""
    return pb.TaskRef(task_id=ref.task_id, repository=ref.repository, kind=ref.kind)


def task_to_proto(task: Task) -> pb.Task:
    """What an agent may know of a task."""
    return pb.Task(
        task_id=task.task_id,
        repository=task.repository,
        kind=task.kind,
        instruction=task.instruction,
        environment=_environment_to_proto(task.environment),
        command_timeout_s=task.command_timeout_s,
    )


def _environment_to_proto(environment: Environment) -> pb.EnvironmentRecipe:
    recipe = pb.EnvironmentRecipe(
        digest=environment.digest,
        workdir=environment.workdir,
        env=dict(environment.env),
        memory_bytes=environment.memory_bytes,
        cpus=environment.cpus,
        network=environment.network,
        forget_history=environment.forget_history,
    )
    match environment.source:
        case EnvironmentSource.TREE:
            recipe.tree.bytes = environment.size_bytes
        case EnvironmentSource.IMAGE:
            recipe.image = environment.image
        case EnvironmentSource.DOCKERFILE:
            recipe.dockerfile = environment.dockerfile
    return recipe


def chunks(data: bytes) -> Iterator[pb.GetEnvironmentResponse]:
    """An environment's tar in pieces; an empty one has none."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield pb.GetEnvironmentResponse(tar_chunk=data[start : start + CHUNK_BYTES])


def attempt_key(attempt: version_pb2.AttemptId) -> str:
    """A name for one try at one attempt, the same for the same try."""
    return (
        f"{attempt.group_id}/{attempt.assignment_epoch}/{attempt.index}/{getattr(attempt, 'try')}"
    )


def grade_to_proto(grade: Grade) -> pb.GradeResponse:
    """A verdict."""
    return pb.GradeResponse(
        verdict=_VERDICTS[grade.verdict],
        reason=grade.reason.value,
        tests=[_test_to_proto(test) for test in grade.tests],
        log_tail=grade.log_tail or grade.detail,
        wall_s=grade.wall_s,
        sandbox_start_s=grade.sandbox_start_s,
    )


def _test_to_proto(test: TestResult) -> pb.TestResult:
    return pb.TestResult(name=test.name, required=test.required, status=test.status.value)


def evaluation_from_proto(request: pb.EvaluateRequest) -> EvaluationRequest:
    """What to evaluate.

    Raises:
        InvalidArgument: a number is negative.
    """
    for name in ("tasks", "attempts", "version"):
        if getattr(request, name) < 0:
            raise InvalidArgument(f"{name} must not be negative, got {getattr(request, name)}")
    # Without the message the defaults hold; with it 0 is a temperature like any other.
    sampling = request.sampling
    given = request.HasField("sampling")
    return EvaluationRequest(
        name=request.name,
        task_set=request.task_set,
        tasks=request.tasks,
        task_seed=request.task_seed,
        attempts=request.attempts,
        version=request.version,
        temperature=sampling.temperature if given else 1.0,
        top_p=sampling.top_p or 1.0,
        sampling_seed=sampling.seed,
        targets=tuple(request.rollout_targets),
        traceparent=request.traceparent,
        stratify_by=tuple(request.stratify_by),
        task_ids=tuple(request.task_ids),
    )


def event_to_proto(event: Event) -> pb.EvaluateResponse:
    """The plan, progress or the report."""
    if isinstance(event, evaluation.Plan):
        return pb.EvaluateResponse(
            plan=pb.EvaluationPlan(
                task_ids=event.task_ids,
                strata=event.strata,
                stratified_by=event.stratified_by,
                task_list_digest=event.list_digest,
            )
        )
    if isinstance(event, evaluation.Progress):
        return pb.EvaluateResponse(
            progress=pb.EvaluationProgress(
                attempts_done=event.attempts_done,
                attempts_total=event.attempts_total,
                solved=event.solved,
                faults=event.faults,
            )
        )
    return pb.EvaluateResponse(report=report_to_proto(event))


def report_to_proto(report: evaluation.Report) -> pb.EvaluationReport:
    """The result of an evaluation."""
    return pb.EvaluationReport(
        name=report.name,
        pass_at_1=report.pass_at_1,
        pass_at_1_ci95=_interval_to_proto(report.pass_at_1_ci95),
        pass_at_k=report.pass_at_k,
        tasks=report.tasks,
        attempts=report.attempts,
        outcomes=dict(report.outcomes),
        by_kind=[
            pb.StratumScore(
                name=s.name,
                tasks=s.tasks,
                attempts=s.attempts,
                pass_rate=s.pass_rate,
                ci95=_interval_to_proto(s.ci95),
            )
            for s in report.strata
        ],
        versions=report.versions,
        task_list_digest=report.list_digest,
        wall_s=report.wall_s,
        by_task=[
            pb.TaskScore(task_id=s.task_id, solved=s.solved, attempts=s.attempts)
            for s in report.by_task
        ],
        quarantined=[
            pb.QuarantinedTask(task_id=q.task_id, reason=q.reason) for q in report.quarantined
        ],
        pass_at=[
            pb.PassAtK(k=p.k, estimate=p.estimate, ci95=_interval_to_proto(p.ci95))
            for p in report.pass_at
        ],
        stratified_by=report.stratified_by,
        pinned_version=report.pinned_version,
        version_tokens=[
            pb.VersionTokens(
                version=t.version, oldest_kv_version=t.oldest_kv_version, tokens=t.tokens
            )
            for t in report.version_tokens
        ],
        faults=dict(report.faults),
    )


def _interval_to_proto(interval: Interval) -> pb.Interval:
    return pb.Interval(low=interval.low, high=interval.high)


def heartbeat() -> pb.EvaluateResponse:
    """Sent when there is nothing else to say."""
    return pb.EvaluateResponse(heartbeat=pb.Heartbeat())
