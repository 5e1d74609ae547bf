"""What sandboxes can start from: templates of the configuration, built ones, and snapshots."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox_client.core.trees import is_digest
from sandbox_client.e2b_api.config import BASE_TEMPLATE, E2BTemplateConfig
from sandbox_client.e2b_api.errors import ApiError
from sandbox_client.environments import EnvironmentTree
from sandbox_client.types import EnvironmentRef, SandboxLimits

__all__ = ["EMPTY_TREE", "Catalog", "Template"]

EMPTY_TREE = EnvironmentTree({})


@dataclass(frozen=True)
class Template:
    """One thing to start from. `source` is the sandbox that a snapshot was taken of."""

    template_id: str
    environment: EnvironmentRef
    names: tuple[str, ...] = ()
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    source: str = ""


class Catalog:
    """The templates and snapshots of one endpoint. Made ones are forgotten when it ends.

    Args:
        configured: Templates by name.
        limit: How many made ones are kept.
        new_id: Makes the id of a made one.
    """

    def __init__(
        self,
        configured: Mapping[str, E2BTemplateConfig],
        limit: int,
        new_id: Callable[[], str] = lambda: secrets.token_hex(10),
    ) -> None:
        self._limit = limit
        self._new_id = new_id
        self._made: dict[str, Template] = {}
        self._configured = {
            name: Template(name, _environment(template), (name,))
            for name, template in {"base": BASE_TEMPLATE, **configured}.items()
        }

    def find(self, name: str) -> Template | None:
        """The template or snapshot of this id or name, or the tree put under this digest.

        The tag `default` may be left out.
        """
        name = name.removesuffix(":default")
        found = self._made.get(name)
        if found is None:
            named = [made for made in self._made.values() if name in made.names]
            found = named[-1] if named else self._configured.get(name)
        if found is None and is_digest(name):
            reference = E2BTemplateConfig(tree_digest=name)
            return Template(name, _environment(reference))
        return found

    def get(self, name: str) -> Template:
        """Like `find`.

        Raises:
            ApiError: there is none.
        """
        found = self.find(name)
        if found is None:
            raise ApiError(404, f"template '{name}' not found")
        return found

    def reserve(self) -> str:
        """An id for a template to be made.

        Raises:
            ApiError: too many are kept already.
        """
        if len(self._made) >= self._limit:
            raise ApiError(
                429,
                f"{self._limit} templates and snapshots are kept, all that e2b_api.snapshots "
                "allows; delete one",
            )
        return self._new_id()

    def add(self, template: Template) -> None:
        """Keeps a made one. A name that another one had passes to it."""
        self._made[template.template_id] = template

    def remove(self, name: str) -> bool:
        """Forgets a made one; False if there is none of this id or name."""
        found = self.find(name)
        return found is not None and self._made.pop(found.template_id, None) is not None

    def snapshots(self, *, source: str = "", name: str = "") -> list[Template]:
        """The snapshots, oldest first; of one sandbox or one name where given."""
        return [
            made
            for made in self._made.values()
            if made.source
            and (not source or made.source == source)
            and (not name or name in (made.template_id, *made.names))
        ]


def _environment(template: E2BTemplateConfig) -> EnvironmentRef:
    tree = template.tree_digest
    if not (tree or template.image or template.template):
        tree = EMPTY_TREE.digest
    return EnvironmentRef(
        tree_digest=tree,
        image=template.image,
        template=template.template,
        workdir=template.workdir,
        env=template.env,
    )
