"""Which kept sequence shares the longest prefix with a new one. Pure: values are opaque.

A radix tree over token ids. Since a longer sequence serves every use of its own prefixes, only
sequences that are no prefix of another are kept: entries are exactly the leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
Tokens = list[int]


@dataclass(slots=True, eq=False)
class _Node(Generic[V]):
    edge: Tokens
    parent: _Node[V] | None
    children: dict[int, _Node[V]] = field(default_factory=dict)
    entry: Entry[V] | None = None


@dataclass(slots=True, eq=False)
class Entry(Generic[V]):
    """A kept sequence: how many tokens it has, and what is kept for it."""

    length: int
    value: V
    _node: _Node[V]


class PrefixStore(Generic[V]):
    """Kept sequences within a budget of tokens; the least recently used leave first.

    Args:
        budget_tokens: Sum of the lengths of all entries, at most. 0 keeps nothing.
    """

    def __init__(self, budget_tokens: int) -> None:
        self._budget = budget_tokens
        self._root: _Node[V] = _Node([], None)
        self._entries: OrderedDict[int, Entry[V]] = OrderedDict()
        self.tokens = 0
        """Sum of the lengths of all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[V]]:
        return iter(self._entries.values())

    def match(self, tokens: Tokens) -> tuple[int, Entry[V] | None]:
        """Return the length of the longest prefix that an entry shares, and that entry."""
        node, depth, within = self._walk(tokens)
        if depth == 0:
            return 0, None
        # Every entry below the point where the walk ended shares those `depth` tokens.
        if within:
            node = node.children[tokens[depth - within]]
        while node.entry is None:
            node = next(iter(node.children.values()))
        self._entries.move_to_end(id(node.entry))
        return depth, node.entry

    def covers(self, tokens: Tokens) -> bool:
        """Whether an entry starts with all of `tokens`, so that keeping them would add nothing."""
        return self._walk(tokens)[1] == len(tokens)

    def insert(self, tokens: Tokens, value: V) -> None:
        """Keep `value` for `tokens`, unless an entry starts with them. Drops what no longer fits.

        Entries that `tokens` starts with are dropped: the new one serves in their place.
        """
        if not tokens or len(tokens) > self._budget:
            return
        node, depth, within = self._walk(tokens)
        if depth == len(tokens):
            return
        if within:
            node = self._split(node.children[tokens[depth - within]], within)
        if node.entry is not None:
            self._forget(node.entry)
            # The leaf grows in place: its edge just becomes longer.
            node.edge = node.edge + tokens[depth:]
            self._keep(node, len(tokens), value)
            return
        leaf: _Node[V] = _Node(tokens[depth:], node)
        node.children[tokens[depth]] = leaf
        self._keep(leaf, len(tokens), value)

    def clear(self) -> None:
        """Drop every entry."""
        self._root = _Node([], None)
        self._entries.clear()
        self.tokens = 0

    def _walk(self, tokens: Tokens) -> tuple[_Node[V], int, int]:
        """Follow `tokens` as far as they go.

        Returns:
            The last node that was reached, how many tokens matched in all, and how many of these
            lie on the edge to a further node that was not reached.
        """
        node, depth, total = self._root, 0, len(tokens)
        while depth < total:
            child = node.children.get(tokens[depth])
            if child is None:
                return node, depth, 0
            edge = child.edge
            if tokens[depth : depth + len(edge)] != edge:
                within = _common(edge, tokens, depth)
                return node, depth + within, within
            node, depth = child, depth + len(edge)
        return node, depth, 0

    def _split(self, child: _Node[V], at: int) -> _Node[V]:
        """Cut the edge to `child` after `at` tokens and return the new node between."""
        parent = child.parent
        assert parent is not None
        middle: _Node[V] = _Node(child.edge[:at], parent, {child.edge[at]: child})
        parent.children[middle.edge[0]] = middle
        child.edge, child.parent = child.edge[at:], middle
        return middle

    def _keep(self, node: _Node[V], length: int, value: V) -> None:
        node.entry = Entry(length, value, node)
        self._entries[id(node.entry)] = node.entry
        self.tokens += length
        while self.tokens > self._budget:
            self._remove(next(iter(self._entries.values())))

    def _forget(self, entry: Entry[V]) -> None:
        del self._entries[id(entry)]
        self.tokens -= entry.length

    def _remove(self, entry: Entry[V]) -> None:
        self._forget(entry)
        node, parent = entry._node, entry._node.parent
        assert parent is not None
        del parent.children[node.edge[0]]
        if len(parent.children) == 1 and parent.parent is not None:
            (only,) = parent.children.values()
            only.edge = parent.edge + only.edge
            only.parent = parent.parent
            parent.parent.children[only.edge[0]] = only


def _common(edge: Tokens, tokens: Tokens, start: int) -> int:
    count = 0
    for mine, other in zip(edge, tokens[start : start + len(edge)], strict=False):
        if mine != other:
            break
        count += 1
    return count


__all__ = ["Entry", "PrefixStore", "Tokens"]
