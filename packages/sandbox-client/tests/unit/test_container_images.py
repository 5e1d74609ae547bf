"""Decisions about images, and the prefetcher over images that need no daemon."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.backends.docker.budget import OwnBudget
from sandbox_client.backends.docker.prefetch import Prefetcher
from sandbox_client.core.images import DiskUse, KnownImage, removal_order
from sandbox_client.errors import QuotaExhausted, SandboxUnavailable
from sandbox_client.types import ImageStage


@given(
    st.lists(
        st.builds(KnownImage, st.uuids().map(str), st.floats(0, 1e9), st.booleans()), max_size=20
    )
)
def test_images_go_longest_unused_first_and_never_while_in_use(images: list[KnownImage]) -> None:
    by_id = {image.image_id: image for image in images}
    order = [by_id[image_id] for image_id in removal_order(images)]
    assert {image.image_id for image in order} == {i.image_id for i in images if not i.in_use}
    assert [i.used_at for i in order] == sorted(i.used_at for i in order)


def test_a_disks_share_counts_what_can_still_be_written() -> None:
    assert DiskUse(100, 15).share == pytest.approx(0.85)
    assert DiskUse(0, 0).share == 0.0


async def test_the_budget_refuses_with_the_time_until_there_is_a_pull() -> None:
    now = 0.0
    budget = OwnBudget(2, clock=lambda: now)
    await budget.take("a")
    now = 600.0
    await budget.take("b")
    with pytest.raises(QuotaExhausted, match="2 pulls") as caught:
        await budget.take("c")
    assert caught.value.retry_after_s == pytest.approx(3000.0)
    (gauge,) = budget.limiters()
    assert (gauge.name, gauge.limit, gauge.in_use) == ("docker.image_pulls_per_hour", 2.0, 2.0)
    now = 3600.0
    await budget.take("c")


class Daemon:
    """Images of a registry without a daemon."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.pulled: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.slept: list[float] = []
        self.wake = asyncio.Event()

    async def pull(self, image: str) -> None:
        self.pulled.append(image)
        await asyncio.sleep(0)
        if self.errors.get(image):
            raise self.errors[image].pop(0)
        self.present.add(image)

    async def is_present(self, image: str) -> bool:
        return image in self.present

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wake.wait()

    def prefetcher(self) -> Prefetcher:
        return Prefetcher(self.pull, self.is_present, sleep=self.sleep)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_images_are_pulled_in_order_and_each_once() -> None:
    daemon = Daemon()
    daemon.present = {"b"}
    fetching = daemon.prefetcher()
    for _ in range(2):
        asked = await fetching.ask(["a", "b", "c"])
        assert [i.stage for i in asked] == [
            *(ImageStage.PULLING, ImageStage.PRESENT, ImageStage.PULLING),
        ]
    await settle()
    assert daemon.pulled == ["a", "c"]
    assert {i.stage for i in await fetching.ask(["a", "b", "c"])} == {ImageStage.PRESENT}
    await fetching.close()


async def test_a_used_up_budget_makes_the_whole_line_wait() -> None:
    daemon = Daemon()
    daemon.errors["a"] = [QuotaExhausted("used up", retry_after_s=1200.0)]
    fetching = daemon.prefetcher()
    await fetching.ask(["a", "b"])
    await settle()
    assert (daemon.pulled, daemon.slept) == (["a"], [1200.0])
    (first, _) = await fetching.ask(["a", "b"])
    assert (first.stage, first.message) == (ImageStage.PULLING, "used up")
    daemon.wake.set()
    await settle()
    assert daemon.pulled == ["a", "a", "b"]
    await fetching.close()


async def test_a_failure_is_told_then_tried_again() -> None:
    daemon = Daemon()
    daemon.errors["a"] = [SandboxUnavailable("no route"), ValueError("odd")]
    fetching = daemon.prefetcher()
    await fetching.ask(["a", "b"])
    await settle()
    assert "b" in daemon.present  # it does not hold up the others
    for message in ("no route", "ValueError('odd')"):
        (told,) = await fetching.ask(["a"])
        assert (told.stage, told.message) == (ImageStage.FAILED, message)
        (again,) = await fetching.ask(["a"])
        assert again.stage is ImageStage.PULLING
        await settle()
    assert "a" in daemon.present
    await fetching.close()


async def test_closing_stops_the_pull_under_way() -> None:
    daemon = Daemon()
    daemon.errors["a"] = [QuotaExhausted("used up", retry_after_s=1200.0)]
    fetching = daemon.prefetcher()
    await fetching.ask(["a"])
    await settle()
    await fetching.close()
    daemon.wake.set()
    await settle()
    assert daemon.pulled == ["a"]
