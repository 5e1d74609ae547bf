"""Which versions rebuild which, and which may be deleted."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weight_sync.errors import AnchorRequired, PayloadMissing


@dataclass(frozen=True, slots=True)
class Link:
    """A version as far as rebuilding it matters."""

    number: int
    base: int
    """The version it is a delta of; 0: an anchor."""


def chain(links: Mapping[int, Link], target: int, *, held: Collection[int] = ()) -> list[int]:
    """Return the versions to fetch and apply, in order, to get to `target`.

    A delta names one base, so there is one way back from the target; it ends at the first version
    that is held or is an anchor, and no longer way would move fewer bytes.

    Args:
        links: every version in the store, by number.
        target: where to go.
        held: versions whose verified bytes are at hand.

    Returns:
        Empty if `target` is held; else the first of them is an anchor, or a delta of a version
        in `held`.

    Raises:
        PayloadMissing: a version on the way is not in the store.
    """
    steps: list[int] = []
    number = target
    while number not in held:
        link = links.get(number)
        if link is None:
            at_hand = ", ".join(map(str, sorted(held))) or "nothing"
            raise PayloadMissing(
                f"version {target} needs version {number}, which is not in the store (held: "
                f"{at_hand}). Go to a newer version, or publish an anchor"
            )
        steps.append(number)
        if link.base == 0:
            break
        if link.base >= number:
            raise AnchorRequired(f"version {number} names the later version {link.base} as base")
        number = link.base
    return steps[::-1]


def retained(links: Mapping[int, Link], *, targets: Collection[int], keep_latest: int) -> set[int]:
    """Return the versions that must stay.

    Kept are the newest `keep_latest` versions and every target in preparation, each with all that
    rebuilds it from nothing. That is what a late joiner or a poisoned engine needs; an engine that
    holds some version needs the end of the same chain, whichever version it holds.

    Args:
        links: every version in the store, by number.
        targets: versions that live engines are being brought to.
        keep_latest: at least 1.
    """
    if keep_latest < 1:
        raise ValueError(f"keep_latest must be at least 1, got {keep_latest}")
    keep: set[int] = set()
    for goal in sorted(links)[-keep_latest:] + [number for number in targets if number in links]:
        try:
            keep.update(chain(links, goal))
        except PayloadMissing:
            # Already broken before this pruning: nothing here can be saved by keeping more.
            keep.add(goal)
    return keep


def prunable(links: Mapping[int, Link], *, targets: Collection[int], keep_latest: int) -> list[int]:
    """Return what may be deleted, newest first, so that no version outlives its base."""
    keep = retained(links, targets=targets, keep_latest=keep_latest)
    return sorted(links.keys() - keep, reverse=True)


def newest_anchor(links: Iterable[Link]) -> int:
    """Return the number of the newest anchor; 0: there is none."""
    return max((link.number for link in links if link.base == 0), default=0)


def stuck(links: Iterable[Link], stuck_at: Mapping[str, int]) -> list[str]:
    """Return the hosts that only another anchor helps.

    A host that could not get to a version gets to none that is built on it. An anchor that was
    announced since is its way out, and one more would not be.

    Args:
        links: the run's announced versions.
        stuck_at: the version that a host could not get to, by host.
    """
    anchor = newest_anchor(links)
    return sorted(host for host, number in stuck_at.items() if number >= anchor)


def anchor_due(*, since_anchor: int, anchor_every: int) -> bool:
    """Say whether the next version must be an anchor.

    Args:
        since_anchor: deltas published since this incarnation's last anchor; -1: it has none.
        anchor_every: an anchor for each so many versions; 1: every version is one.
    """
    return since_anchor < 0 or since_anchor + 1 >= anchor_every
