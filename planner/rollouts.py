"""Rollout files -> trajectories and their RL metadata: JSONL, Parquet, and the .npz sets."""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = tuple[int, Mapping[str, Any]]
PerToken = tuple[np.ndarray, ...]
REQUIRED = ("token_ids", "loss_mask", "advantage")
NO_GROUP = -1  # group or pair of a trajectory that has none
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Trajectories in file order; entry ``p`` of a per-token array belongs to token ``p``."""

    source: str  # file name, for messages
    token_ids: PerToken  # int32
    loss_mask: PerToken  # bool: the policy generated this token
    advantage: PerToken | None = None  # float64
    logprobs: PerToken | None = None  # float64, natural log, of the behaviour policy
    ref_logprobs: PerToken | None = None  # float64, natural log, of the reference policy
    reward: NDArray[np.float64] | None = None  # [N]
    weight: NDArray[np.float64] | None = None  # [N]
    group: NDArray[np.int64] | None = None  # [N] rollouts of one task, -1: none
    pair: NDArray[np.int64] | None = None  # [N] the two answers of a preference, -1: none
    policy_version: NDArray[np.int64] | None = None  # [N]
    routed_experts: PerToken | None = None  # int32 [tokens, MoE layers, experts of a token]
    row: NDArray[np.int64] = field(default_factory=lambda: np.arange(0))  # [N] row of the file

    def __post_init__(self) -> None:
        if not len(self.row):
            object.__setattr__(self, "row", np.arange(len(self.token_ids)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rollouts":
        """Return some trajectories, in the given order."""
        at = np.asarray(indices, np.int64)
        chosen: dict[str, Any] = {"source": self.source}
        for column in fields(self):
            values = getattr(self, column.name)
            if isinstance(values, tuple):
                chosen[column.name] = tuple(values[i] for i in at.tolist())
            elif isinstance(values, np.ndarray):
                chosen[column.name] = values[at]
        return Rollouts(**chosen)


def read_rollouts(
    path: str | Path, *, limit: int | None = None, required: Sequence[str] = REQUIRED
) -> Rollouts:
    """Read a rollout file: ``.jsonl`` (an object a line), ``.parquet``, or a ``.npz`` set.

    A column is in every row or in none. ``advantage`` is one number or one per token;
    log-probabilities may be null where there is no target. Groups and pairs are integers or
    strings; strings are numbered by first appearance.

    Args:
        limit: Read only the first rows, at least one.
        required: Columns that must be there. Without a required ``loss_mask``, a file that has
            none counts every token but the first as a target.
    Raises:
        ValueError: The file cannot be read, or a row or column is wrong; the message names file,
            row (from 0) and field.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"{path}: limit must be at least 1, or None for all rows, got {limit}")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".npz": _npz_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: needed a file named {', '.join(readers)}, got {path.suffix!r}")
    try:
        return _collect(str(path), readers[path.suffix](path), limit, required)
    except (OSError, RuntimeError, UnicodeDecodeError, EOFError, *_BROKEN_ZIP) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def renumber_tokens(rollouts: Rollouts) -> tuple[Rollouts, int]:
    """Replace every token id by its rank among the ids present, which keeps every fork.

    Returns:
        The renumbered rollouts and the number of different ids.
    """
    ids = np.unique(np.concatenate([np.unique(tokens) for tokens in rollouts.token_ids]))
    dense = tuple(np.searchsorted(ids, tokens).astype(np.int32) for tokens in rollouts.token_ids)
    return replace(rollouts, token_ids=dense), len(ids)


class _FieldError(ValueError):
    """What is wrong with one value; the reader adds file, row and field."""


def _array(value: Any, kinds: str, what: str) -> np.ndarray:
    if isinstance(value, list) and None in value:
        value = [np.nan if entry is None else entry for entry in value]
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _FieldError(f"needed {what}, got ragged lists") from error
    # NumPy would read true among numbers as 1.
    mixed = isinstance(value, list) and "b" not in kinds and bool in map(type, value)
    if mixed or array.dtype.kind not in kinds:
        raise _FieldError(f"needed {what}, got {_shown(value)}")
    return array


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _token_ids(value: Any) -> np.ndarray:
    if isinstance(value, list | np.ndarray) and len(value) == 0:
        raise _FieldError("needed at least one token id, got none")
    tokens = _flat(_array(value, "iu", "a list of integers"))
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise _FieldError(f"token ids must be in [0, 2**31), got {wrong}")
    return tokens.astype(np.int32, copy=False)


def _loss_mask(value: Any, length: int) -> np.ndarray:
    mask = _flat(_one_per_token(_array(value, "biu", "a list of booleans or of 0 and 1"), length))
    if mask.dtype.kind != "b" and ((mask < 0) | (mask > 1)).any():
        raise _FieldError("needed booleans, or 0 and 1")
    if mask[0]:
        raise _FieldError("the first token has nothing before it to be predicted from, got true")
    return mask.astype(bool, copy=False)


def _one_per_token(array: np.ndarray, length: int) -> np.ndarray:
    if array.shape[:1] != (length,):
        got = len(array) if array.ndim else "one number"
        raise _FieldError(f"needed one entry per token, {length}, got {got}")
    return array


def _advantage(value: Any, length: int) -> np.ndarray:
    values = _array(value, "fiu", "a number or a list of numbers").astype(np.float64)
    if values.ndim:
        _flat(_one_per_token(values, length))
    for at in np.flatnonzero(~np.isfinite(values))[:1]:
        where = f" at token {at}" if values.ndim else ""
        raise _FieldError(f"must be finite, got {values.flat[at]}{where}")
    return np.broadcast_to(values, length)


def _flat(values: np.ndarray) -> np.ndarray:
    if values.ndim != 1:
        raise _FieldError(f"needed a flat list, got shape {values.shape}")
    return values


def _logprobs(value: Any, length: int, mask: np.ndarray) -> np.ndarray:
    values = _array(value, "fiu", "a list of numbers").astype(np.float64)
    _flat(_one_per_token(values, length))
    for at in np.flatnonzero(mask & ~np.isfinite(values))[:1]:
        raise _FieldError(f"must be finite at a target, got {values[at]} at token {at}")
    return np.where(np.isfinite(values), values, 0.0)


def _routed_experts(value: Any, length: int) -> np.ndarray:
    experts = _one_per_token(_array(value, "iu", "integers [tokens, layers, experts]"), length)
    if experts.ndim != 3:
        raise _FieldError(f"needed ids [tokens, layers, experts], got shape {experts.shape}")
    least, most = experts.min(initial=0), experts.max(initial=0)
    if least < 0 or most > np.iinfo(np.int32).max:
        raise _FieldError(f"needed ids >= 0, < 2**31, got {least if least < 0 else most}")
    return experts.astype(np.int32, copy=False)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise _FieldError(f"needed a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    if not np.isfinite(number):
        raise _FieldError(f"must be finite, got {_shown(value)}")
    return number


def _version(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _FieldError(f"needed an integer, got {_shown(value)}")
    if not -(2**63) <= int(value) < 2**63:
        raise _FieldError(f"must be in [-2**63, 2**63), got {_shown(value)}")
    return int(value)


def _label(value: Any) -> int | str:
    if value is None:
        return NO_GROUP
    if isinstance(value, str):
        return value
    if (number := _version(value)) < NO_GROUP:
        raise _FieldError(f"needed a string, an integer >= 0, or null for none, got {number}")
    return number


_ONE_PER_TRAJECTORY: dict[str, Callable[[Any], Any]] = {
    "reward": _number,
    "weight": _number,
    "group": _label,
    "pair": _label,
    "policy_version": _version,
}
_COLUMNS = (*REQUIRED, "logprobs", "ref_logprobs", "routed_experts", *_ONE_PER_TRAJECTORY)


def _parse(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the checked columns of one row."""
    parsed: dict[str, Any] = {}
    length = 0
    for name in sorted(values, key=_COLUMNS.index):
        value = values[name]
        try:
            if name == "token_ids":
                parsed[name] = _token_ids(value)
                length = len(parsed[name])
            elif name == "loss_mask":
                parsed[name] = _loss_mask(value, length)
            elif name == "advantage":
                parsed[name] = _advantage(value, length)
            elif name in ("logprobs", "ref_logprobs"):
                mask = parsed.get("loss_mask", _all_targets(length))
                parsed[name] = _logprobs(value, length, mask)
            elif name == "routed_experts":
                parsed[name] = _routed_experts(value, length)
            else:
                parsed[name] = _ONE_PER_TRAJECTORY[name](value)
        except _FieldError as error:
            raise ValueError(f"{where}, {name}: {error}") from None
    return parsed


def _all_targets(length: int) -> np.ndarray:
    return np.arange(length) > 0


def _collect(
    source: str, rows: Iterable[Row], limit: int | None, required: Sequence[str]
) -> Rollouts:
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    for number, values in islice(rows, limit):
        where = f"{source}, row {number}"
        for name in values:
            if name not in _COLUMNS:
                raise ValueError(f"{where}: unknown column {name!r}; known: {', '.join(_COLUMNS)}")
        needed = {"token_ids", *required} if not numbers else set(columns)
        for name in sorted(needed - set(values)):
            raise ValueError(f"{where}, {name}: the field is missing")
        for name in values if numbers else ():
            if name not in columns:
                raise ValueError(f"{where}, {name}: row {numbers[0]} does not have this field")
        for name, value in _parse(values, where).items():
            column = columns.setdefault(name, [])
            if name == "routed_experts" and column and value.shape[1:] != column[0].shape[1:]:
                raise ValueError(
                    f"{where}, {name}: needed {column[0].shape[1:]} layers and experts, "
                    f"got {value.shape[1:]}"
                )
            column.append(value)
        numbers.append(number)
    if not numbers:
        raise ValueError(f"{source}: holds no trajectory")
    if "loss_mask" not in columns:
        columns["loss_mask"] = [_all_targets(len(tokens)) for tokens in columns["token_ids"]]
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if name in ("group", "pair"):
            made[name] = _numbered(values)
        elif name in _ONE_PER_TRAJECTORY:
            made[name] = np.array(values, np.int64 if name == "policy_version" else np.float64)
        else:
            made[name] = tuple(values)
    return Rollouts(source=source, row=np.array(numbers, np.int64), **made)


def _numbered(labels: Sequence[int | str]) -> NDArray[np.int64]:
    """Return integer labels as they are; with strings, number all labels by first appearance."""
    if not any(isinstance(label, str) for label in labels):
        return np.array(labels, np.int64)
    number: dict[int | str, int] = {}
    return np.array(
        [x if x == NO_GROUP else number.setdefault(x, len(number)) for x in labels], np.int64
    )


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:  # also integers of too many digits
                raise ValueError(f"{path}, row {number}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"{path}, row {number}: needed an object, got {_shown(values)}")
            yield number, values


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow: pip install 'harts[parquet]'") from error
    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                names = batch.schema.names
                columns = [_parquet_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    yield number, dict(zip(names, values, strict=True))
                    number += 1
    except pa.ArrowException as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _parquet_values(column: Any) -> list[Any]:
    """Return one value per row; flat lists become views of the column, never Python lists."""
    import pyarrow as pa

    flat = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not flat or column.null_count or not pa.types.is_primitive(column.type.value_type):
        return column.to_pylist()
    offsets = column.offsets.to_numpy()
    tokens = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(tokens, offsets[1:-1] - offsets[0])


_NPZ_NEEDED = (
    "seg_tokens", "seg_ptr", "seg_parent", "seg_start", "sample_seg", "sample_len", "spans",
    "span_ptr",
)  # fmt: skip
_NPZ_KNOWN = (
    *_NPZ_NEEDED, "task", "trial", "step", "reward", "advantage", "prev", "task_names", "meta",
)  # fmt: skip


def _npz_rows(path: Path) -> Iterator[Row]:
    """Yield the samples of a prefix trie: token i of a sample is stored once per prefix."""
    with path.open("rb") as content:
        if not zipfile.is_zipfile(content):
            raise ValueError(f"{path}: not a rollout set: needed the zip that numpy.savez writes")
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    for name in data:
        if name not in _NPZ_KNOWN:
            raise ValueError(f"{path}: unknown array {name!r}; known: {', '.join(_NPZ_KNOWN)}")
    for name in _NPZ_NEEDED:
        if name not in data:
            raise ValueError(f"{path}: array {name} is missing")
    parent, ptr, end = _checked_trie(path, data)
    per_sample = {"advantage": "advantage", "reward": "reward", "group": "task"}
    span_ptr = data["span_ptr"]
    for sample, (segment, length) in enumerate(
        zip(data["sample_seg"].tolist(), data["sample_len"].tolist(), strict=True)
    ):
        if not (0 <= segment < len(parent) and 0 < length <= end[segment]):
            raise ValueError(
                f"{path}, row {sample}, sample_len: {length} tokens do not end in segment {segment}"
            )
        path_segments = []
        while segment >= 0:
            path_segments.append(segment)
            segment = parent[segment]
        parts = [data["seg_tokens"][ptr[s] : ptr[s + 1]] for s in reversed(path_segments)]
        mask = np.zeros(length, bool)
        for first, last in data["spans"][span_ptr[sample] : span_ptr[sample + 1]].tolist():
            if not 0 <= first <= last <= length:
                raise ValueError(
                    f"{path}, row {sample}, spans: [{first}, {last}) is not within {length} tokens"
                )
            mask[first:last] = True
        values: dict[str, Any] = {"token_ids": np.concatenate(parts)[:length], "loss_mask": mask}
        values |= {key: data[name][sample] for key, name in per_sample.items() if name in data}
        yield sample, values


def _checked_trie(
    path: Path, data: Mapping[str, np.ndarray]
) -> tuple[list[int], list[int], list[int]]:
    """Return parent, token pointers and end position of each segment."""
    for name in _NPZ_NEEDED:
        array, shape = data[name], ("n", 2) if name == "spans" else ("n",)
        if array.dtype.kind not in "iu" or array.ndim != len(shape) or array.shape[1:] != shape[1:]:
            raise ValueError(
                f"{path}: {name} needed integers [{', '.join(map(str, shape))}], "
                f"got {array.dtype} {list(array.shape)}"
            )
    parent, ptr = data["seg_parent"], data["seg_ptr"].astype(np.int64)
    start = data["seg_start"].astype(np.int64)
    count, samples = len(parent), len(data["sample_seg"])
    sizes = {"seg_ptr": count + 1, "seg_start": count, "span_ptr": samples + 1}
    sizes |= dict.fromkeys(("sample_len", "task", "reward", "advantage"), samples)
    for name, size in sizes.items():
        if name in data and data[name].shape[:1] != (size,):
            got = len(data[name]) if data[name].ndim else "one number"
            raise ValueError(f"{path}: {name} needed {size} entries, got {got}")
    if (np.diff(ptr) <= 0).any() or ptr[0] != 0 or ptr[-1] != len(data["seg_tokens"]):
        raise ValueError(f"{path}: seg_ptr does not divide seg_tokens into segments")
    span_ptr = data["span_ptr"].astype(np.int64)
    if (np.diff(span_ptr) < 0).any() or span_ptr[0] != 0 or span_ptr[-1] != len(data["spans"]):
        raise ValueError(f"{path}: span_ptr does not divide spans among {samples} samples")
    if ((parent < -1) | (parent >= np.arange(count))).any():
        raise ValueError(f"{path}: seg_parent must name an earlier segment, or -1")
    end = start + np.diff(ptr)
    if (start != np.where(parent >= 0, end[parent], 0)).any():
        raise ValueError(f"{path}: seg_start must be where the parent segment ends")
    return parent.tolist(), ptr.tolist(), end.tolist()
