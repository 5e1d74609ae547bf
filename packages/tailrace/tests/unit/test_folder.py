"""A run's folder is never overwritten and survives a kill at any moment."""

from pathlib import Path

import pytest
from tailrace_cli.demo.folder import FolderError, RunFolder, read_events
from tailrace_cli.demo.options import DemoOptions


def clock() -> float:
    return 12.5


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(FolderError, match=r"not empty.*--resume"):
        RunFolder.create(tmp_path, DemoOptions(), clock)
    assert (tmp_path / "precious").read_text() == "x"


def test_resume_goes_on_with_the_options_of_the_start(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", DemoOptions(seed=7, steps=3), clock).close()
    assert RunFolder.resume(tmp_path / "run", clock).options == DemoOptions(seed=7, steps=3)


def test_resume_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="holds no demo run"):
        RunFolder.resume(tmp_path, clock)


def test_resume_names_a_damaged_options_file(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"seed": "many"}')
    with pytest.raises(FolderError, match=r"options\.json is damaged"):
        RunFolder.resume(tmp_path, clock)


def test_events_come_back_in_order_across_a_resume(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", DemoOptions(), clock)
    folder.record("first", value=1)
    folder.close()
    again = RunFolder.resume(tmp_path / "run", clock)
    again.record("second")
    assert [e["kind"] for e in read_events(tmp_path / "run")] == ["first", "second"]
    assert next(read_events(tmp_path / "run"))["time_s"] == 12.5


def test_a_torn_last_event_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", DemoOptions(), clock)
    folder.record("whole")
    with (tmp_path / "run" / "events.jsonl").open("a") as log:
        log.write('{"time_s": 1.0, "ki')
    assert [e["kind"] for e in read_events(tmp_path / "run")] == ["whole"]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", DemoOptions(), clock)
    with (tmp_path / "run" / "events.jsonl").open("a") as log:
        log.write("garbage\n")
    folder.record("after")
    with pytest.raises(FolderError, match="line 1 is damaged"):
        list(read_events(tmp_path / "run"))
