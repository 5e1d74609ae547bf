"""Which leading tokens of a prompt have been computed before, and where that is kept.

Pure bookkeeping: a radix tree over token ids whose nodes own *slots*, numbers that stand for places
in somebody else's memory. Sequences that start alike share the slots of what they have in common.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

Tokens = list[int]


@dataclass(slots=True, eq=False)
class _Node:
    edge: Tokens
    slots: list[int]
    epoch: int
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """What is kept of a prompt's start.

    Attributes:
        slots: Of its leading tokens, in order.
        epoch: The oldest among those that they were inserted with.
    """

    slots: list[int]
    epoch: int

    @property
    def length(self) -> int:
        """How many tokens are kept."""
        return len(self.slots)


class PrefixIndex:
    """Kept tokens, at most `capacity`; the least recently used leave first, from their end.

    A node is never used longer ago than one below it, so that the least recently used is a leaf.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return self._capacity - len(self._free)

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node([], [], 0, None)
        self._free = list(range(self._capacity - 1, -1, -1))
        self._used: OrderedDict[int, _Node] = OrderedDict()

    def match(self, tokens: Tokens) -> Match:
        """Return what is kept of the start of `tokens`, and call it used."""
        path, within = self._walk(tokens)
        self._touch(path)
        slots: list[int] = []
        for node in path:
            slots += node.slots
        if within:
            del slots[len(slots) - len(path[-1].edge) + within :]
        return Match(slots, min((node.epoch for node in path), default=0))

    def insert(self, tokens: Tokens, epoch: int) -> tuple[int, list[int]]:
        """Keep `tokens`; drop others if there is no room.

        Returns:
            From which index on tokens were not kept yet, and the slots of those from there on that
            are kept now: of all, or of fewer if `tokens` alone is more than fits.
        """
        path, within = self._walk(tokens)
        self._touch(path)
        start = sum(len(node.edge) for node in path)
        if within:
            start += within - len(path[-1].edge)
        if start == len(tokens):
            return start, []
        if within:
            path[-1] = self._split(path[-1], within)
            self._touch(path)
        parent = path[-1] if path else self._root
        self._make_room(len(tokens) - start, keep=set(map(id, path)))
        slots = [self._free.pop() for _ in range(min(len(tokens) - start, len(self._free)))]
        if slots:
            node = _Node(tokens[start : start + len(slots)], slots, epoch, parent)
            parent.children[node.edge[0]] = node
            self._used[id(node)] = node
            self._touch(path)
        return start, slots

    def _walk(self, tokens: Tokens) -> tuple[list[_Node], int]:
        """Follow `tokens` as far as they go.

        Returns:
            The nodes from below the root on, and how much of the last one's edge was followed if
            that was not all of it, else 0.
        """
        path: list[_Node] = []
        node, depth, total = self._root, 0, len(tokens)
        while depth < total:
            child = node.children.get(tokens[depth])
            if child is None:
                break
            path.append(child)
            edge = child.edge
            if tokens[depth : depth + len(edge)] != edge:
                return path, _common(edge, tokens, depth)
            node, depth = child, depth + len(edge)
        return path, 0

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._used.move_to_end(id(node))

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node's edge after `at` tokens and return the part above."""
        upper = _Node(node.edge[:at], node.slots[:at], node.epoch, node.parent)
        assert node.parent is not None
        node.parent.children[upper.edge[0]] = upper
        upper.children[node.edge[at]] = node
        node.edge, node.slots, node.parent = node.edge[at:], node.slots[at:], upper
        self._used[id(upper)] = upper
        return upper

    def _make_room(self, tokens: int, keep: set[int]) -> None:
        """Free slots of the least recently used until `tokens` are free or none but `keep` is left.

        What is in `keep` was used last, and so comes last.
        """
        while len(self._free) < tokens:
            node = next(iter(self._used.values()), None)
            if node is None or id(node) in keep:
                return
            cut = max(0, len(node.edge) - (tokens - len(self._free)))
            self._free += reversed(node.slots[cut:])
            del node.edge[cut:], node.slots[cut:]
            if not node.edge:
                self._drop(node)

    def _drop(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del self._used[id(node)]
        parent.children = {key: c for key, c in parent.children.items() if c is not node}


def _common(edge: Tokens, tokens: Tokens, start: int) -> int:
    count = 0
    for mine, other in zip(edge, tokens[start : start + len(edge)], strict=False):
        if mine != other:
            break
        count += 1
    return count


__all__ = ["Match", "PrefixIndex", "Tokens"]
