"""Calls a Triton kernel from a function that TensorFlow compiles with XLA for a CUDA GPU.

XLA compiles the kernel itself: it takes Triton's intermediate representation (TTIR) in a custom call, and
TensorFlow takes a custom call in a StableHLO module. Neither Triton nor CUDA's compiler is needed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla  # what JAX's programs are called with from TensorFlow

STABLEHLO_VERSION = 9  # of XlaCallModule's contract: of 2024, which TensorFlow 2.16 and later read
TYPED_FFI = 4  # custom calls of this version carry a dictionary
_TARGET = "__gpu$xla.gpu.triton"
_MLIR_NAMES = {
    tf.float16: "f16", tf.bfloat16: "bf16", tf.float32: "f32", tf.float64: "f64",
    tf.int32: "i32", tf.uint32: "ui32", tf.int64: "i64", tf.bool: "i1",
}  # fmt: skip


def triton_call(
    name: str,
    ir: str,
    operands: Sequence[Any],
    outputs: Sequence[tf.TensorSpec],
    grid: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
) -> list[Any]:
    """The tensors that a Triton kernel writes. Inside `tf.function(jit_compile=True)` on a CUDA GPU only.

    Args:
        name: of the kernel's function in `ir`.
        ir: TTIR as text; the function's arguments are pointers, to the operands and then to the outputs,
            each in row-major order.
        operands: tensors of static shape.
        outputs: shape and dtype of each tensor written.
        grid: programs along x, y and z.
        num_warps: warps of a program.
        num_stages: loads that are under way at once in a loop.

    Raises:
        ValueError: a shape is not static, or a dtype has no name here.
    """
    tensors = [tf.convert_to_tensor(operand) for operand in operands]
    config = {"num_warps": num_warps, "num_stages": num_stages, **dict(zip(_GRID, grid, strict=True))}
    results = xla.call_module(
        tensors,
        version=STABLEHLO_VERSION,
        module=stablehlo(name, ir, tensors, outputs, config),
        Sout=[output.shape for output in outputs],
        Tout=[output.dtype for output in outputs],
        platforms=["CUDA"],
    )
    return list(results)


_GRID = ("grid_x", "grid_y", "grid_z")


def stablehlo(
    name: str, ir: str, operands: Sequence[Any], outputs: Sequence[Any], config: dict[str, int]
) -> str:
    """Text of the module whose `main` calls the kernel and nothing else: arguments as `triton_call`'s, which
    raises the same; operands may be anything with a static shape and a dtype, config is the launch in XLA's
    words.
    """
    takes, gives = ([_type(tensor, name) for tensor in tensors] for tensors in (operands, outputs))
    arguments = [f"%a{index}" for index in range(len(takes))]
    launch = ", ".join(f"{key} = {value} : i32" for key, value in config.items())
    layouts = ", ".join(
        f"{which}_layouts = [{', '.join(_row_major(tensor.shape.rank) for tensor in tensors)}]"
        for which, tensors in (("operand", operands), ("result", outputs))
    )
    # More than one result has one name, numbered parts of it are the results.
    results = ["%r"] if len(gives) == 1 else [f"%r#{index}" for index in range(len(gives))]
    parameters = ", ".join(f"{a}: {t}" for a, t in zip(arguments, takes, strict=True))
    return f"""module @{name} {{
  func.func public @main({parameters}) -> ({", ".join(gives)}) {{
    %r:{len(gives)} = stablehlo.custom_call @"{_TARGET}"({", ".join(arguments)}) {{
      api_version = {TYPED_FFI} : i32, {layouts},
      backend_config = {{name = {_quoted(name)}, ir = {_quoted(ir)}, {launch}}}
    }} : ({", ".join(takes)}) -> ({", ".join(gives)})
    return {", ".join(results)} : {", ".join(gives)}
  }}
}}
"""


def _type(tensor: Any, name: str) -> str:
    """MLIR's type of a tensor."""
    dtype = tf.as_dtype(tensor.dtype)
    if not tensor.shape.is_fully_defined() or dtype not in _MLIR_NAMES:
        known = ", ".join(known.name for known in _MLIR_NAMES)
        raise ValueError(
            f"kernel {name}: {tensor.shape} of {dtype.name}; a static shape of one of {known} is accepted"
        )
    return f"tensor<{''.join(f'{size}x' for size in tensor.shape)}{_MLIR_NAMES[dtype]}>"


def _row_major(rank: int) -> str:
    """XLA's layout: axes from the one that varies fastest on."""
    if not rank:
        return "dense<> : tensor<0xindex>"
    return f"dense<[{', '.join(map(str, reversed(range(rank))))}]> : tensor<{rank}xindex>"


@functools.cache  # a model calls each of its few kernels many times
def _quoted(text: str) -> str:
    """MLIR's string: what is not printable, and quotes and backslashes, as two hexadecimal digits."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}" for byte in text.encode()
    )
    return f'"{"".join(plain)}"'
