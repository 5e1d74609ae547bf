"""One trace goes from the prompt through sandbox, turns, tools and grader to the optimizer step.

A short run of the whole stack exports over OTLP to a collector in this process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from tailrace_cli.demo.services import connect

from integration_tests.harness import SERVICES, Stack, StageRun, grpo_recipe, needs_root
from integration_tests.telemetry.collector import Collector, Span, Trace, collecting

pytestmark = needs_root

STEPS = 2
BATCH_GROUPS = 2
GROUP_SIZE = 4


@dataclass(frozen=True)
class Observed:
    """What the collector got, and what the run said of itself."""

    collector: Collector
    run: StageRun

    @property
    def trained(self) -> list[Trace]:
        """Traces of the groups that an optimizer step trained."""
        return [trace for trace in self.collector.traces() if trace.named("grpo.step")]


async def observe(folder: Path) -> Observed:
    async with collecting() as (collector, endpoint):
        settings = [
            setting
            for name in SERVICES
            for setting in (
                f"{name}.telemetry.endpoint={endpoint}",
                f"{name}.telemetry.span_delay_s=0.2",
            )
        ]
        stack = Stack(folder, settings=settings, engine_delay_s=0.02)
        run = StageRun()
        try:
            await stack.start()
            async with connect(stack.targets) as services:
                await services.publish("base")
                recipe = grpo_recipe(STEPS, batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE)
                async with asyncio.timeout(90):
                    await run.follow(services, recipe)
        finally:
            # In a thread: the services send their last spans as they end, and somebody must listen.
            await asyncio.to_thread(stack.stop)
    return Observed(collector, run)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return asyncio.run(observe(tmp_path_factory.mktemp("trace")))


def only(spans: list[Span]) -> Span:
    assert len(spans) == 1, [span.name for span in spans]
    return spans[0]


def test_every_trained_group_is_one_connected_tree(observed: Observed) -> None:
    assert len(observed.trained) == STEPS * BATCH_GROUPS
    for trace in observed.trained:
        assert only(trace.roots).name == "group"
        assert not trace.orphans, [trace.path(span) for span in trace.orphans]
        assert {span.service for span in trace.spans} >= {
            "grpo-trainer",
            "rollout-engine",
            "sandbox-client",
            "swe-eval",
        }


def test_an_attempt_shows_its_sandbox_its_turns_its_tools_and_its_grade(
    observed: Observed,
) -> None:
    for trace in observed.trained:
        attempts = [s for s in trace.children(only(trace.roots)) if s.name == "attempt"]
        assert sorted(s.attributes["attempt.index"] for s in attempts) == list(range(GROUP_SIZE))
        for attempt in attempts:
            parts = [s.name for s in trace.children(attempt) if "tailrace." not in s.name]
            assert parts[0] == "sandbox.create"
            assert parts.count("turn") == attempt.attributes["turns"] > 0
            turns = [s for s in trace.children(attempt) if s.name == "turn"]
            for turn in turns:
                inside = [s.name for s in trace.children(turn)]
                assert inside in (["generate", "tool"], ["generate"]), inside
            # Every turn but the last one, which submits, runs a command.
            assert sum(len(trace.children(turn)) == 2 for turn in turns) >= len(turns) - 1
        outcomes = {s.attributes["outcome"] for s in attempts}
        assert {"SOLVED", "UNSOLVED"} <= outcomes, "a group without variance was trained"
        assert trace.named("grade")


def test_calls_are_seen_on_both_sides_down_to_the_grader_s_own_sandbox(
    observed: Observed,
) -> None:
    trace = observed.trained[0]
    paths = {trace.path(span) for span in trace.spans}
    sandbox = "tailrace.sandbox.v1.SandboxService"
    grade = "tailrace.eval.v1.EvalService/Grade"
    attempt = "grpo-trainer:group > rollout-engine:attempt"
    for below in (
        f"rollout-engine:sandbox.create > rollout-engine:{sandbox}/CreateSandbox"
        f" > sandbox-client:{sandbox}/CreateSandbox",
        f"rollout-engine:turn > rollout-engine:tool > rollout-engine:{sandbox}/Run"
        f" > sandbox-client:{sandbox}/Run",
        f"rollout-engine:grade > rollout-engine:{grade} > swe-eval:{grade}"
        f" > swe-eval:{sandbox}/CreateSandbox > sandbox-client:{sandbox}/CreateSandbox",
    ):
        assert f"{attempt} > {below}" in paths


def test_the_tree_ends_in_the_optimizer_step_and_the_version_that_came_of_it(
    observed: Observed,
) -> None:
    versions = {version.step: version.number for version in observed.run.versions}
    assert set(versions) == {1, 2}
    seen = []
    for trace in observed.trained:
        step = only(trace.named("grpo.step"))
        assert trace.path(step) == "grpo-trainer:group > grpo-trainer:grpo.step"
        assert step.attributes["version.number"] == versions[step.attributes["step"]]
        assert 2 <= step.attributes["attempts"] <= GROUP_SIZE
        seen.append(step.attributes["step"])
        # Learning starts when the last attempt has come in.
        assert step.start_ns >= max(s.end_ns for s in trace.named("attempt"))
    assert sorted(seen) == [1, 1, 2, 2]


def test_publishing_that_version_is_one_trace_from_the_trainer_to_the_engine_s_update(
    observed: Observed,
) -> None:
    numbers = {version.number for version in observed.run.versions}
    [trace] = [t for t in observed.collector.traces() if t.named("stage")]
    assert not trace.orphans
    published = {
        span.attributes["weight_sync.version"]
        for span in trace.named("weight_sync.update")
        if "weight_sync.publish" in trace.path(span)
    }
    # The engine may skip a version when a newer one comes in time, but the last one stays.
    assert published <= numbers
    assert max(numbers) in published


def test_metrics_of_every_service_arrive_too(observed: Observed) -> None:
    assert {service for service, _ in observed.collector.metrics} == {
        "sandbox-client",
        "swe-eval",
        "weight-sync",
        "rollout-engine",
        "grpo-trainer",
    }
    assert {
        ("rollout-engine", "rpc.client.call.duration"),
        ("sandbox-client", "rpc.server.call.duration"),
        ("grpo-trainer", "grpo_trainer.step.duration"),
    } <= observed.collector.metrics
