"""Works on ledgers and dies: a program of test_ledger_kills.py.

Usage: python ledger_victim.py FOLDER POINT:NTH ...

For every POINT:NTH a child process works in FOLDER/POINT-NTH and is killed when its ledger comes to
that point for the NTH time. It notes each step in `acknowledged` once the ledger has confirmed it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rollout_engine.ledger.rows import EndedTry, GroupRef
from rollout_engine.ledger.store import Ledger
from rollout_engine.types import Decision, GroupKey, Outcome, Purpose

CONSUMER = "trainer"
GROUPS = 6
ATTEMPTS = 3


def ref(number: int) -> GroupRef:
    return GroupRef(CONSUMER, GroupKey(f"g{number}", 0))


def payload(number: int, index: int) -> bytes:
    return f"attempt {number}/{index} ".encode() * 40


def ended(number: int, index: int, try_number: int = 0) -> EndedTry:
    return EndedTry(
        ref(number),
        index,
        try_number,
        outcome=Outcome.SOLVED,
        turns=1,
        tokens=1,
        ended_at_s=1.0,
        final=True,
        payload=payload(number, index),
    )


async def work(
    folder: Path, acknowledge: Callable[[str], None], probe: Callable[[str], None]
) -> None:
    ledger = await Ledger.open(folder, probe=probe, file_bytes=4000)
    await ledger.hello(CONSUMER, Purpose.TRAINING, 1, 0)
    acknowledge("hello")

    async def run_group(number: int) -> None:
        await ledger.accept(
            ref(number),
            task_id="t",
            attempts=ATTEMPTS,
            assignment=b"assignment",
            credits_=GROUPS,
        )
        acknowledge(f"accepted {number}")

        async def run_attempt(index: int) -> None:
            ledger.lease(ref(number), index, 0, 0, 0)
            await ledger.end_try(ended(number, index))
            acknowledge(f"ended {number} {index}")

        await asyncio.gather(*(run_attempt(index) for index in range(ATTEMPTS)))
        cursor = await ledger.finish_group(ref(number))
        acknowledge(f"finished {number} {cursor}")

    await asyncio.gather(*(run_group(number) for number in range(GROUPS // 2)))
    for number in range(GROUPS // 2, GROUPS):
        await run_group(number)
        if number == GROUPS - 2:
            await ledger.received(CONSUMER, 2**62)
            acknowledge("received")
            await ledger.commit(ref(0), Decision.TRAINED, 1)
            acknowledge("committed 0")
    await ledger.close()


def scenario(folder: Path, point: str, nth: int) -> None:
    folder.mkdir()
    notes = os.open(folder / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = 0

    def probe(at: str) -> None:
        nonlocal seen
        seen += at == point
        if at == point and seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def acknowledge(text: str) -> None:
        os.write(notes, text.encode() + b"\n")

    asyncio.run(work(folder / "ledger", acknowledge, probe))


def main() -> None:
    folder = Path(sys.argv[1])
    for text in sys.argv[2:]:
        point, nth = text.split(":")
        child = os.fork()
        if child == 0:
            scenario(folder / f"{point}-{nth}", point, int(nth))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        sys.stdout.write(f"{point}:{nth} {'killed' if killed else f'ended {status}'}\n")


if __name__ == "__main__":
    main()
