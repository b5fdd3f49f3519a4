"""Inputs of `packed_kda`, and plans built by hand: any sequences, any tree of branches."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass
class Sequence:
    """One packed sequence; ``source`` is None, ("external", i) or (sequence, chunks)."""

    round: int
    rows: list[int]
    replay: list[int] = field(default_factory=list)  # R + j is halo row j
    source: tuple | None = None
    anchor: int = 0  # position of the sequence's first packed row on its path


def build_plan(sequences, num_rows, *, chunk_size, num_halo=0, num_external=0, export_all=False):
    """Return the plan arguments of `packed_kda` as a dict; sequences must be sorted by round."""
    num_external, num_halo = max(2, num_external), max(2, num_halo)
    packed, cu_seqlens, chunk_indices, chunk_offsets = [], [0], [], [0]
    row_packed, exports = [-1] * num_rows, {}
    for index, sequence in enumerate(sequences):
        for row in sequence.replay + sequence.rows:
            if len(packed) >= cu_seqlens[-1] + len(sequence.replay):
                row_packed[row] = len(packed)
            packed.append(row)
        cu_seqlens.append(len(packed))
        length = cu_seqlens[-1] - cu_seqlens[-2]
        chunks = -(-length // chunk_size)
        chunk_indices += [(index, c) for c in range(chunks)]
        chunk_offsets.append(len(chunk_indices))
        if export_all:
            exports |= {(index, c): None for c in range(1, length // chunk_size + 1)}
    wanted = [s.source for s in sequences if s.source and s.source[0] != "external"]
    exports |= dict.fromkeys(wanted)
    slot = {key: 1 + num_external + i for i, key in enumerate(sorted(exports))}
    num_exports = max(2, len(slot))
    source = []
    for sequence in sequences:
        if sequence.source is None:
            source.append(0)
        elif sequence.source[0] == "external":
            source.append(1 + sequence.source[1])
        else:
            source.append(slot[sequence.source])
    rounds = max([2] + [s.round + 1 for s in sequences])
    round_of = [s.round for s in sequences]
    assert round_of == sorted(round_of)
    readers = [[] for _ in range(1 + num_external + num_exports)]
    for index, entry in enumerate(source):
        readers[entry].append(index)
    entries = [[] for _ in range(num_rows + num_halo)]
    for index, row in enumerate(packed):
        entries[row].append(index)
    for row, index in enumerate(row_packed):
        entries[row].sort(key=lambda entry, own=index: (entry != own, entry))
    counts = [round_of.count(r) for r in range(rounds)]
    chunk_counts = [b - a for a, b in pairwise(chunk_offsets)]
    tensors = {
        "packed_row": packed,
        "row_packed": row_packed,
        "packed_order": [i for entry in entries for i in entry],
        "packed_ptr": _cumulative(len(entry) for entry in entries),
        "cu_seqlens": cu_seqlens,
        "chunk_indices": chunk_indices,
        "chunk_offsets": chunk_offsets,
        "round_ptr": _cumulative(counts),
        "source": source,
        "export_slot": [slot.get((s, c + 1), -1) for s, c in chunk_indices],
        "reader_ptr": _cumulative(len(entry) for entry in readers),
        "reader": [i for entry in readers for i in entry],
    }
    plan = {name: torch.tensor(x, dtype=torch.int32) for name, x in tensors.items()}
    plan["chunk_indices"] = plan["chunk_indices"].reshape(-1, 2)
    return plan | {
        "num_rounds": rounds,
        "max_sequences": max([2, *counts]),
        "max_chunks": max([2, *chunk_counts]),
        "num_exports": num_exports,
    }


def _cumulative(counts):
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    return total


def branch_sequences(branches, *, chunk_size):
    """Sequences of a tree, one for each branch ``(parent branch or None, first, last)``.

    Branch rows follow each other; ``first`` is the position of the branch's first token on its
    path. A root with ``first > 0`` starts from the next external state and the next
    ``first % chunk_size`` halo rows. Returns the sequences, sorted by round, the row of each
    position of each branch's path (from the root's anchor), and the number of rows.
    """
    num_rows = sum(last - first for _, first, last in branches)
    made, paths, next_row, next_halo, num_roots = [], [], 0, num_rows, 0
    for parent, first, last in branches:
        rows = list(range(next_row, next_row + last - first))
        next_row += len(rows)
        anchor = first // chunk_size * chunk_size
        if parent is None:
            replay = list(range(next_halo, next_halo + first - anchor))
            next_halo += len(replay)
            source = ("external", num_roots) if anchor else None
            num_roots += 1
            made.append((Sequence(0, rows, replay, source, anchor), anchor, first))
            paths.append((anchor, replay + rows))
            continue
        base, above = paths[parent]
        above = above[: first - base]
        maker = parent
        while made[maker][2] >= anchor > made[maker][1]:
            maker = branches[maker][0]
        source, number = made[maker][0].source, made[maker][0].round
        if anchor > made[maker][1]:
            source, number = (maker, (anchor - made[maker][1]) // chunk_size), number + 1
        made.append((Sequence(number, rows, above[anchor - base :], source, anchor), anchor, first))
        paths.append((base, above + rows))
    order = sorted(range(len(made)), key=lambda i: made[i][0].round)
    for sequence, _, _ in made:
        if sequence.source and sequence.source[0] != "external":
            sequence.source = (order.index(sequence.source[0]), sequence.source[1])
    return [made[i][0] for i in order], [path for _, path in paths], num_rows


def make_inputs(
    num_rows,
    *,
    heads=(2, 4),
    widths=(5, 7),
    gate_form="lower_bound",
    num_halo=0,
    num_external=0,
    dtype=torch.double,
    grad=True,
):
    """Tensor arguments by name: ``heads`` are key and value heads, ``widths`` of a key, a value."""
    rng = torch.Generator().manual_seed(0)
    (key_heads, value_heads), (key, value) = heads, widths
    trailing = {
        "q": (key_heads, key),
        "k": (key_heads, key),
        "v": (value_heads, value),
        "gate": (value_heads, key),
        "beta": (value_heads,),
    }
    shapes = {name: (num_rows, *shape) for name, shape in trailing.items()}
    if num_halo:
        shapes |= {f"halo_{n}": (num_halo, *trailing[n]) for n in ("k", "v", "gate", "beta")}
    if num_external:
        shapes["external_states"] = (num_external, value_heads, key, value)
    if gate_form != "log_decay":
        shapes |= {"A_log": (value_heads,), "dt_bias": (value_heads * key,)}
    inputs = {n: torch.randn(x, generator=rng, dtype=torch.double) for n, x in shapes.items()}
    if gate_form == "log_decay":
        inputs |= {n: -x.abs() for n, x in inputs.items() if n.endswith("gate")}
    states = torch.promote_types(dtype, torch.float32)
    return {
        name: x.to(states if name == "external_states" else dtype).requires_grad_(grad)
        for name, x in inputs.items()
    }


def tree_case(chunk_size, **inputs):
    """Inputs and plan of a tree with three rounds, halo rows, external states and padding rows."""
    b = chunk_size
    branches = [
        (None, 0, 3 * b + 2),
        (0, b + 1, 2 * b + 3),
        (0, 2 * b, 3 * b),
        (1, 2 * b + 1, 4 * b),
        (None, 2 * b + 3, 4 * b + 1),
        (4, 3 * b + 1, 4 * b + 2),
        (0, 2, 5),
    ]
    sequences, _, num_rows = branch_sequences(branches, chunk_size=b)
    plan = build_plan(sequences, num_rows + 2, chunk_size=b, num_halo=3, export_all=True)
    return make_inputs(num_rows + 2, num_halo=3, num_external=2, **inputs), plan


def run(fn, inputs, plan, **options):
    """Outputs of ``fn`` and the gradients of all inputs under fixed cotangents."""
    outputs = fn(**inputs, **plan, **options)
    rng = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=rng, dtype=torch.double).to(x)).sum() for x in outputs
    )
    return *(x.detach() for x in outputs), *torch.autograd.grad(loss, list(inputs.values()))
