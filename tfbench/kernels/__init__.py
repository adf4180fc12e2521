"""GPU kernels of tfbench's own: Triton's intermediate representation, which XLA compiles. TensorFlow-free."""

import dataclasses
import functools
import importlib.resources

from tfbench.config import BenchmarkConfig

HEAD_SIZE = 64  # of every published BERT
LEAST_COMPUTE_CAPABILITY = (8, 0)  # of the cards that XLA compiles Triton kernels for
TILE_LENGTH = 128  # tokens whose scores of one head fit a program's registers
LENGTH_UNIT = 128  # sequences are whole multiples of it
LONGEST = 512  # sequence that there are texts for: that of every published BERT
NORM_FEATURES = (128, 768, 1024)  # hidden sizes of the BERTs here
NORM_SUM_ROWS = 64  # of a program of the norm's backward kernel, which sums over them
GELU_BLOCK = 512  # columns of a program of the GELU's kernels; divides every published BERT's perceptron
GELU_ROWS = 4  # of a program of the forward kernel
GELU_SUM_ROWS = 64  # of the backward one's: as NORM_SUM_ROWS


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel and how it is launched.

    Attributes:
        name: of its function in `ir`.
        ir: its text, TTIR.
        block: places of the sequence, or rows, that one program computes.
        num_warps: of a program.
        num_stages: loads under way at once in its loops.
        sums_in_memory: whether it needs memory of its own for the queries' gradient.
    """

    name: str
    ir: str
    block: int
    num_warps: int
    num_stages: int
    sums_in_memory: bool = False


def obstacle(
    config: BenchmarkConfig, head_size: int, compute_capability: tuple[int, int] | None
) -> str | None:
    """Why the fused kernels cannot run; None where they can.

    Args:
        config: of a text model's run.
        head_size: width of a head.
        compute_capability: the least of the GPUs used; None without one or where it is not known.
    """
    if not (config.gpus and config.xla):
        return "goes with --xla on GPUs only"
    if not config.precision.startswith("mixed"):
        return f"goes with --precision=mixed_float16 or mixed_bfloat16, not {config.precision}"
    if compute_capability is None or compute_capability < LEAST_COMPUTE_CAPABILITY:
        version = "unknown" if compute_capability is None else ".".join(map(str, compute_capability))
        return f"needs compute capability 8.0, this GPU's is {version}"
    if head_size != HEAD_SIZE:
        return f"needs heads of width {HEAD_SIZE}, this model's have {head_size}"
    if config.seq_length is None or config.seq_length % LENGTH_UNIT:
        return f"goes with a --seq_length that is a multiple of {LENGTH_UNIT}, not {config.seq_length}"
    return None


def attention_kernels(dtype: str, seq_length: int, head_size: int, drops: bool) -> tuple[Kernel, Kernel]:
    """The fused attention's forward and backward kernel; their arguments are told in `attention.py`.

    Args:
        dtype: of its tensors, float16 or bfloat16.
        seq_length: tokens, a multiple of LENGTH_UNIT up to LONGEST.
        head_size: HEAD_SIZE.
        drops: whether there is dropout.

    Raises:
        ValueError: there is no kernel for these.
    """
    lengths = range(LENGTH_UNIT, LONGEST + 1, LENGTH_UNIT)
    if dtype not in _MLIR_NAMES or seq_length not in lengths or head_size != HEAD_SIZE:
        raise ValueError(
            f"no fused attention of {dtype}, length {seq_length}, heads of width {head_size}; accepted are "
            f"{' and '.join(_MLIR_NAMES)}, {', '.join(map(str, lengths))}, and {HEAD_SIZE}"
        )
    kind = "tile" if seq_length == TILE_LENGTH else "blocks"
    forward = _kernel(f"forward_{kind}", dtype, seq_length, drops)
    return forward, _kernel(f"backward_{kind}", dtype, seq_length, drops)


def norm_kernels(dtype: str, features: int) -> tuple[Kernel, Kernel]:
    """The forward and backward kernel of bias, dropout, sum and layer norm; their arguments: see `norm.py`.

    Args:
        dtype: of its tensors, float16 or bfloat16.
        features: one of NORM_FEATURES.

    Raises:
        ValueError: there is no kernel for these.
    """
    if dtype not in _MLIR_NAMES or features not in NORM_FEATURES:
        raise ValueError(
            f"no fused norm of {dtype}, {features} features; accepted are {' and '.join(_MLIR_NAMES)}, and "
            f"{', '.join(map(str, NORM_FEATURES))}"
        )
    ir = [_text(f"{name}_{features}", dtype) for name in ("norm_forward", "norm_backward")]
    # Two warps: the fastest of those tried on an H200.
    forward = Kernel("norm_forward", ir[0], block=1, num_warps=2, num_stages=1)
    return forward, Kernel("norm_backward", ir[1], block=NORM_SUM_ROWS, num_warps=2, num_stages=1)


def gelu_kernels(dtype: str, features: int) -> tuple[Kernel, Kernel]:
    """The forward and backward kernel of bias and GELU; their arguments are told in `gelu.py`.

    Args:
        dtype: of their tensors, float16 or bfloat16.
        features: a multiple of GELU_BLOCK.

    Raises:
        ValueError: there is no kernel for these.
    """
    if dtype not in _MLIR_NAMES or features < GELU_BLOCK or features % GELU_BLOCK:
        raise ValueError(
            f"no fused GELU of {dtype}, {features} features; accepted are {' and '.join(_MLIR_NAMES)}, and "
            f"multiples of {GELU_BLOCK}"
        )
    ir = [_text(name, dtype) for name in ("gelu_forward", "gelu_backward")]
    forward = Kernel("gelu_forward", ir[0], block=GELU_ROWS, num_warps=4, num_stages=1)
    return forward, Kernel("gelu_backward", ir[1], block=GELU_SUM_ROWS, num_warps=4, num_stages=1)


_MLIR_NAMES = {"float16": "f16", "bfloat16": "bf16"}
# In every kernel with matrix products. With more, tiles are loaded by asynchronous copies, and Triton up to
# 3.7.0, which XLA has, puts no fence.proxy.async between these and the matrix units of compute capability
# 9.0: they may read the shared memory before the tile is there (PTX ISA, async proxy).
_STAGES = 1
# Block, warps and stages; 0: a program computes the whole sequence.
_LAUNCHES = {
    "forward_tile": (0, 8, _STAGES),
    "backward_tile": (0, 8, _STAGES),
    "forward_blocks": (64, 4, _STAGES),
    "backward_blocks": (0, 8, _STAGES),
}


def _kernel(name: str, dtype: str, seq_length: int, drops: bool) -> Kernel:
    """One of attention's four."""
    sums_in_memory = name == "backward_blocks"
    stem = f"attention_{name}{f'_{seq_length}' * sums_in_memory}{'_dropout' * drops}"
    block, num_warps, num_stages = _LAUNCHES[name]
    return Kernel(name, _text(stem, dtype), block or seq_length, num_warps, num_stages, sums_in_memory)


@functools.cache
def _text(stem: str, dtype: str) -> str:
    """A text that `generate.py` wrote, for tensors of this dtype: it writes them for float16, whose name is
    all in which another's would differ.
    """
    text = importlib.resources.files(__package__).joinpath("ttir", f"{stem}.ttir").read_text()
    return text.replace("f16", _MLIR_NAMES[dtype])
