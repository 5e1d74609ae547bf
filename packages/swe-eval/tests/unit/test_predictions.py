"""Predictions and reports of runs: what is written is read back, what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swe_eval.errors import MalformedTaskError
from swe_eval.predictions import Prediction, read_predictions, write_predictions
from swe_eval.run_report import RunOutcome, RunReport, read_report, report_name

ROW = {"instance_id": "a", "model_name_or_path": "m", "model_patch": "diff --git a/x b/x\n"}


def problems(path: Path, rows: object) -> list[MalformedTaskError]:
    path.write_text(json.dumps(rows))
    return [p for p in read_predictions(str(path)) if isinstance(p, MalformedTaskError)]


@given(
    st.lists(
        st.builds(Prediction, *[st.text('ab\nü\u2028"', min_size=1)] * 3),
        max_size=4,
        unique_by=lambda p: p.instance_id,
    )
)
def test_predictions_survive_the_way_through_a_file(
    tmp_path_factory: pytest.TempPathFactory, predictions: list[Prediction]
) -> None:
    predictions = [p for p in predictions if p.instance_id.strip() and p.model_name_or_path.strip()]
    path = tmp_path_factory.mktemp("p") / "predictions.jsonl"
    write_predictions(path, predictions)
    assert list(read_predictions(str(path))) == predictions
    assert all(len(json.loads(line)) == 3 for line in path.read_text().splitlines() if line)


def test_lists_and_objects_by_instance_are_read_and_null_is_no_submission(tmp_path: Path) -> None:
    for form in ([{**ROW, "model_patch": None}], {"a": {**ROW, "model_patch": None}}):
        (tmp_path / "p.json").write_text(json.dumps(form))
        assert list(read_predictions(str(tmp_path / "p.json"))) == [Prediction("a", "m", "")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_patch": 3}, "model_patch"),
        ({"instance_id": ""}, "instance_id"),
        ({"model_name_or_path": None}, "model_name_or_path"),
    ],
)
def test_a_wrong_prediction_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    (problem,) = problems(tmp_path / "p.json", [{**ROW, **change}])
    assert (problem.line, problem.field) == (1, field)


def test_a_missing_patch_and_a_second_prediction_are_malformed(tmp_path: Path) -> None:
    misnamed = {"instance_id": "b", "model_name_or_path": "m", "patch": "x"}
    found = problems(tmp_path / "p.json", [ROW, misnamed, ROW])
    assert [(p.line, p.field) for p in found] == [(2, "model_patch"), (3, "instance_id")]


OUTCOMES = {
    "a": RunOutcome.RESOLVED,
    "b": RunOutcome.UNRESOLVED,
    "c": RunOutcome.EMPTY_PATCH,
    "d": RunOutcome.FAULT,
}


def test_a_run_is_reported_as_swe_benchs_harness_does() -> None:
    report = RunReport.of(["e", "d", "c", "b", "a"], OUTCOMES, {"d": "image_pull"})
    assert json.loads(report.as_json()) == {
        "total_instances": 5,
        "submitted_instances": 4,
        "completed_instances": 2,
        "resolved_instances": 1,
        "unresolved_instances": 1,
        "infra_failure_instances": 1,
        "ambiguous_failure_instances": 0,
        "empty_patch_instances": 1,
        "error_instances": 1,
        "completed_ids": ["a", "b"],
        "incomplete_ids": ["e"],
        "empty_patch_ids": ["c"],
        "submitted_ids": ["a", "b", "c", "d"],
        "resolved_ids": ["a"],
        "unresolved_ids": ["b"],
        "infra_failure_ids": ["d"],
        "ambiguous_failure_ids": [],
        "failure_reasons": {"d": "image_pull"},
        "error_ids": ["d"],
        "schema_version": 2,
    }
    assert report_name("org/model", "run 1") == "org__model.run 1.json"


def test_a_submission_outside_the_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'z'"):
        RunReport.of(["a"], {"z": RunOutcome.RESOLVED})


@given(st.dictionaries(st.text("abc", min_size=1), st.sampled_from(RunOutcome)))
def test_a_report_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, outcomes: dict[str, RunOutcome]
) -> None:
    report = RunReport.of({*outcomes, "more"}, outcomes)
    path = tmp_path_factory.mktemp("r") / "report.json"
    path.write_text(report.as_json())
    assert read_report(path) == report


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"resolved_instances": 2}, "resolved_instances"),
        ({"resolved_ids": ["b"]}, "completed_ids"),
        ({"error_ids": "d"}, "error_ids"),
        ({"total_instances": "5"}, "total_instances"),
        ({"schema_version": 1}, "schema_version"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    values = json.loads(RunReport.of("abcde", OUTCOMES).as_json())
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**values, **change}))
    with pytest.raises(MalformedTaskError) as caught:
        read_report(path)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(MalformedTaskError, match="report"):
        read_report(tmp_path / "report.json")
    with pytest.raises(MalformedTaskError, match="report"):
        read_report(tmp_path / "absent.json")
