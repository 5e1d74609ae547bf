# ruff: noqa: PTH208 -- counts this process's descriptors
import asyncio
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_client.backends.local.jail import wire
from sandbox_client.backends.local.jail.messages import Create, Exec
from sandbox_client.backends.local.packets import PacketSender

# What a process can be given: any bytes but NUL.
TEXT = st.binary(max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))


async def receive_all(channel: socket.socket, count: int) -> list[tuple[wire.Reader, list[int]]]:
    loop = asyncio.get_running_loop()
    got: list[tuple[wire.Reader, list[int]]] = []
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
            sender.send(number, "x" * 500, fds=[read_fd])
            os.close(read_fd)
            if number % 100 == 99:
                got = await receive_all(theirs, 100)
                for place, (fields, fds) in enumerate(got, number - 99):
                    assert fields.number() == place
                    assert os.read(fds[0], 10) == str(place).encode()
                    assert not os.get_inheritable(fds[0])
                    os.close(fds[0])
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            sender.send(number, "x" * 500, fds=[ours.fileno()])
        sender.close()
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_channel_that_breaks_while_packets_wait_is_told_of() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with ours:
        ours.setblocking(False)
        sender = PacketSender(ours, told.set_result)
        for number in range(2000):
            sender.send(number)
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
                sender.send("x" * wire.MAX_PACKET_BYTES)
            # The second time others wait in line already.
            for number in range(2000):
                sender.send(number)
        sender.close()


def test_a_packet_that_is_no_message_is_refused_and_its_descriptors_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for raw in (b"no end", b"\xff", b"x" * wire.MAX_PACKET_BYTES + b"\0"):
            socket.send_fds(ours, [raw], [ours.fileno()])
            with pytest.raises(ValueError, match="not a message"):
                wire.receive(theirs, max_fds=2)
        assert len(os.listdir("/proc/self/fd")) == before
        ours.close()
        assert wire.receive(theirs) is None


def test_a_field_with_an_end_in_it_is_not_sent_as_two() -> None:
    with pytest.raises(ValueError, match="NUL"):
        wire.encode("exec", "one\0two")


@given(
    st.builds(
        Exec,
        number=st.integers(0),
        cwd=TEXT,
        shell=st.none() | TEXT,
        argv=st.lists(TEXT),
        environ=st.dictionaries(TEXT.filter(lambda name: "=" not in name), TEXT),
    )
)
def test_a_command_arrives_as_it_was_sent(asked: Exec) -> None:
    fields = wire.Reader(wire.encode(*asked.fields()))
    assert fields.text() == "exec"
    assert Exec.read(fields) == asked


@given(
    st.builds(
        Create,
        sandbox_id=TEXT,
        workdir=TEXT,
        rlimits=st.lists(st.tuples(st.integers(), st.integers())).map(tuple),
        disk_bytes=st.integers(0),
        inodes=st.integers(0),
        lower=st.lists(TEXT),
        mounts=st.dictionaries(st.integers(0), TEXT),
    )
)
def test_what_a_sandbox_is_to_be_arrives_as_it_was_sent(asked: Create) -> None:
    fields = wire.Reader(wire.encode(*asked.fields()))
    assert fields.text() == "create"
    assert Create.read(fields) == asked
