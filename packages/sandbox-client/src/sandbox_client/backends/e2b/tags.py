"""What the service writes on its sandboxes at E2B, and reads again after a restart. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox_client.types import EnvironmentRef, SandboxClaim

__all__ = ["SANDBOX_TAG", "SERVICE_TAG", "Tags"]

SERVICE_TAG = "tailrace-service"
SANDBOX_TAG = "tailrace-sandbox"
_REST_TAG = "tailrace-claim"


@dataclass(frozen=True)
class Tags:
    """The metadata of one sandbox."""

    service: str
    """The service that made it; no two have the same."""
    sandbox_id: str
    workdir: str
    before: str
    """Digest of the tree that it started from; empty if that is not known by a digest."""
    template: str
    env: Mapping[str, str] = field(default_factory=dict)
    claim: SandboxClaim | None = None
    """Who asked for it; None for one that nobody had asked for yet."""

    def metadata(self) -> dict[str, str]:
        """As E2B keeps it."""
        claim = self.claim
        rest = {
            "workdir": self.workdir,
            "before": self.before,
            "template": self.template,
            "env": dict(self.env),
            "claim": None
            if claim is None
            else [claim.owner, claim.key, claim.fingerprint, dict(claim.labels)],
        }
        return {
            SERVICE_TAG: self.service,
            SANDBOX_TAG: self.sandbox_id,
            _REST_TAG: json.dumps(rest, sort_keys=True),
        }

    @property
    def environment(self) -> EnvironmentRef:
        """What it started from, as far as a later run can name it."""
        return EnvironmentRef(template=self.template, workdir=self.workdir, env=self.env)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "Tags | None":
        """The tags in a sandbox's metadata; None if they are not a service's of this version."""
        try:
            rest = json.loads(metadata[_REST_TAG])
            claim = rest["claim"]
            return cls(
                metadata[SERVICE_TAG],
                metadata[SANDBOX_TAG],
                str(rest["workdir"]),
                str(rest["before"]),
                str(rest["template"]),
                {str(name): str(value) for name, value in rest["env"].items()},
                None if claim is None else SandboxClaim(*claim),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
