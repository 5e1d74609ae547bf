"""Whatever the ledger has confirmed is there after a SIGKILL at any point of its commits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from rollout_engine.core.group import SlotStatus
from rollout_engine.ledger.rows import Delivery
from rollout_engine.ledger.store import Ledger
from rollout_engine.types import FaultCause, Purpose
from service_kit.errors import Reason, ServiceError

VICTIM = Path(__file__).with_name("ledger_victim.py")
POINTS = ("written", "synced", "committed", "pruned")
SCENARIOS = [(point, nth) for nth in (1, 2, 4, 5, 7, 9, 12, 15) for point in POINTS]


def load_victim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ledger_victim", VICTIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


victim = load_victim()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    arguments = [f"{point}:{nth}" for point, nth in SCENARIOS]
    done = subprocess.run(
        [sys.executable, str(VICTIM), str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split("\n")[:-1] == [f"{argument} killed" for argument in arguments]
    return folder


def acknowledged(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    notes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for line in (folder / "acknowledged").read_text().splitlines():
        name, *numbers = line.split()
        notes[name].append(tuple(map(int, numbers)))
    return notes


@pytest.mark.parametrize(("point", "nth"), SCENARIOS, ids=lambda value: str(value))
async def test_nothing_confirmed_is_lost_and_all_work_can_be_finished(
    killed: Path, point: str, nth: int
) -> None:
    folder = killed / f"{point}-{nth}"
    notes = acknowledged(folder)
    ledger = await Ledger.open(folder / "ledger", file_bytes=4000)
    reconnection = await ledger.hello(victim.CONSUMER, Purpose.TRAINING, 1, 0)
    known = {group.key.group_id: group for group in reconnection.groups}
    running = {group.ref.key.group_id: group for group in ledger.recovery.groups}
    committed = {number for (number,) in notes["committed"]}

    # Group 0 may be gone by a commit that was written and not yet confirmed.
    for (number,) in notes["accepted"]:
        assert f"g{number}" in known or number == 0
    for number, index in notes["ended"]:
        group = running.get(f"g{number}")
        if group is not None:
            assert group.slots[index].status is SlotStatus.VALID
        elif number != 0:
            assert known[f"g{number}"].standing in ("FINISHED", "RECEIVED")
    for number, cursor in notes["finished"]:
        if number not in committed and f"g{number}" in known:
            assert known[f"g{number}"].cursor == cursor
    for number in committed:
        assert f"g{number}" not in known

    await finish_all(ledger)
    cursors = []
    after = 0
    delivered = set()
    while isinstance(delivery := await ledger.deliverable(victim.CONSUMER, after), Delivery):
        after = delivery.cursor
        number = int(delivery.key.group_id[1:])
        delivered.add(number)
        cursors.append(delivery.cursor)
        assert [a.payload for a in delivery.attempts] == [
            victim.payload(number, index) for index in range(victim.ATTEMPTS)
        ]
        assert {f.fault.cause for f in delivery.faulted_tries} <= {FaultCause.RESTART}
    assert cursors == sorted(set(cursors))
    assert delivered | committed >= set(range(victim.GROUPS)) - {0}
    assert 0 in delivered or await refused_as_committed(ledger)
    await ledger.close()


async def finish_all(ledger: Ledger) -> None:
    """Go on as an engine and its consumer would: assign what is missing, run what was cut off."""
    slots = {g.ref: g.slots for g in ledger.recovery.groups}
    for number in range(victim.GROUPS):
        ref = victim.ref(number)
        if ref not in slots and not await assign(ledger, number):
            continue
        known = slots.get(ref, {})
        todo = [
            index
            for index in range(victim.ATTEMPTS)
            if index not in known or known[index].status is SlotStatus.PENDING
        ]
        for index in todo:
            try_number = known[index].try_number if index in known else 0
            await ledger.end_try(victim.ended(number, index, try_number))
        await ledger.finish_group(ref)


async def assign(ledger: Ledger, number: int) -> bool:
    """Assign a group as a resuming consumer does; whether it is to be run."""
    try:
        acceptance = await ledger.accept(
            victim.ref(number),
            task_id="t",
            attempts=victim.ATTEMPTS,
            assignment=b"assignment",
            credits_=victim.GROUPS,
        )
    except ServiceError as error:
        if error.reason is not Reason.ALREADY_EXISTS:
            raise
        return False
    return acceptance.new


async def refused_as_committed(ledger: Ledger) -> bool:
    with pytest.raises(ServiceError, match="COMMITTED"):
        await ledger.accept(
            victim.ref(0),
            task_id="t",
            attempts=victim.ATTEMPTS,
            assignment=b"assignment",
            credits_=victim.GROUPS,
        )
    return True
