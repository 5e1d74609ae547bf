"""Errors of this package that are not a call's: those are `service_kit.errors.ServiceError`."""


class MalformedTaskError(Exception):
    """A task can't be read or is not supported. A retry can't help; the other tasks go on.

    Attributes:
        task: Name of the task's folder.
        file: The file at fault, relative to the folder.
        field: The field at fault, dotted, or empty when the whole file is.
        found: What stands there.
        expected: What should.
    """

    def __init__(self, *, task: str, file: str, expected: str, found: str, field: str = "") -> None:
        self.task = task
        self.file = file
        self.field = field
        self.found = found
        self.expected = expected
        place = f"{task}/{file}" + (f", {field}" if field else "")
        super().__init__(f"{place}: expected {expected}, found {found}")


class UnsupportedTaskError(MalformedTaskError):
    """A well-formed task that needs what this version does not have."""


class TaskSetError(ValueError):
    """A configured task set can't be used at all, such as a folder that is not there."""
