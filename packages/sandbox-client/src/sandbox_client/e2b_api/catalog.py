"""What sandboxes can start from: templates of the configuration, built ones, and snapshots."""

from collections.abc import Mapping
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
    """

    def __init__(self, configured: Mapping[str, E2BTemplateConfig]) -> None:
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
            named = self.made(name) if name else []
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

    def add(self, template: Template) -> None:
        """Keeps a made one. A name that another one had passes to it."""
        self._made[template.template_id] = template

    def remove(self, template_id: str) -> None:
        """Forgets a made one, if it is there."""
        self._made.pop(template_id, None)

    def made(self, name: str = "") -> list[Template]:
        """The made ones, oldest first; of one id or name where given."""
        return [m for m in self._made.values() if name in ("", m.template_id, *m.names)]

    def snapshots(self, *, source: str = "", name: str = "") -> list[Template]:
        """The snapshots, oldest first; of one sandbox or one name where given."""
        return [m for m in self.made(name) if m.source and source in ("", m.source)]


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
