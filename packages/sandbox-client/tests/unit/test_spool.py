"""Files on their way: none takes more than one call may, and all together no more than a quota."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_client.errors import QuotaExhausted, TooLarge
from sandbox_client.limiter import Quota
from sandbox_client.spool import Spool


def spool(folder: Path, *, quota: int, most: int) -> Spool:
    return Spool(folder, Quota("spool_bytes", quota, 1.0), most)


async def parts(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)


@pytest.mark.parametrize("most", [100, 3 << 20])  # in memory; on disk, where it went meanwhile
def test_a_file_refuses_what_would_make_it_too_large(tmp_path: Path, most: int) -> None:
    with spool(tmp_path, quota=most * 2, most=most).file() as (file, _):
        file.write(bytes(most - 1))
        with pytest.raises(TooLarge, match=r"limits\.upload_bytes"):
            file.write(b"12")
        file.write(b"1")
        assert file.tell() == most
        file.seek(0)
        file.write(b"over what is there")


async def test_collecting_stops_at_the_bound_of_one_call_or_of_all(tmp_path: Path) -> None:
    shared = spool(tmp_path, quota=150, most=100)
    async with shared.collected(parts(60, 40)) as file:
        assert len(file.read()) == 100
        with pytest.raises(QuotaExhausted):
            async with shared.collected(parts(60)):
                pass
    with pytest.raises(TooLarge):
        async with shared.collected(parts(60, 41)):
            pass
    assert shared.status().in_use == 0
