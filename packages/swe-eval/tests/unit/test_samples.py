"""Every sample is loaded, or refused with the right reason."""

from pathlib import Path

import pytest
from swe_eval.errors import MalformedTaskError
from swe_eval.predictions import Prediction, read_predictions
from swe_eval.run_report import read_report
from swe_eval.tasks.rows import read_file
from swe_eval.tasks.sources import Found
from swe_eval.tasks.swebench import read_row
from swe_eval.tasks.traces import Trace, read_traces
from swe_eval.tasks.validate import validate

DATA = Path(__file__).parent.parent / "data"
VERSION_4 = "image, log_parser, eval_type, eval_script"
HARBOR = {
    "hello-alpine": "",
    "hello-healthcheck": "environment.healthcheck",
    "hello-multi-step-simple": "steps",
    "hello-skills": "",
    "hello-user": "agent.user",
    "hello-workdir": "",
    "hello-world": "",
    "separate-verifier-environment": "artifacts",
    "verifier-mode-matrix--shared-default": "",
}
# File, and for each row the field at fault, what was found instead, or nothing if it loads.
ROWS = {
    "pandas-dev__pandas.95280573.pr_53652.json": [""],
    "pydantic__pydantic.acb0f10f.pr_8316.partial.json": ["patch"],
    "repos.json": ["a repository's profile"] * 2,
    "resolved_submissions.jsonl": ["the submissions that solved an instance"],
    "swe_agent_debug_20240322.jsonl": [VERSION_4] * 2,
    "swe_agent_lite_test.jsonl": [VERSION_4] * 3,
    "swe_gym_moto.jsonl": [VERSION_4],
    "swesmith_ft_xml.jsonl": ["a conversation to train on"],
    "verified_astropy.jsonl": [VERSION_4],
    "verified_instances.jsonl": [
        "problem_statement, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS"
    ],
}


def outcomes(path: Path) -> list[str]:
    return [
        "" if isinstance(found, Found) else found.field or found.found for found in validate([path])
    ]


def test_every_sample_is_in_the_tables() -> None:
    assert sorted(HARBOR) == sorted(path.name for path in (DATA / "harbor").iterdir())
    assert sorted(ROWS) == sorted(path.name for path in (DATA / "rows").iterdir())


@pytest.mark.parametrize("name", HARBOR)
def test_task_directories(name: str) -> None:
    assert outcomes(DATA / "harbor" / name) == [HARBOR[name]]


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    assert outcomes(DATA / "rows" / name) == ROWS[name]


@pytest.mark.parametrize("name", [n for n, rows in ROWS.items() if VERSION_4 in rows])
def test_rows_of_version_4_are_sound_but_for_the_columns_they_lack(name: str) -> None:
    for fields in read_file(DATA / "rows" / name):
        assert not isinstance(fields, MalformedTaskError)
        row = read_row(fields)
        assert row.fail_to_pass
        assert row.instance_id.startswith(row.repo.replace("/", "__"))


def test_traces() -> None:
    (trace,) = read_traces(str(DATA / "rows" / "swesmith_ft_xml.jsonl"))
    assert isinstance(trace, Trace)
    assert trace.messages[0].role == "system"


def test_predictions() -> None:
    path = DATA / "run_reports" / "pydicom-1458.all_preds.jsonl"
    (prediction,) = read_predictions(str(path))
    assert isinstance(prediction, Prediction)
    assert prediction.instance_id == "pydicom__pydicom-1458"
    assert prediction.model_patch.startswith("\ndiff --git a/pydicom")


@pytest.mark.parametrize(
    ("name", "total", "resolved"),
    [
        ("deepseek__deepseek-chat.deepseek_chat_test_1-100.json", 300, 61),
        ("swe-bench_lite__dev__kimi-k25-baseline.json", 23, 4),
    ],
)
def test_run_reports(name: str, total: int, resolved: int) -> None:
    report = read_report(DATA / "run_reports" / name)
    assert (report.total_instances, len(report.resolved_ids)) == (total, resolved)


def test_a_report_of_swe_smith_is_told_from_one_of_swe_bench() -> None:
    with pytest.raises(MalformedTaskError) as caught:
        read_report(DATA / "run_reports" / "swesmith.run_report.json")
    assert (caught.value.field, caught.value.found) == ("schema_version", "a report of a whole run")
