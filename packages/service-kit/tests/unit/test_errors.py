from __future__ import annotations

import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from service_kit import (
    FailedPrecondition,
    Internal,
    NotFound,
    Reason,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    error_from_rpc,
    service_error,
)
from service_kit.errors import DOMAIN, REASON_TRAITS, STATUS_DETAILS_KEY, status_from_error
from tailrace.common.v1 import errors_pb2

PREFIX = "ERROR_REASON_"


def _over_the_wire(error: ServiceError) -> ServiceError:
    return _decoded(error.code, status_from_error(error))


def _decoded(code: grpc.StatusCode, status: status_pb2.Status) -> ServiceError:
    trailers = grpc.aio.Metadata((STATUS_DETAILS_KEY, status.SerializeToString()))
    return error_from_rpc(
        grpc.aio.AioRpcError(code, trailing_metadata=trailers, details=status.message)
    )


def test_the_reasons_are_those_of_the_contract() -> None:
    names = [value.name for value in errors_pb2.ErrorReason.DESCRIPTOR.values]
    assert all(name.startswith(PREFIX) for name in names)
    assert [name.removeprefix(PREFIX) for name in names] == [reason.value for reason in Reason]
    assert [reason.name for reason in Reason] == [reason.value for reason in Reason]


def test_every_reason_has_a_status_code_and_a_class() -> None:
    assert set(REASON_TRAITS) == set(Reason)
    for reason in Reason:
        made = service_error(reason, "x")
        assert made.reason is reason
        assert made.code is REASON_TRAITS[reason].code
        assert made.code is not grpc.StatusCode.OK
        if reason is not Reason.UNSPECIFIED:
            assert type(made) is not ServiceError


def test_only_unavailable_reasons_are_left_to_a_channels_own_retries() -> None:
    unavailable = {r for r, t in REASON_TRAITS.items() if t.code is grpc.StatusCode.UNAVAILABLE}
    assert unavailable == {Reason.UNAVAILABLE, Reason.DRAINING}


@given(
    reason=st.sampled_from(Reason),
    message=st.text(st.characters(codec="utf-8"), max_size=80),
    retryable=st.booleans(),
    wait_ms=st.none() | st.integers(1, 10**7),
    metadata=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=8), st.text("xyz", max_size=20)
    ),
)
def test_an_error_survives_the_wire(
    reason: Reason, message: str, retryable: bool, wait_ms: int | None, metadata: dict[str, str]
) -> None:
    wait_s = wait_ms / 1000 if wait_ms is not None and retryable else None
    sent = service_error(
        reason, message, retryable=retryable, retry_after_s=wait_s, metadata=metadata
    )
    received = _over_the_wire(sent)
    assert type(received) is type(sent)
    assert received.code is sent.code
    assert received.message == message
    assert received.reason is reason
    assert received.retryable is retryable
    assert received.retry_after_s == wait_s
    assert received.metadata == metadata
    assert received.domain == DOMAIN


@given(st.text(max_size=5000), st.dictionaries(st.text(max_size=9), st.text(max_size=5000)))
def test_whatever_the_text_the_trailers_stay_below_grpcs_limit(
    message: str, metadata: dict[str, str]
) -> None:
    status = status_from_error(
        NotFound(
            message.encode(errors="replace").decode(),
            metadata={
                k.encode(errors="replace").decode(): v.encode(errors="replace").decode()
                for k, v in metadata.items()
            },
        )
    )
    percent_encoded = sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in status.message.encode())
    assert percent_encoded + len(status.SerializeToString()) < 6000


def test_a_reason_of_a_newer_peer_is_kept_for_the_log_and_falls_back_to_the_code() -> None:
    status = status_pb2.Status(code=9, message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BRAND_NEW", domain=DOMAIN))
    received = _decoded(grpc.StatusCode.FAILED_PRECONDITION, status)
    assert isinstance(received, FailedPrecondition)
    assert received.reason is Reason.FAILED_PRECONDITION
    assert received.metadata == {"reason": "BRAND_NEW"}


def test_a_status_that_a_proxy_replaced_is_believed_over_the_details() -> None:
    received = _decoded(grpc.StatusCode.UNAVAILABLE, status_from_error(NotFound("old")))
    assert isinstance(received, Unavailable)


@pytest.mark.parametrize(
    ("code", "details", "kind", "reason", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", Unavailable, Reason.UNAVAILABLE, True),
        (grpc.StatusCode.UNKNOWN, "?", ServiceError, Reason.INTERNAL, False),
        (grpc.StatusCode.INTERNAL, "?", Internal, Reason.INTERNAL, False),
        (grpc.StatusCode.PERMISSION_DENIED, "no", ServiceError, Reason.UNAUTHENTICATED, False),
        (grpc.StatusCode.UNAUTHENTICATED, "no", Unauthenticated, Reason.UNAUTHENTICATED, False),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (5 vs. 4)",
            ResourceExhausted,
            Reason.TOO_LARGE,
            False,
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Concurrent RPC limit exceeded!",
            ResourceExhausted,
            Reason.QUOTA_EXHAUSTED,
            True,
        ),
    ],
)
def test_a_bare_status_is_read_by_its_code(
    code: grpc.StatusCode, details: str, kind: type, reason: Reason, retryable: bool
) -> None:
    received = error_from_rpc(grpc.aio.AioRpcError(code, details=details), where="a/B at c")
    assert type(received) is kind
    assert received.code is code
    assert received.reason is reason
    assert received.retryable is retryable
    assert received.message == f"a/B at c: {details}"
    assert received.domain == ""


def test_every_status_code_makes_an_error() -> None:
    for code in grpc.StatusCode:
        received = error_from_rpc(grpc.aio.AioRpcError(code))
        assert received.code is code
        assert received.message


def test_an_error_can_be_pickled() -> None:
    sent = ResourceExhausted("full", retry_after_s=2.0, metadata={"a": "b"})
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is ResourceExhausted
    assert vars(received) == vars(sent)


def test_the_text_is_the_message_and_the_repr_tells_reason_and_retry() -> None:
    error = NotFound("no sandbox s1", reason=Reason.SANDBOX_GONE)
    assert str(error) == "no sandbox s1"
    assert repr(error) == "NotFound('no sandbox s1', reason=SANDBOX_GONE, retryable=False)"
