"""Products of `compact_logprob` on Hopper, in one kernel with what is made of them.

Neither logits nor centred products go through memory: only statistics of the rows (forward) or the
gradients (backward) are written, from sums in fp32. Each program takes one block of rows by tokens
after another, so that the copies of a block's operands overlap the end of the block before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from harts_ops.kernels.launching import processors

# Rows, tokens and width of a block: with these the matrix units are busiest on an H200.
BLOCK_M, BLOCK_V, BLOCK_D = 128, 256, 64
GROUP = 16  # blocks of rows that are taken together, for their operands to stay in the cache
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def supports(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the operands lie where these kernels run, as their copies want them."""
    if not hidden.is_cuda or torch.cuda.get_device_capability(hidden.device) != (9, 0):
        return False
    if hidden.dtype not in (torch.bfloat16, torch.float16) or not hidden.numel():
        return False
    return hidden.shape[1] % 8 == 0 and (hidden.data_ptr() | weight.data_ptr()) % 16 == 0


def rows_at_once(vocab: int, scratch: int) -> int:
    """Rows whose parts fit into ``scratch`` bytes, in whole blocks."""
    parts = triton.cdiv(vocab, BLOCK_V)
    return max(1, scratch // (3 * 4 * parts * BLOCK_M)) * BLOCK_M


def measure_parts(rows_MD: Tensor, weight: Tensor, options: Tensor, has_softcap: bool) -> Tensor:
    """Largest logit, sum and first moment above it, of each row's parts of the vocabulary."""
    num_rows, (vocab, width) = rows_MD.shape[0], weight.shape
    parts = options.new_empty(3, triton.cdiv(vocab, BLOCK_V), num_rows)
    operands = (_describe(rows_MD, BLOCK_M, BLOCK_D), _describe(weight, BLOCK_V, BLOCK_D))
    sizes = (num_rows, vocab, width, parts.shape[1])
    meta = {"HAS_SOFTCAP": has_softcap, "num_warps": 8, "num_stages": 4, **_blocks()}
    with torch.cuda.device_of(rows_MD):
        _measure_kernel[_grid(rows_MD, vocab)](*operands, options, parts, *sizes, **meta)
    return parts


def write_gradients(
    rows_MD: Tensor,
    weight: Tensor,
    terms: tuple[Tensor, ...],
    has_softcap: bool,
    out: Tensor,
) -> None:
    """Fill ``out`` ``[M, V]`` with the softmax part of the products' gradients."""
    operands = (_describe(rows_MD, BLOCK_M, BLOCK_D), _describe(weight, BLOCK_V, BLOCK_D))
    arguments = (*operands, _describe(out, BLOCK_M, BLOCK_V // 2), *terms)
    sizes = (rows_MD.shape[0], *weight.shape)
    # Half a block leaves through shared memory, which holds three stages beside it.
    meta = {"HAS_SOFTCAP": has_softcap, "num_warps": 8, "num_stages": 3, **_blocks()}
    with torch.cuda.device_of(rows_MD):
        _gradient_kernel[_grid(rows_MD, weight.shape[0])](*arguments, *sizes, **meta)


def _describe(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _grid(rows_MD: Tensor, vocab: int) -> tuple[int]:
    """One program on each multiprocessor, as its shared memory allows."""
    blocks = triton.cdiv(rows_MD.shape[0], BLOCK_M) * triton.cdiv(vocab, BLOCK_V)
    return (min(blocks, processors(rows_MD)),)


def _blocks() -> dict[str, int]:
    return {"BLOCK_M": BLOCK_M, "BLOCK_V": BLOCK_V, "BLOCK_D": BLOCK_D, "GROUP": GROUP}


@triton.jit
def _place(block, blocks_m, blocks_v, GROUP: tl.constexpr):
    """Block of rows and block of tokens: neighbours in time share a few of both."""
    group = block // (GROUP * blocks_v)
    first = group * GROUP
    size = min(blocks_m - first, GROUP)
    inside = block % (GROUP * blocks_v)
    return first + inside % size, inside // size


@triton.jit
def _product(
    hidden,
    weight,
    m,
    v,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    product = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for k in range(0, tl.cdiv(width, BLOCK_D)):
        a = hidden.load([m * BLOCK_M, k * BLOCK_D])
        b = weight.load([v * BLOCK_V, k * BLOCK_D])
        product = tl.dot(a, b.T, product)
    return product


@triton.jit
def _logit(product, options_ptr, HAS_SOFTCAP: tl.constexpr):
    """Logit of a product in units of log 2, and the derivative of the logit by the product."""
    scale = tl.load(options_ptr)
    logit = product * (scale * LOG2E)
    slope = scale
    if HAS_SOFTCAP:
        cap = tl.load(options_ptr + 1)
        tanh = 1 - 2 / (tl.exp2(product * (2 * LOG2E / cap)) + 1)
        logit = tanh * (cap * scale * LOG2E)
        slope = (1 - tanh * tanh) * scale
    return logit, slope


@triton.jit(do_not_specialize=["vocab", "num_parts"])
def _measure_kernel(
    hidden,
    weight,
    options_ptr,
    parts_ptr,
    rows,
    vocab,
    width,
    num_parts,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: its share of the blocks; a block of tokens is a part."""
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_v = tl.cdiv(vocab, BLOCK_V)
    behind = num_parts.to(tl.int64) * rows
    for block in range(tl.program_id(0), blocks_m * blocks_v, tl.num_programs(0)):
        m, v = _place(block, blocks_m, blocks_v, GROUP)
        product = _product(hidden, weight, m, v, width, BLOCK_M, BLOCK_V, BLOCK_D)
        logit, _ = _logit(product, options_ptr, HAS_SOFTCAP)
        if (v + 1) * BLOCK_V > vocab:
            token = v * BLOCK_V + tl.arange(0, BLOCK_V)
            logit = tl.where((token < vocab)[None, :], logit, -1e30)
        top = tl.max(logit, 1)
        above = logit - top[:, None]
        share = tl.exp2(above)
        row = m * BLOCK_M + tl.arange(0, BLOCK_M)
        out = parts_ptr + v.to(tl.int64) * rows + row
        tl.store(out, top * LN2, mask=row < rows)
        tl.store(out + behind, tl.sum(share, 1), mask=row < rows)
        tl.store(out + 2 * behind, tl.sum(share * above, 1) * LN2, mask=row < rows)


@triton.jit
def _gradient(
    product,
    lse,
    level,
    slope,
    options_ptr,
    HAS_SOFTCAP: tl.constexpr,
):
    logit, chain = _logit(product, options_ptr, HAS_SOFTCAP)
    logprob = logit - lse
    return tl.exp2(logprob) * (level + slope * logprob) * chain


@triton.jit(do_not_specialize=["vocab"])
def _gradient_kernel(
    hidden,
    weight,
    out,
    options_ptr,
    lse_ptr,
    level_ptr,
    slope_ptr,
    rows,
    vocab,
    width,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: its share of the blocks of gradients."""
    blocks_m = tl.cdiv(rows, BLOCK_M)
    blocks_v = tl.cdiv(vocab, BLOCK_V)
    half: tl.constexpr = BLOCK_V // 2
    for block in range(tl.program_id(0), blocks_m * blocks_v, tl.num_programs(0)):
        m, v = _place(block, blocks_m, blocks_v, GROUP)
        product = _product(hidden, weight, m, v, width, BLOCK_M, BLOCK_V, BLOCK_D)
        row = m * BLOCK_M + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)[:, None] * LOG2E
        level = tl.load(level_ptr + row, mask=row < rows, other=0.0)[:, None]
        slope = tl.load(slope_ptr + row, mask=row < rows, other=0.0)[:, None] * LN2
        halves = tl.permute(tl.reshape(product, [BLOCK_M, 2, half]), [0, 2, 1])
        left, right = tl.split(halves)
        grad = _gradient(left, lse, level, slope, options_ptr, HAS_SOFTCAP)
        out.store([m * BLOCK_M, v * BLOCK_V], grad.to(out.dtype))
        grad = _gradient(right, lse, level, slope, options_ptr, HAS_SOFTCAP)
        out.store([m * BLOCK_M, v * BLOCK_V + half], grad.to(out.dtype))
