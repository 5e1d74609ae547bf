"""Tasks for evaluation alone, as far as they must be known to keep training away from them."""

from collections.abc import Iterator
from pathlib import Path

from swe_eval.core.decontaminate import TaskFacts
from swe_eval.errors import MalformedTaskError
from swe_eval.tasks.harbor import read_task
from swe_eval.tasks.rows import HUB, read_file, read_rows
from swe_eval.tasks.sources import places_at


def heldout_facts(location: str) -> Iterator[TaskFacts]:
    """What each task at a location can be known by.

    Args:
        location: A folder of Harbor tasks, of files of rows, or of both; such a file; or
            `hf:OWNER/NAME[@REVISION]`. The rows need not be fit to run: those of SWE-bench 4 are
            taken as well.

    Raises:
        TaskSetError: there are none.
        MalformedTaskError: nobody could keep away from one of them.
    """
    if location.startswith(HUB):
        rows = read_rows(location)
    else:
        folders, files = places_at(Path(location))
        for folder in folders:
            yield read_task(folder).facts
        rows = (row for file in files for row in read_file(file))
    for row in rows:
        if isinstance(row, MalformedTaskError):
            raise row
        yield TaskFacts(
            task_id=row.filled("instance_id"),
            repository=row.filled("repo"),
            text=row.text("problem_statement"),
            patch=row.text("patch"),
        )
