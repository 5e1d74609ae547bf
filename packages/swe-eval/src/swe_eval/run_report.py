"""SWE-bench's report of a whole run, `<model>.<run>.json`, schema version 2: in and out."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.fields import Fields
from swe_eval.tasks.kinds import kind_of

SCHEMA_VERSION = 2
# A count in the report, the list that it counts, and whether older reports have it too.
_LISTS = (
    ("submitted_instances", "submitted_ids", True),
    ("completed_instances", "completed_ids", True),
    ("resolved_instances", "resolved_ids", True),
    ("unresolved_instances", "unresolved_ids", True),
    ("infra_failure_instances", "infra_failure_ids", False),
    ("ambiguous_failure_instances", "ambiguous_failure_ids", False),
    ("empty_patch_instances", "empty_patch_ids", False),
    ("error_instances", "error_ids", True),
)


class RunOutcome(StrEnum):
    """What became of a submission."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    FAULT = "fault"
    """Not graded, through no fault of the submission's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Which instances a run has resolved; all ids are sorted."""

    total_instances: int
    """Size of the data set."""
    submitted_ids: tuple[str, ...]
    completed_ids: tuple[str, ...]
    """Graded: resolved or unresolved."""
    resolved_ids: tuple[str, ...]
    unresolved_ids: tuple[str, ...]
    incomplete_ids: tuple[str, ...]
    """Of the data set, and not submitted."""
    error_ids: tuple[str, ...]
    empty_patch_ids: tuple[str, ...] = ()
    infra_failure_ids: tuple[str, ...] = ()
    ambiguous_failure_ids: tuple[str, ...] = ()
    failure_reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        data_set: Collection[str],
        outcomes: Mapping[str, RunOutcome],
        reasons: Mapping[str, str] | None = None,
    ) -> Self:
        """The report of a run.

        Args:
            data_set: All instances.
            outcomes: Of those that were submitted.
            reasons: Causes of faults by instance.

        Raises:
            ValueError: something was submitted that is not in the data set.
        """
        strange = sorted(outcomes.keys() - set(data_set))
        if strange:
            raise ValueError(f"{strange[:5]} were submitted and are not in the data set")

        def those(*wanted: RunOutcome) -> tuple[str, ...]:
            return tuple(sorted(name for name, is_ in outcomes.items() if is_ in wanted))

        return cls(
            total_instances=len(data_set),
            submitted_ids=tuple(sorted(outcomes)),
            completed_ids=those(RunOutcome.RESOLVED, RunOutcome.UNRESOLVED),
            resolved_ids=those(RunOutcome.RESOLVED),
            unresolved_ids=those(RunOutcome.UNRESOLVED),
            incomplete_ids=tuple(sorted(set(data_set) - outcomes.keys())),
            error_ids=those(RunOutcome.FAULT),
            empty_patch_ids=those(RunOutcome.EMPTY_PATCH),
            infra_failure_ids=those(RunOutcome.FAULT),
            failure_reasons=dict(sorted((reasons or {}).items())),
        )

    def as_json(self) -> str:
        """The report's text."""
        values: dict[str, Any] = {"total_instances": self.total_instances}
        values |= {count: len(getattr(self, ids)) for count, ids, _ in _LISTS}
        values |= {ids: list(getattr(self, ids)) for _, ids, _ in _LISTS}
        values["incomplete_ids"] = list(self.incomplete_ids)
        values["failure_reasons"] = dict(self.failure_reasons)
        values["schema_version"] = SCHEMA_VERSION
        return json.dumps(values, indent=4) + "\n"


def report_name(model: str, run: str) -> str:
    """Name of a report's file."""
    return f"{model.replace('/', '__')}.{run}.json"


def read_report(file: Path) -> RunReport:
    """Reads a report, of SWE-bench's harness of any age or of sb-cli.

    Raises:
        MalformedTaskError: it is none, of another schema, or its counts are not those of its lists.
    """
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise MalformedTaskError(
            task="", file=str(file), expected="a report in JSON", found=str(error)
        ) from error
    fields = Fields("", str(file), values if isinstance(values, dict) else {})
    if fields.values.get("schema_version") != SCHEMA_VERSION:
        fields.refuse(
            f"a report of schema_version {SCHEMA_VERSION}", kind_of(fields.values), "schema_version"
        )
    fields.demand(
        ["total_instances", *(ids for _, ids, always in _LISTS if always)], "a field of a report"
    )
    for count, ids, _ in _LISTS:
        listed = fields.text_list(ids)
        if ids in fields.values and fields.values.get(count) != len(listed):
            fields.fail(count, f"{len(listed)}, the length of {ids}", fields.values.get(count))
    total = fields.values["total_instances"]
    if not isinstance(total, int):
        fields.fail("total_instances", "a number", total)
    lists = {ids: tuple(sorted(fields.text_list(ids))) for _, ids, _ in _LISTS}
    if sorted(lists["resolved_ids"] + lists["unresolved_ids"]) != list(lists["completed_ids"]):
        fields.fail("completed_ids", "those of resolved_ids and unresolved_ids", "others")
    return RunReport(
        total_instances=total,
        incomplete_ids=tuple(sorted(fields.text_list("incomplete_ids"))),
        failure_reasons=fields.text_table("failure_reasons"),
        **lists,
    )
