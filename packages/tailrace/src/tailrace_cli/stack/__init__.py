"""Starts the services of a stack as processes and keeps them running."""

from tailrace_cli.stack.spec import ProcessSpec, StackSpec, load_stack, parse_variables
from tailrace_cli.stack.supervisor import ProcessStatus, StackError, Supervisor

__all__ = [
    "ProcessSpec",
    "ProcessStatus",
    "StackError",
    "StackSpec",
    "Supervisor",
    "load_stack",
    "parse_variables",
]
