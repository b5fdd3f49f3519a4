"""Hand-drawn and seeded random rollout trees, for every test folder."""

from collections.abc import Sequence

import numpy as np

Trajectories = list[np.ndarray]


def trajectories_of_segments(
    parent: Sequence[int], start: Sequence[int], end: Sequence[int]
) -> Trajectories:
    """Return one trajectory per leaf of a segment forest, in the order of the leaves.

    Every segment has a token of its own, so two segments share no row. Roots start at 0.
    """
    paths: list[np.ndarray] = []
    leaves = set(range(len(parent))) - set(parent)
    for v, p in enumerate(parent):
        before = paths[p] if p >= 0 else np.zeros(0, np.int32)
        assert len(before) == start[v] < end[v], "a segment starts where its parent ends"
        paths.append(np.concatenate([before, np.full(end[v] - start[v], v, np.int32)]))
    return [paths[v] for v in sorted(leaves)]


def _ids(*runs: tuple[int, int]) -> np.ndarray:
    """``(first id, count)`` runs of consecutive ids."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs]).astype(
        np.int32
    )


def named_trees(chunk_size: int = 4) -> dict[str, Trajectories]:
    """Return small cases by name; forks stand at, beside and between multiples of the chunk."""
    b = chunk_size
    trunk = (10, 3 * b)
    star = [_ids((10, b + 1), (100 * k, k)) for k in range(1, 6)]
    comb = [_ids((10, k), (100 + k, 2)) for k in range(1, 3 * b)]
    return {
        "one token": [_ids((1, 1))],
        "one trajectory": [_ids((1, 2 * b + 1))],
        "one chunk": [_ids((1, b))],
        "one-token trajectories": [_ids((1, 1)), _ids((2, 1)), _ids((1, 1)), _ids((3, 1))],
        "duplicates": [_ids((1, b + 2)) for _ in range(3)],
        "strict prefixes": [_ids((1, n)) for n in (2 * b, 1, b, b - 1, b + 1)],
        "prefix ends at a fork": [_ids(trunk), _ids(trunk, (50, 2)), _ids(trunk, (70, b))],
        "two roots": [_ids((1, b + 1)), _ids((50, 2 * b)), _ids((50, b), (90, 3))],
        "fork at the first token": [_ids((1, 1), (5, b)), _ids((1, 1), (40, 2 * b))],
        "fork before a boundary": [_ids((1, b - 1), (50, b)), _ids((1, b - 1), (90, b))],
        "fork at a boundary": [_ids((1, b), (50, b)), _ids((1, b), (90, 2 * b + 1))],
        "fork after a boundary": [_ids((1, b + 1), (50, b)), _ids((1, b + 1), (90, 1))],
        "three forks in a chunk": [
            _ids((1, b), (50, 1), (60, 1), (70, 2 * b)),
            _ids((1, b), (50, 1), (60, 1), (80, b)),
            _ids((1, b), (50, 1), (90, b + 1)),
            _ids((1, b), (200, 1)),
        ],
        "star": star,
        "comb": comb,
        "everything": [*star, *comb, _ids((10, 1)), star[2], _ids((900, 3 * b + 2)), comb[4][:3]],
    }


def random_trajectories(
    rng: np.random.Generator,
    *,
    num_trajectories: int = 8,
    max_length: int = 40,
    vocabulary: int = 50,
    num_roots: int = 2,
    chunk_size: int = 4,
) -> Trajectories:
    """Return random rollout trees: ``num_trajectories`` arrays of 1..``max_length`` ids.

    Forks stand anywhere, with multiples of ``chunk_size`` and their neighbours preferred; there
    are duplicates, strict prefixes, extensions and one-token trajectories.
    """

    def fresh(count: int) -> np.ndarray:
        return rng.integers(0, vocabulary, count, dtype=np.int32)

    made: Trajectories = []
    for index in range(num_trajectories):
        if index < num_roots:
            made.append(fresh(1 if rng.random() < 0.1 else int(rng.integers(1, max_length + 1))))
            continue
        base = made[int(rng.integers(len(made)))]
        kind = rng.choice(["fork", "aligned", "prefix", "extension", "duplicate", "one"], p=_KINDS)
        if kind == "duplicate":
            made.append(base.copy())
            continue
        if kind == "one":
            made.append(base[:1].copy() if rng.random() < 0.5 else fresh(1))
            continue
        depth = len(base) if kind == "extension" else int(rng.integers(1, len(base) + 1))
        if kind == "aligned":
            near = round(depth / chunk_size) * chunk_size + int(rng.integers(-1, 2))
            depth = min(max(near, 1), len(base))
        if kind == "prefix" or depth == max_length:
            made.append(base[:depth].copy())
            continue
        made.append(
            np.concatenate([base[:depth], fresh(int(rng.integers(1, max_length - depth + 1)))])
        )
    order = rng.permutation(len(made))
    return [made[i] for i in order]


_KINDS = (0.35, 0.3, 0.1, 0.1, 0.1, 0.05)


def random_cached_prefixes(rng: np.random.Generator, trajectories: Trajectories) -> np.ndarray:
    """Return leading tokens a producer may hold of each trajectory: none, some or all of them."""
    lengths = np.array([len(x) for x in trajectories], np.int64)
    some = (rng.random(len(lengths)) * (lengths + 1)).astype(np.int64)
    kind = rng.integers(0, 4, len(lengths))
    return np.where(kind == 0, 0, np.where(kind == 1, lengths, some))
