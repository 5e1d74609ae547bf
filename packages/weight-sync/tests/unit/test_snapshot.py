"""When a publisher may send a delta, and against which bytes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from weight_sync.codecs import Tensor
from weight_sync.config import PublishConfig
from weight_sync.snapshot import Snapshot, take_snapshot

CONFIG = PublishConfig(codec="ulp-gap", anchor_every=3, dense_above=0.5)


def model(step: int, size: int = 100) -> list[Tensor]:
    words = np.arange(size, dtype=np.uint16)
    words[: size // 10] += np.uint16(step)
    return [Tensor("w", "BF16", (size,), words.view(np.uint8).data)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_anchors_come_every_so_often(pool: ThreadPoolExecutor) -> None:
    snapshot: Snapshot | None = None
    anchors = []
    for number in range(1, 8):
        tensors = model(number)
        base = snapshot.base_for(tensors, CONFIG) if snapshot else None
        anchors.append(base is None)
        snapshot = take_snapshot(
            snapshot, tensors, number=number, is_anchor=base is None, pool=pool
        )
        assert snapshot.number == number
    assert anchors == [True, False, False, True, False, False, True]


def test_the_base_is_a_copy_that_the_trainer_cannot_change(pool: ThreadPoolExecutor) -> None:
    tensors = model(1)
    snapshot = take_snapshot(None, tensors, number=1, is_anchor=True, pool=pool)
    before = bytes(tensors[0].data)
    tensors[0].words()[:] = 7
    assert bytes(snapshot.tensors["w"].data) == before


def test_a_newer_copy_takes_the_memory_of_the_older(pool: ThreadPoolExecutor) -> None:
    first = take_snapshot(None, model(1), number=1, is_anchor=True, pool=pool)
    second = take_snapshot(first, model(2), number=2, is_anchor=False, pool=pool)
    assert second.tensors["w"].data.obj is first.tensors["w"].data.obj
    assert second.tensors["w"].data == model(2)[0].data


def test_what_does_not_fit_the_base_is_an_anchor(pool: ThreadPoolExecutor) -> None:
    snapshot = take_snapshot(None, model(1), number=1, is_anchor=True, pool=pool)
    assert snapshot.base_for(model(2), CONFIG) is not None
    other = Tensor("x", "BF16", (100,), model(2)[0].data)
    reshaped = Tensor("w", "BF16", (10, 10), model(2)[0].data)
    retyped = Tensor("w", "F16", (100,), model(2)[0].data)
    for tensors in (model(2, 110), [other], [reshaped], [retyped], [*model(2), other], []):
        assert snapshot.base_for(tensors, CONFIG) is None


def test_a_version_of_which_too_much_changed_is_an_anchor(pool: ThreadPoolExecutor) -> None:
    snapshot = take_snapshot(None, model(1), number=1, is_anchor=True, pool=pool)
    new = model(1)
    new[0].words()[:50] ^= 1
    assert snapshot.base_for(new, CONFIG) is not None
    new[0].words()[:51] = 0xFFFF
    assert snapshot.base_for(new, CONFIG) is None
