"""Generated tasks in the internal form."""

from swe_eval.generate import GeneratedTask
from swe_eval.tasks.harbor import plain_functions
from swe_eval.tasks.task import Environment, Reference, Task, TestGrader, TestRunner, TreeFile


def from_generated(
    generated: GeneratedTask, *, wall_s: float, cpu_s: int, command_timeout_s: float
) -> Task:
    """The task, with limits of its task set."""
    required = (*generated.fail_to_pass, *generated.pass_to_pass)
    plain = plain_functions(generated.hidden_tests).issuperset(required)
    return Task(
        task_id=generated.task_id,
        repository=generated.repository,
        kind=generated.kind,
        instruction=generated.instruction,
        environment=Environment(
            files={path: TreeFile(text.encode()) for path, text in generated.files.items()}
        ),
        grader=TestGrader(
            runner=TestRunner.FUNCTIONS if plain else TestRunner.PYTEST,
            files=dict(generated.hidden_tests),
            fail_to_pass=generated.fail_to_pass,
            pass_to_pass=generated.pass_to_pass,
            wall_s=wall_s,
            cpu_s=cpu_s,
        ),
        reference=Reference(patch=generated.gold_patch.encode()),
        command_timeout_s=command_timeout_s,
    )
