from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from grpo_trainer.errors import DiskFull
from grpo_trainer.events import EventKind, EventLog


async def test_events_outlive_the_process(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    await log.append(EventKind.NOTE, {"text": "a"})
    await log.append(EventKind.STEP, {"step": 1, "values": {"x": 0.5}, "counts": {"n": 2}})
    again = EventLog(tmp_path / "events.jsonl")
    assert again.events == log.events
    assert (await again.append(EventKind.NOTE, {"text": "b"})).cursor == 3


async def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    await EventLog(file).append(EventKind.NOTE, {"text": "whole"})
    with file.open("a") as stream:
        stream.write('{"kind": "note", "te')
    log = EventLog(file)
    assert [event.data["text"] for event in log.events] == ["whole"]
    await log.append(EventKind.NOTE, {"text": "after"})
    assert len(EventLog(file).events) == 2


async def test_followers_see_what_was_and_what_comes(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for text in "abc":
        await log.append(EventKind.NOTE, {"text": text})
    seen = []

    async def follow() -> None:
        async for event in log.follow(1):
            seen.append(event.data["text"])
            if event.data["text"] == "e":
                return

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(0)
    await log.append(EventKind.NOTE, {"text": "d"})
    await log.append(EventKind.NOTE, {"text": "e"})
    await asyncio.wait_for(following, 5)
    assert seen == list("bcde")


async def test_figures_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    values = {"good": 1.0, "bad": float("nan"), "worse": float("inf")}
    event = await log.append(EventKind.STEP, {"step": 1, "values": values, "counts": {}})
    assert event.data["values"] == {"good": 1.0}
    assert EventLog(tmp_path / "events.jsonl").events == (event,)


async def test_on_a_full_disk_watchers_still_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DiskFull, match="no space"):
        await log.append(EventKind.NOTE, {"text": "lost on disk"})
    assert [event.data["text"] for event in log.events] == ["lost on disk"]
