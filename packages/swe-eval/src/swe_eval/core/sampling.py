"""A seeded, stratified order of tasks: every prefix of it is a fair draw."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A task that may be drawn, and the stratum it belongs to."""

    task_id: str
    stratum: str


NO_VALUE = "-"
"""Stands in a stratum's name for a column that a task lacks."""


def stratum_of(columns: Mapping[str, str], names: Sequence[str]) -> str:
    """A task's stratum: the values of these of its columns joined by ` / `; of none, `all`."""
    return " / ".join(columns.get(name) or NO_VALUE for name in names) or "all"


def stratified_order(candidates: Iterable[Candidate], *, seed: int) -> list[str]:
    """All task ids, ordered so that each stratum keeps its share in every prefix.

    Within a stratum of n tasks the j-th by a seeded hash stands at (j + 1/2) / n of the way.
    Merging the strata by that position keeps every prefix proportional to within one task a
    stratum. The order of the input does not matter, and a larger draw with the same seed begins
    with the smaller one.

    Raises:
        ValueError: a task id occurs twice.
    """
    strata: dict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for candidate in candidates:
        if candidate.task_id in seen:
            raise ValueError(f"task {candidate.task_id} is listed twice; ids must be unique")
        seen.add(candidate.task_id)
        strata[candidate.stratum].append(candidate.task_id)
    placed: list[tuple[float, bytes, str]] = []
    for members in strata.values():
        ranked = sorted((_rank(seed, task_id), task_id) for task_id in members)
        placed.extend(
            ((position + 0.5) / len(ranked), rank, task_id)
            for position, (rank, task_id) in enumerate(ranked)
        )
    return [task_id for _, _, task_id in sorted(placed)]


def draw(candidates: Iterable[Candidate], *, count: int, seed: int) -> list[str]:
    """The first `count` tasks of the stratified order; 0 means all.

    Raises:
        ValueError: count is negative or more than there are candidates, or an id occurs twice.
    """
    order = stratified_order(candidates, seed=seed)
    if count < 0 or count > len(order):
        raise ValueError(f"tasks must lie in 0..{len(order)} (0 means all), got {count}")
    return order if count == 0 else order[:count]


def list_digest(task_ids: Sequence[str]) -> str:
    """SHA-256 of the exact list, in its order, as ``sha256:<hex>``."""
    digest = hashlib.sha256()
    for task_id in task_ids:
        encoded = task_id.encode()
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return f"sha256:{digest.hexdigest()}"


def _rank(seed: int, task_id: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{task_id}".encode()).digest()
