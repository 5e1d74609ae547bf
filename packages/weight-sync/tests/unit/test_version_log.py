import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from service_kit.errors import StartupError
from weight_sync.core.manifest import PolicyVersion, digest
from weight_sync.errors import Fenced, NumberNotRising
from weight_sync.state import VersionLog
from weight_sync.types import AnnouncedVersion


def announced(run: str, number: int, incarnation: int, **changes: object) -> AnnouncedVersion:
    version = PolicyVersion(
        run=run,
        incarnation=incarnation,
        number=number,
        step=number * 10,
        parent=number - 1,
        root_hash=digest(str(number).encode()),
    )
    values: dict[str, object] = {"payload_bytes": 7, "base": 0, "traceparent": "t"} | changes
    return AnnouncedVersion(version=version, manifest_uri="file:///m", **values)  # type: ignore[arg-type]


def test_remembers_everything_across_a_restart(tmp_path: Path) -> None:
    log = VersionLog(tmp_path)
    assert log.current_run == ""
    assert log.acquire("a", holder="h", known_number=0).incarnation == 1
    log.announce(announced("a", 1, 1))
    log.announce(announced("a", 2, 1, base=1))
    log.acquire("b", holder="h", known_number=0)
    log.close()

    again = VersionLog(tmp_path)
    assert again.current_run == "b"
    assert again.versions("a") == [announced("a", 1, 1), announced("a", 2, 1, base=1)]
    assert again.versions("a", after_number=1) == [announced("a", 2, 1, base=1)]
    assert again.newest("a") == announced("a", 2, 1, base=1)
    assert again.newest("b") is None
    assert again.behind("a", 0) == 2
    # What was announced may still be a base, and the incarnation still publishes.
    again.announce(announced("a", 3, 1, base=2))
    again.close()


def test_an_incarnation_and_a_number_are_never_given_twice(tmp_path: Path) -> None:
    numbers = []
    for life in range(1, 4):
        log = VersionLog(tmp_path)
        record = log.acquire("a", holder="h", known_number=0)
        assert record.incarnation == life
        log.announce(announced("a", record.last_number + 1, life))
        numbers.append(record.last_number + 1)
        with pytest.raises(Fenced if life > 1 else NumberNotRising):
            log.announce(announced("a", record.last_number + 1, max(life - 1, 1), payload_bytes=8))
        log.close()
    assert numbers == [1, 2, 3]


def test_a_checkpoint_that_knows_more_than_a_lost_record_is_believed(tmp_path: Path) -> None:
    log = VersionLog(tmp_path)
    assert log.acquire("a", holder="h", known_number=41).last_number == 41
    log.close()


def test_numbers_rise_over_all_runs_so_that_a_label_names_one_version(tmp_path: Path) -> None:
    log = VersionLog(tmp_path)
    log.acquire("a", holder="h", known_number=0)
    log.announce(announced("a", 5, 1))
    assert log.acquire("b", holder="h", known_number=0).last_number == 5
    log.close()


def test_the_same_announcement_again_is_no_second_version(tmp_path: Path) -> None:
    log = VersionLog(tmp_path)
    log.acquire("a", holder="h", known_number=0)
    assert log.announce(announced("a", 1, 1))
    assert not log.announce(announced("a", 1, 1))
    with pytest.raises(NumberNotRising):
        log.announce(announced("a", 1, 1, payload_bytes=8))
    log.close()


def test_two_services_cannot_share_a_record(tmp_path: Path) -> None:
    log = VersionLog(tmp_path)
    with pytest.raises(StartupError, match="in use by another process; stop the other service"):
        VersionLog(tmp_path)
    log.close()
    VersionLog(tmp_path).close()


def test_a_damaged_or_newer_record_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "versions.sqlite3").write_bytes(b"not a database, not at all" * 100)
    with pytest.raises(StartupError, match="not a usable record of versions"):
        VersionLog(tmp_path)
    (tmp_path / "versions.sqlite3").unlink()
    db = sqlite3.connect(tmp_path / "versions.sqlite3")
    db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(StartupError, match="reads format 1, found 9"):
        VersionLog(tmp_path)


WRITER = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from test_version_log import announced
from weight_sync.state import VersionLog
log = VersionLog(pathlib.Path(sys.argv[1]))
record = log.acquire("a", holder="h", known_number=0)
for number in range(record.last_number + 1, 100_000):
    log.announce(announced("a", number, record.incarnation))
    print(number, flush=True)
"""


def test_what_a_killed_service_had_confirmed_is_still_there(tmp_path: Path) -> None:
    highest = 0
    for life in range(1, 4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                confirmed = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        log = VersionLog(tmp_path)
        versions = log.versions("a")
        assert [v.version.number for v in versions] == list(range(1, len(versions) + 1))
        assert len(versions) >= confirmed > highest
        assert log.record("a").incarnation == life
        assert log.record("a").last_number == len(versions)
        highest = confirmed
        log.close()
