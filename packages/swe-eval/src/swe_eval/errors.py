"""Errors of this package that are not a call's: those are `service_kit.errors.ServiceError`."""


class MalformedTaskError(Exception):
    """A task can't be read or is not supported. A retry can't help; the other tasks go on.

    Attributes:
        task: Name of the task's folder, or of the row if it has one.
        file: The file at fault, relative to the folder; of a row the file that holds it.
        field: The field at fault, dotted, or empty when the whole file is.
        found: What stands there.
        expected: What should.
        line: The line of a row, from 1; 0 for files that are read whole.
    """

    def __init__(
        self, *, task: str, file: str, expected: str, found: str, field: str = "", line: int = 0
    ) -> None:
        self.task = task
        self.file = file
        self.field = field
        self.found = found
        self.expected = expected
        self.line = line
        if line:
            place = f"{file}:{line}" + (f" ({task})" if task else "")
        else:
            place = f"{task}/{file}" if task else file
        place += f", {field}" if field else ""
        super().__init__(f"{place}: expected {expected}, found {found}")


class UnsupportedTaskError(MalformedTaskError):
    """A well-formed task that needs what this version does not have."""


class TaskSetError(ValueError):
    """A configured task set can't be used at all, such as a folder that is not there."""


class RepositoryError(ValueError):
    """A repository that no tasks can be made from: not there, without tests, with failing ones."""
