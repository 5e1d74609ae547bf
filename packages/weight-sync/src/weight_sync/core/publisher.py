"""Who may publish, and in which order: incarnations, numbers, anchors."""

from dataclasses import dataclass, replace

from weight_sync.core.manifest import PolicyVersion
from weight_sync.errors import AnchorRequired, Fenced, NumberNotRising


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is remembered of a run's publishers, across restarts."""

    run: str
    incarnation: int = 0
    """The one that may publish now; 0: none was ever acquired."""
    last_number: int = 0
    """The highest number ever announced, or known to a publisher that acquired."""
    own_numbers: frozenset[int] = frozenset()
    """Numbers announced by this incarnation; only they may be bases of its deltas."""


def acquire(record: RunRecord, *, known_number: int) -> RunRecord:
    """Give publishing to a new incarnation, fencing off every earlier one.

    Args:
        record: the run so far.
        known_number: the highest number anyone else knows to be taken: in the publisher's
            checkpoint, or in another run of the same service.
    """
    return RunRecord(
        run=record.run,
        incarnation=record.incarnation + 1,
        last_number=max(record.last_number, known_number),
    )


def admit(record: RunRecord, version: PolicyVersion, *, base: int) -> RunRecord:
    """Accept an announcement, or say why not.

    Raises:
        Fenced: an older incarnation announces, or one that was never acquired.
        NumberNotRising: the number was announced before, or is below one that was.
        AnchorRequired: a delta on a base that this incarnation has not announced: its receivers
            may hold other bytes under that number, or none.
    """
    if version.incarnation != record.incarnation:
        raise Fenced(
            f"run {version.run}: incarnation {record.incarnation} publishes, the announcement of "
            f"version {version.number} came from incarnation {version.incarnation}. Stop this "
            "publisher; a trainer that should go on must acquire anew and publish an anchor"
        )
    if version.number <= record.last_number:
        raise NumberNotRising(
            f"run {version.run}: expected a number above {record.last_number}, found "
            f"{version.number}. Publish under the next number"
        )
    if base and base not in record.own_numbers:
        raise AnchorRequired(
            f"run {version.run}: version {version.number} is a delta of {base}, which incarnation "
            f"{record.incarnation} has not announced. Publish an anchor first"
        )
    return replace(
        record,
        last_number=version.number,
        own_numbers=record.own_numbers | {version.number},
    )
