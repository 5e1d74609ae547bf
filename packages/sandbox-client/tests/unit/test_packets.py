# ruff: noqa: PTH208 -- counts this process's descriptors
import asyncio
import os
import socket

import pytest
from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.packets import PacketSender


async def receive_all(channel: socket.socket, count: int) -> list[tuple[wire.Message, list[int]]]:
    loop = asyncio.get_running_loop()
    got: list[tuple[wire.Message, list[int]]] = []
    done = loop.create_future()

    def readable() -> None:
        received = wire.receive(channel, max_fds=2)
        assert received is not None
        got.append(received)
        if len(got) == count:
            done.set_result(None)

    loop.add_reader(channel.fileno(), readable)
    async with asyncio.timeout(20):
        await done
    loop.remove_reader(channel.fileno())
    return got


async def test_more_packets_than_there_is_room_for_arrive_in_order_with_their_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        sender = PacketSender(ours, lambda why: pytest.fail(why))
        for number in range(3000):
            read_fd, write_fd = os.pipe()
            os.write(write_fd, str(number).encode())
            os.close(write_fd)
            sender.send({"number": number, "padding": "x" * 500}, [read_fd])
            os.close(read_fd)
            if number % 100 == 99:
                got = await receive_all(theirs, 100)
                for place, (message, fds) in enumerate(got, number - 99):
                    assert message["number"] == place
                    assert os.read(fds[0], 10) == str(place).encode()
                    assert not os.get_inheritable(fds[0])
                    os.close(fds[0])
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            sender.send({"number": number, "padding": "x" * 500}, [ours.fileno()])
        sender.close()
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_channel_that_breaks_while_packets_wait_is_told_of() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with ours:
        ours.setblocking(False)
        sender = PacketSender(ours, told.set_result)
        for number in range(2000):
            sender.send({"number": number})
        theirs.close()
        async with asyncio.timeout(10):
            assert await told


async def test_a_message_that_cannot_fit_is_refused_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        sender = PacketSender(ours, lambda why: pytest.fail(why))
        for _ in range(2):
            with pytest.raises(ValueError, match="at most"):
                sender.send({"big": "x" * wire.MAX_PACKET_BYTES})
            # The second time others wait in line already.
            for number in range(2000):
                sender.send({"number": number})
        sender.close()


def test_a_packet_that_is_no_message_is_refused_and_its_descriptors_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for raw in (b"not json", b"[1]", b"\xff"):
            socket.send_fds(ours, [raw], [ours.fileno()])
            with pytest.raises(ValueError, match="not a message"):
                wire.receive(theirs, max_fds=2)
        assert len(os.listdir("/proc/self/fd")) == before
        ours.close()
        assert wire.receive(theirs) is None
