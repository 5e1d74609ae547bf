"""Tasks for evaluation alone, as far as they must be known to keep training away from them."""

from collections.abc import Iterator
from pathlib import Path

from swe_eval.core.decontaminate import TaskFacts
from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.rows import HUB, read_rows
from swe_eval.tasks.sources import harbor_tasks


def heldout_facts(location: str) -> Iterator[TaskFacts]:
    """What each task at a location can be known by.

    Args:
        location: A folder of Harbor tasks, or rows as `rows.read_rows` takes them. The rows need
            not be fit to run: those of SWE-bench 4 are taken as well.

    Raises:
        TaskSetError: there are none.
        MalformedTaskError: nobody could keep away from one of them.
    """
    path = Path(location)
    if not location.startswith(HUB) and path.is_dir() and any(path.rglob("task.toml")):
        for found in harbor_tasks(path):
            if isinstance(found, MalformedTaskError):
                raise found
            yield found.task.facts
        return
    for row in read_rows(location):
        if isinstance(row, MalformedTaskError):
            raise row
        yield TaskFacts(
            task_id=row.filled("instance_id"),
            repository=row.filled("repo"),
            text=row.text("problem_statement"),
            patch=row.text("patch"),
        )
