"""GPU kernels of tfbench's own: Triton's intermediate representation, which XLA compiles. TensorFlow-free."""

import dataclasses
import functools
import importlib.resources

from tfbench.config import BenchmarkConfig

HEAD_SIZE = 64  # of every published BERT
LEAST_COMPUTE_CAPABILITY = (8, 0)  # of the cards that XLA compiles Triton kernels for
TILE_LENGTH = 128  # tokens whose scores of one head fit a program's registers
BLOCK = 64  # queries, or keys, of a program where they do not
NORM_FEATURES = (128, 768, 1024)  # hidden sizes of the BERTs here
NORM_SUM_ROWS = (
    64  # that a program of the norm's backward kernel sums over; divides what a batch has: see BLOCK
)
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
        keeps_statistics: whether it writes the softmax's statistics for the backward kernel.
    """

    name: str
    ir: str
    block: int
    num_warps: int
    num_stages: int
    keeps_statistics: bool = False


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
    if config.seq_length is None or config.seq_length % BLOCK:
        return f"goes with a --seq_length that is a multiple of {BLOCK}, not {config.seq_length}"
    return None


def attention_kernels(dtype: str, seq_length: int, head_size: int, drops: bool) -> tuple[Kernel, Kernel]:
    """The fused attention's forward and backward kernel; their arguments are told in `attention.py`.

    Args:
        dtype: of its tensors, float16 or bfloat16.
        seq_length: tokens, a multiple of BLOCK.
        head_size: HEAD_SIZE.
        drops: whether there is dropout.

    Raises:
        ValueError: there is no kernel for these.
    """
    if dtype not in _MLIR_NAMES or seq_length < BLOCK or seq_length % BLOCK or head_size != HEAD_SIZE:
        raise ValueError(
            f"no fused attention of {dtype}, length {seq_length}, heads of width {head_size}; accepted are "
            f"{' and '.join(_MLIR_NAMES)}, multiples of {BLOCK}, and {HEAD_SIZE}"
        )
    kind = "tile" if seq_length == TILE_LENGTH else "blocks"
    return _kernel(f"forward_{kind}", dtype, drops), _kernel(f"backward_{kind}", dtype, drops)


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
    forward, backward = (
        Kernel(name, _text(f"{name}_{features}", dtype), *_LAUNCHES[name])
        for name in ("norm_forward", "norm_backward")
    )
    return forward, backward


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
    forward, backward = (
        Kernel(name, _text(name, dtype), *_LAUNCHES[name]) for name in ("gelu_forward", "gelu_backward")
    )
    return forward, backward


_MLIR_NAMES = {"float16": "f16", "bfloat16": "bf16"}
# Block, warps and stages: the fastest of those tried on an H200.
_LAUNCHES = {
    "forward_tile": (TILE_LENGTH, 4, 1),
    "backward_tile": (TILE_LENGTH, 8, 1),
    "forward_blocks": (BLOCK, 4, 2),
    "backward_blocks": (BLOCK, 4, 2),
    "norm_forward": (1, 2, 1),
    "norm_backward": (NORM_SUM_ROWS, 2, 1),
    "gelu_forward": (GELU_ROWS, 4, 1),
    "gelu_backward": (GELU_SUM_ROWS, 4, 1),
}


def _kernel(name: str, dtype: str, drops: bool) -> Kernel:
    """One of attention's four."""
    ir = _text(f"attention_{name}{'_dropout' * drops}", dtype)
    block, num_warps, num_stages = _LAUNCHES[name]
    return Kernel(name, ir, block, num_warps, num_stages, keeps_statistics=name.endswith("blocks"))


@functools.cache
def _text(stem: str, dtype: str) -> str:
    """A text that `generate.py` wrote, for tensors of this dtype: it writes them for float16, whose name is
    all in which another's would differ.
    """
    text = importlib.resources.files(__package__).joinpath("ttir", f"{stem}.ttir").read_text()
    return text.replace("f16", _MLIR_NAMES[dtype])
