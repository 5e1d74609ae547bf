"""Coding tasks, honest grading and pass@k with error bars.

A service holds tasks, grades diffs in fresh sandboxes and evaluates policies
(`python -m swe_eval serve`). The parts work by themselves too::

    from swe_eval import TaskScore, make_task, mean_pass_at_k, pass_at_1_interval

    task = make_task("heldout", 0)
    print(task.instruction, task.files["README.md"], task.gold_patch)
    scores = [TaskScore(task_id=f"t{i}", solved=i % 5, attempts=4) for i in range(100)]
    print(mean_pass_at_k(scores, 1), pass_at_1_interval(scores))
"""

from swe_eval.config import (
    EvalConfig,
    EvaluationConfig,
    FaultInjection,
    GeneratedSetConfig,
    GradingConfig,
    HarborSetConfig,
    RowSetConfig,
)
from swe_eval.core.decontaminate import Overlap, OverlapKind, TaskFacts, contamination, overlaps
from swe_eval.core.evaluation import Report
from swe_eval.core.sampling import Candidate, draw, list_digest, stratified_order, stratum_of
from swe_eval.core.statistics import (
    Interval,
    PairedComparison,
    TaskScore,
    compare_paired,
    mean_pass_at_k,
    pass_at_1_interval,
    pass_at_k,
    pass_at_k_interval,
)
from swe_eval.core.verdict import GradeReason, TestResult, TestStatus, Verdict
from swe_eval.errors import MalformedTaskError, TaskSetError, UnsupportedTaskError
from swe_eval.generate import GeneratedTask, make_task, to_harbor
from swe_eval.grading.run import Grade, Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.predictions import Prediction, read_predictions, write_predictions
from swe_eval.run_report import RunOutcome, RunReport, read_report
from swe_eval.tasks.harbor import find_tasks, read_task
from swe_eval.tasks.sets import Catalog, open_task_sets
from swe_eval.tasks.task import Environment, Task
from swe_eval.tasks.traces import Trace, read_traces, to_atif
from swe_eval.tasks.validate import validate

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Catalog",
    "Environment",
    "EvalConfig",
    "EvaluationConfig",
    "FaultInjection",
    "GeneratedSetConfig",
    "GeneratedTask",
    "Grade",
    "GradeReason",
    "Grader",
    "GradingConfig",
    "HarborSetConfig",
    "Interval",
    "MalformedTaskError",
    "Overlap",
    "OverlapKind",
    "PairedComparison",
    "Prediction",
    "Report",
    "RowSetConfig",
    "RunOutcome",
    "RunReport",
    "ServiceHost",
    "Task",
    "TaskFacts",
    "TaskScore",
    "TaskSetError",
    "TestResult",
    "TestStatus",
    "Trace",
    "UnsupportedTaskError",
    "Verdict",
    "__version__",
    "compare_paired",
    "contamination",
    "draw",
    "find_tasks",
    "list_digest",
    "make_task",
    "mean_pass_at_k",
    "open_task_sets",
    "overlaps",
    "pass_at_1_interval",
    "pass_at_k",
    "pass_at_k_interval",
    "read_predictions",
    "read_report",
    "read_task",
    "read_traces",
    "stratified_order",
    "stratum_of",
    "to_atif",
    "to_harbor",
    "validate",
    "write_predictions",
]
