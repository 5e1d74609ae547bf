"""Bearer tokens and TLS files."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

import grpc
import pydantic

from service_kit.errors import StartupError

AUTHORIZATION = "authorization"
MIN_TOKEN_LENGTH = 16


def read_token(token: pydantic.SecretStr | None, file: Path | None) -> str | None:
    """Return the token from the setting or the file, whichever is given, or None.

    Raises:
        StartupError: If the file cannot be read, or the token is too short or not plain ASCII.
    """
    if token is not None:
        text, source = token.get_secret_value(), "token"
    elif file is not None:
        text, source = _read(file, "token_file").decode("utf-8", errors="replace"), str(file)
    else:
        return None
    text = text.strip()
    if len(text) < MIN_TOKEN_LENGTH or not text.isascii() or not text.isprintable():
        raise StartupError(
            f"{source}: expected a token of at least {MIN_TOKEN_LENGTH} printable ASCII "
            f"characters, found {len(text)}; make one with: openssl rand -hex 32"
        )
    return text


def bearer(token: str) -> tuple[str, str]:
    """Return the metadata entry that carries the token."""
    return AUTHORIZATION, f"Bearer {token}"


def carries_token(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Tell, in time that does not depend on the content, whether the metadata holds the token."""
    expected = f"Bearer {token}".encode()
    for key, value in metadata:
        if key == AUTHORIZATION:
            found = value.encode() if isinstance(value, str) else value
            if hmac.compare_digest(found, expected):
                return True
    return False


def server_credentials(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCredentials:
    """Load a server's TLS files; with `client_ca`, clients must show a certificate it signed."""
    chain = _read(certificate, "tls_certificate")
    private_key = _read(key, "tls_key")
    roots = _read(client_ca, "tls_client_ca") if client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(private_key, chain)], root_certificates=roots, require_client_auth=roots is not None
    )


def channel_credentials(
    ca: Path | None, certificate: Path | None, key: Path | None
) -> grpc.ChannelCredentials:
    """Load a client's TLS files; without `ca` the system's roots are trusted."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(ca, "tls_ca") if ca is not None else None,
        private_key=_read(key, "tls_key") if key is not None else None,
        certificate_chain=_read(certificate, "tls_certificate") if certificate else None,
    )


def _read(file: Path, setting: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"{setting}: cannot read {file}: {error.strerror}") from error
