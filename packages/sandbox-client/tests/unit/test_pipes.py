"""A command's output pipe, during its life and after."""

import asyncio
import os

from sandbox_client.backends.pipes import OutputPipe


async def test_what_a_background_process_writes_is_drained_with_pauses() -> None:
    """Without them one endless writer would keep the service busy for ever."""
    loop = asyncio.get_running_loop()
    pipe = OutputPipe(1000, None, os.pipe2(os.O_CLOEXEC))
    background = os.dup(pipe.write_fd)
    pipe.close_write()
    os.write(background, b"head")
    pipe.watch()
    for _ in range(3):
        await asyncio.sleep(0)
    assert loop.remove_reader(pipe._fd)  # the control: a running command's pipe is watched
    pipe._watched = False
    assert pipe.finish() == b"head"
    os.write(background, b"dropped")
    pipe.watch()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not loop.remove_reader(pipe._fd)
    os.set_blocking(background, False)
    written = 0
    while written < 1 << 20:  # far more than the pipe holds: somebody still reads
        try:
            written += os.write(background, bytes(65536))
        except BlockingIOError:
            await asyncio.sleep(0.01)
    os.close(background)
    pipe.close()
