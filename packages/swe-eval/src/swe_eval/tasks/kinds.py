"""Tells what an object is that is no task, so that a refusal can say it."""

from collections.abc import Mapping

from swe_eval.tasks.fields import shown

_SIGNS: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(keys.split()), name)
    for keys, name in (
        ("instance_id model_patch", "a prediction"),
        ("schema_version steps agent", "a trajectory in ATIF"),
        ("trajectory_format messages", "a trajectory of mini-swe-agent"),
        ("trajectory history info", "a trajectory of SWE-agent"),
        ("responses_create_params response reward", "a rollout with its reward"),
        ("trajectory_id messages tools", "a trace of Open-SWE-Traces"),
        ("messages", "a conversation to train on"),
        ("history", "a trajectory of SWE-agent"),
        ("role content", "a message of a trajectory"),
        ("id source message", "an event of a trajectory of OpenHands"),
        ("id source observation", "an event of a trajectory of OpenHands"),
        ("id source action", "an event of a trajectory of OpenHands"),
        ("resolved_ids submitted_ids", "a report of a whole run"),
        ("ids_resolved ids_unresolved", "a report of a whole run"),
        ("resolved tests_status", "a report of one evaluation"),
        ("FAIL_TO_PASS PASS_TO_FAIL", "a report of a validation"),
        ("mirror test_cmd", "a repository's profile"),
        ("instance_ids", "a list of ids"),
        ("instance_id resolved_by", "the submissions that solved an instance"),
    )
)


def kind_of(values: Mapping[str, object]) -> str:
    """What the object seems to be, by its keys."""
    for keys, name in _SIGNS:
        if keys <= values.keys():
            return name
    inner = list(values.values())
    if len(inner) == 1 and isinstance(inner[0], Mapping) and "tests_status" in inner[0]:
        return "a report of one evaluation"
    return f"an object with {shown(sorted(values))}"
