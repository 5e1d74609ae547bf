"""Looks through tasks of all kinds and tells of each that can't be used."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.harbor import HarborOptions
from swe_eval.tasks.sources import Found, tasks_at, without_twins


def validate(
    paths: Sequence[Path], options: HarborOptions | None = None
) -> Iterator[Found | MalformedTaskError]:
    """Every task at the paths: Harbor directories, and rows of SWE-bench and SWE-smith.

    Args:
        paths: Files and folders.
        options: How to read Harbor's directories.

    Raises:
        TaskSetError: there is nothing of the kind at one of them.
    """
    # Made first, so that a wrong path is told before a long reading.
    sources = [tasks_at(path, options) for path in paths]
    for source in sources:
        yield from without_twins(source)


def tell_problems(paths: Sequence[Path], tell: Callable[[str], None]) -> bool:
    """Tells a line for each task that can't be used and one for all; whether there was none.

    Raises:
        TaskSetError: as `validate`.
    """
    good = bad = 0
    for found in validate(paths):
        if isinstance(found, MalformedTaskError):
            bad += 1
            tell(f"{type(found).__name__.removesuffix('Error')}: {found}")
        else:
            good += 1
    tell(f"{good} of {good + bad} tasks can be used")
    return not bad
