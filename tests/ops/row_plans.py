"""Plans of `tree_attention` and `tree_short_conv` by brute force, without the planner."""

from dataclasses import dataclass, field

import torch

from harts_ops.tree_attention import tree_attention_blocks


@dataclass
class RowTree:
    """A prefix forest in preorder: the parent of each row (-1: a root), and padding rows."""

    parent: list[int] = field(default_factory=list)
    padding: int = 0

    @classmethod
    def of(cls, trajectories, padding=0):
        tree, children = cls(padding=padding), {}
        for tokens in trajectories:
            node = ()
            for token in tokens.tolist():
                children.setdefault(node, {})[token] = None
                node = (*node, token)
        stack = [((), -1)]
        while stack:
            node, row = stack.pop()
            if node:
                tree.parent.append(row)
                row = len(tree.parent) - 1
            stack += [((*node, token), row) for token in reversed(children.get(node, {}))]
        return tree

    def path(self, row):
        """Rows from a row up to its root."""
        while row >= 0:
            yield row
            row = self.parent[row]

    def attention(self, own=None, own_padding=0, blocks=(128, 128, 128, 128)):
        """Plan arguments of `tree_attention`; ``own`` are the rows that are queries."""
        rows = len(self.parent)
        end = list(range(1, rows + self.padding + 1))
        for row in range(rows):
            for ancestor in self.path(row):
                end[ancestor] = max(end[ancestor], row + 1)
        queries = list(range(len(end))) if own is None else [*own, *[0] * own_padding]
        end, queries = (torch.tensor(x, dtype=torch.int32) for x in (end, queries))
        names = ("kv_count", "kv_index", "q_count", "q_index")
        lists = tree_attention_blocks(end, queries, attention_blocks=blocks)
        plan = {"subtree_end": end, "q_row": queries, "attention_blocks": tuple(blocks)}
        return plan | dict(zip(names, lists, strict=True))

    def short_conv(self, own=None, own_padding=0, taps=3):
        """Plan arguments of `tree_short_conv`, and the complete rows that are its halo."""
        own = range(len(self.parent)) if own is None else own
        own_padding = own_padding or self.padding
        index = {row: i for i, row in enumerate(own)}
        halo, cu_seqlens, tap_row = [], [], []
        for i, row in enumerate(own):
            if i and self.parent[row] == own[i - 1]:
                continue
            before = list(self.path(row))[1 : taps + 1]
            halo += [x for x in before if x not in index and x not in halo]
            cu_seqlens.append(i)
            tap_row.append([-1] * (taps - len(before)) + before[::-1])
        # An empty padding chain, and at least two halo rows, as in a real layout.
        cu_seqlens += [len(index)] * (2 if len(cu_seqlens) > 1 else 3)
        tap_row += [[-1] * taps] * (len(cu_seqlens) - 1 - len(tap_row))
        halo += [0] * (2 - len(halo))
        rows = len(index) + own_padding
        for j, row in enumerate(halo):
            index.setdefault(row, rows + j)
        flat = [index.get(row, -1) for taps_of in tap_row for row in taps_of]
        readers = [[i for i, x in enumerate(flat) if x == row] for row in range(rows + len(halo))]
        pointer = torch.tensor([0, *map(len, readers)]).cumsum(0)
        plan = {
            "conv_cu_seqlens": torch.tensor(cu_seqlens),
            "tap_row": torch.tensor(flat).view(-1, taps),
            "tap_reader_ptr": pointer,
            "tap_reader": torch.tensor([i for reader in readers for i in reader] or [0, 0]),
        }
        return {name: x.to(torch.int32) for name, x in plan.items()}, halo


def chain(length):
    """One trajectory."""
    return RowTree(list(range(-1, length - 1)))


def sample_tree(padding=0):
    """Two roots, forks below forks, a one-row branch: 33 rows."""
    tree = RowTree(padding=padding)
    for parent, length in ((-1, 5), (4, 3), (7, 4), (4, 2), (-1, 1), (-1, 6), (20, 3), (18, 9)):
        first = len(tree.parent)
        tree.parent += [parent, *range(first, first + length - 1)]
    return tree
