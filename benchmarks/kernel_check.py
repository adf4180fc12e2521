"""Are the fused kernels right, the same every time, and faster than the plain formula, inside XLA on one GPU?

    python benchmarks/kernel_check.py --only=attention,norm,gelu --executions=20 --out=kernel_check.jsonl

Each case is one compiled program of four calls, forward and backward, on four sets of data in BERT-large's
shapes: a full batch, then a few sequences. For each way, plain and fused, a line says

- how many executions of the same program on the same data have any bit that differs from the first one, in
  how many elements at most and by how much (over the tensor's root mean square), and how many are not
  finite: a kernel that races, with itself or its neighbours, is seen here. XLA may sum gradients of
  parameters by atomic additions, in any order; XLA_FLAGS=--xla_gpu_deterministic_ops=true has none of that;
- the time of a call, the median of nine windows;
- the error of the result and of each gradient: root mean square, and the largest, of what differs from the
  same formula computed in float64 operation by operation, over the root mean square of the float64 values.

A line begins with BAD, and the exit code is not 0, if values are not finite, the result or the gradient of an
input differs in any bit among executions, that of a parameter by more than rounding, or an error is above 1.5
times the plain formula's (the largest: 3 times). Each line is also an object of the file --out, which is
appended to. Each part is a process with a time limit of its own; --tokens=8192 is for cards with less than
80 GB. Without a GPU only the plain formula runs, on the few sequences.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfbench import devices
from tfbench.config import BenchmarkConfig
from tfbench.hardware.gpus import probe
from tfbench.kernels import HEAD_SIZE, obstacle
from tfbench.microbench import timed
from tfbench.microbench.case import median
from tfbench.models.bert import BERT_LARGE_SHAPE

# Rows of [batch, length, …] in a full batch, BERT-large's 256 sequences of 128; and in a small one.
FULL_TOKENS, SMALL_TOKENS = 32768, 1024
LENGTHS = {"attention": (128, 512), "norm": (128,), "gelu": (128,)}  # the others see rows alone
RATES = {"attention": (0.1, 0.0), "norm": (0.1, 0.0), "gelu": (0.0,)}  # of dropout
INNER = 64  # features into a product, which is not what is looked at here
SETS = 4  # calls of a program: enough that the host is not what is timed
SECONDS = 0.5  # of timing
MOST_ERROR = (1.5, 3.0)  # times the plain formula's: root mean square, and the largest
LEAST_ERROR = 1e-6  # float32's own rounding is no fault
# Of a parameter's gradient among executions, over its root mean square: about twice a unit in the last place
# of bfloat16 in an element of three times that size.
MOST_ROUNDING = 0.05
EXIT_BAD = 3  # unlike an error's
SEED, PLACE = (12345, -678), 3  # of the dropout masks


class Part(NamedTuple):
    """One set of data: inputs and variables are what is differentiated."""

    inputs: list[Any]
    variables: list[Any]
    call: Callable[..., Any]  # (function of this way, *inputs) -> result
    upstream: Any  # gradient of the result
    names: tuple[str, ...]  # of the inputs and variables


def attention(draw: Callable[..., Any], batch: int, length: int, rate: float) -> Part:
    """Scaled dot-product attention; two thirds of the last sequence are padding."""
    import numpy as np
    import tensorflow as tf

    padding = np.zeros((batch, length), np.float32)
    padding[-1, length // 3 :] = -1e9
    bias, heads = tf.constant(padding), BERT_LARGE_SHAPE.hidden // HEAD_SIZE
    return Part(
        [draw(batch, length, 3, heads, HEAD_SIZE)], [],
        lambda way, qkv: way(qkv, bias, rate, tf.constant(SEED), PLACE),
        draw(batch, length, BERT_LARGE_SHAPE.hidden), ("qkv",),
    )  # fmt: skip


def norm(draw: Callable[..., Any], batch: int, length: int, rate: float) -> Part:
    """The end of a branch: product, bias, dropout, sum and layer norm."""
    import tensorflow as tf

    from tfbench.models.bert_model import LAYER_NORM_EPSILON
    from tfbench.models.layers import LayerNorm, Linear

    hidden = BERT_LARGE_SHAPE.hidden
    linear, layer_norm = Linear(INNER, hidden), LayerNorm(hidden, LAYER_NORM_EPSILON)
    variables = [linear.kernel, linear.bias, layer_norm.gamma, layer_norm.beta]
    _fill(variables, draw)
    return Part(
        [draw(batch, length, hidden), draw(batch, length, INNER) / INNER**0.5], variables,
        lambda way, x, inner: way(x, inner, linear, layer_norm, rate, tf.constant(SEED), PLACE),
        draw(batch, length, hidden), ("x", "inner", "kernel", "bias", "gamma", "beta"),
    )  # fmt: skip


def gelu(draw: Callable[..., Any], batch: int, length: int, rate: float) -> Part:
    """A perceptron's first half: product, bias and GELU."""
    from tfbench.models.layers import Linear

    del rate  # it has no dropout
    linear = Linear(INNER, BERT_LARGE_SHAPE.intermediate)
    _fill([linear.kernel, linear.bias], draw)
    return Part(
        [draw(batch, length, INNER) / INNER**0.5], [linear.kernel, linear.bias],
        lambda way, x: way(x, linear),
        draw(batch, length, BERT_LARGE_SHAPE.intermediate), ("x", "kernel", "bias"),
    )  # fmt: skip


PARTS = {"attention": attention, "norm": norm, "gelu": gelu}


def _fill(variables: list[Any], draw: Callable[..., Any]) -> None:
    for variable in variables:
        variable.assign(draw(*variable.shape))


def drawing(half: str, dtype: str, number: int) -> Callable[..., Any]:
    """A function of a shape: normal numbers that `half` can hold, the same ones for every dtype.

    Args:
        half: float16 or bfloat16.
        dtype: of the numbers.
        number: of the set; another one, other numbers.
    """
    import tensorflow as tf

    calls = itertools.count()

    def draw(*shape: int) -> Any:
        return tf.cast(tf.cast(tf.random.stateless_normal(shape, (number, next(calls))), half), dtype)

    return draw


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """The part's two ways."""
    from tfbench.models import attention, linear_gelu, residual_norm

    if name == "attention":
        return {"plain": attention.plain_attention, "fused": attention.fused_attention}
    if name == "norm":
        return {"plain": residual_norm.plain_residual_norm, "fused": residual_norm.fused_residual_norm}
    return {"plain": linear_gelu.plain_linear_gelu, "fused": linear_gelu.fused_linear_gelu}


def result_and_gradients(part: Part, way: Callable[..., Any]) -> list[Any]:
    """Of one call: the result, then a gradient for each of `part.names`."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(part.inputs)
        result = part.call(way, *part.inputs)
    wanted = [*part.inputs, *(variable.value for variable in part.variables)]
    return [result, *tape.gradient(result, wanted, part.upstream)]


def errors(found: list[Any], truth: list[Any]) -> list[tuple[float, float]]:
    """Root mean square and largest of each tensor's differences from its truth, over the truth's rms."""
    import tensorflow as tf

    def error(found: Any, truth: Any) -> tuple[float, float]:
        apart, unit = tf.abs(tf.cast(found, tf.float64) - truth), tf.sqrt(tf.reduce_mean(tf.square(truth)))
        return float(tf.sqrt(tf.reduce_mean(tf.square(apart))) / unit), float(tf.reduce_max(apart) / unit)

    return [error(*pair) for pair in zip(found, truth, strict=True)]


def above(found: dict[str, tuple[float, float]], plain: dict[str, tuple[float, float]]) -> bool:
    """Whether an error is larger than the plain formula's lets it be; a NaN is."""
    return any(
        not error <= most * least + LEAST_ERROR
        for name in found
        for error, least, most in zip(found[name], plain[name], MOST_ERROR, strict=True)
    )


def repeated(program: Callable[[], list[Any]], first: list[Any], executions: int) -> Any:
    """Runs the program over and over, without a host read in between.

    Returns:
        float64 [executions, tensors, 3]: elements of each tensor that have other bits than the first
        execution's, elements that are not finite, and the largest difference among those that are, over the
        first execution's root mean square. The first execution is among them.
    """
    import tensorflow as tf

    def bits(x: Any) -> Any:
        return tf.bitcast(x, {2: tf.uint16, 4: tf.uint32}[x.dtype.size])

    def compared(again: Any, first: Any) -> list[Any]:
        wide, wide_first = tf.cast(again, tf.float32), tf.cast(first, tf.float32)
        differ = tf.math.count_nonzero(bits(again) != bits(first))
        not_finite = tf.math.count_nonzero(~tf.math.is_finite(wide))
        apart = tf.abs(wide - wide_first)
        apart = tf.reduce_max(tf.where(tf.math.is_finite(apart), apart, 0.0))
        apart /= tf.sqrt(tf.reduce_mean(tf.square(wide_first)))
        return [tf.cast(x, tf.float64) for x in (differ, not_finite, apart)]

    @tf.function(jit_compile=True)
    def facts(again: list[Any], first: list[Any]) -> Any:
        return tf.stack([compared(a, b) for a, b in zip(again, first, strict=True)])

    return tf.stack([facts(first, first)] + [facts(program(), first) for _ in range(executions - 1)]).numpy()


def measured(way: Callable[..., Any], parts: list[Part], truth: list[Any], executions: int) -> dict[str, Any]:
    """Errors, executions that differ and time of one way, as the columns of --out."""
    import tensorflow as tf

    program = tf.function(
        lambda: [tensor for part in parts for tensor in result_and_gradients(part, way)],
        jit_compile=True,
        autograph=False,
    )
    first = program()
    names = ("result", *(f"d_{name}" for name in parts[0].names))
    # A tensor of any set counts as that tensor.
    facts = repeated(program, first, executions).reshape(executions, SETS, len(names), 3).max(1)
    differ, not_finite, apart = (facts[:, :, column] for column in range(3))
    windows = timed.time_calls(program, SECONDS)
    of_parameters = len(parts[0].variables)
    exact = differ[:, : len(names) - of_parameters]
    return {
        "executions": executions,
        "differ": int(differ.any(1).sum()),
        "not_finite": int(not_finite.any(1).sum()),
        "unsteady": bool(exact.any() or (apart > MOST_ROUNDING).any()),
        "most_elements_that_differ": dict(zip(names, differ.max(0).tolist(), strict=True)),
        "largest_difference": dict(zip(names, apart.max(0).tolist(), strict=True)),
        "microseconds": 1e6 / SETS / median(timed.rates(windows, 1)),
        "errors": dict(zip(names, errors(first[: len(names)], truth), strict=True)),
    }


def check(name: str, half: str, batch: int, length: int, rate: float, args: argparse.Namespace) -> bool:
    """One case, both ways; writes and prints a line for each. Whether one is BAD."""
    import keras

    keras.config.set_dtype_policy("float64")
    plain = functions(name)["plain"]
    truth = result_and_gradients(PARTS[name](drawing(half, "float64", 0), batch, length, rate), plain)
    keras.config.set_dtype_policy(f"mixed_{half}")
    parts = [PARTS[name](drawing(half, half, number), batch, length, rate) for number in range(SETS)]
    plain_errors: dict[str, tuple[float, float]] = {}
    any_bad = False
    for way, function in functions(name).items():
        row = {"part": name, "dtype": half, "batch": batch, "length": length, "rate": rate, "way": way}
        if way == "fused" and (reason := why_not_fused(half, length)):
            print(f"{name} fused: left out, it {reason}", flush=True)
            continue
        row |= measured(function, parts, truth, args.executions)
        plain_errors = plain_errors or row["errors"]
        row["bad"] = bool(row["not_finite"] or row["unsteady"] or above(row["errors"], plain_errors))
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)
        any_bad |= row["bad"]
    return any_bad


def why_not_fused(half: str, length: int) -> str | None:
    """As `tfbench.kernels.obstacle` has it, for the first GPU."""
    gpus = probe().gpus
    config = BenchmarkConfig(
        model="bert_large", gpus=min(1, len(gpus)), xla=True, precision=f"mixed_{half}", seq_length=length
    )
    return obstacle(config, HEAD_SIZE, gpus[0].compute_capability if gpus else None)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    most, apart = row["most_elements_that_differ"], row["largest_difference"]
    where = [f"{name} {count:,.0f} by {apart[name]:.0e}" for name, count in most.items() if count]
    differ = f" (elements of {', '.join(where)})" if where else ""
    errors_shown = ", ".join(
        f"{name} {rms:.1e}/{largest:.0e}" for name, (rms, largest) in row["errors"].items()
    )
    return (
        f"{'BAD ' if row['bad'] else ''}{row['part']} {row['way']} {row['dtype']} "
        f"{row['batch']} x {row['length']} rate {row['rate']}: "
        f"{row['differ']} of {row['executions']} executions differ{differ}, {row['not_finite']} not finite; "
        f"{row['microseconds']:,.1f} us; errors {errors_shown}"
    )


def check_part(name: str, args: argparse.Namespace) -> bool:
    """All cases of a part in this process; whether a line is BAD."""
    config = BenchmarkConfig(model="bert_large", seq_length=128, gpus=min(1, len(probe().gpus)))
    devices.set_environment(config)
    devices.open_devices(config)
    sizes = (args.tokens, SMALL_TOKENS) if config.gpus else (SMALL_TOKENS,)
    cases = itertools.product(sizes, LENGTHS[name], ("float16", "bfloat16"), RATES[name])
    bad = [check(name, half, tokens // length, length, rate, args) for tokens, length, half, rate in cases]
    return any(bad)


def in_their_own_processes(args: argparse.Namespace) -> Iterator[str]:
    """Runs each part; what went wrong, if anything."""
    for name in args.only:
        command = [sys.executable, __file__, f"--only={name}", f"--executions={args.executions}",
                   f"--tokens={args.tokens}", f"--out={args.out}"]  # fmt: skip
        try:
            code = subprocess.run(command, timeout=args.timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            yield f"{name}: not done after --timeout_s={args.timeout_s:g}"
        else:
            if code:
                yield f"{name}: " + ("BAD lines" if code == EXIT_BAD else f"exit code {code}")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(PARTS))
    parser.add_argument("--executions", type=int, default=20, help="of each program; 2 at least")
    parser.add_argument("--tokens", type=int, default=FULL_TOKENS, help="of a full batch")
    parser.add_argument("--out", default="kernel_check.jsonl")
    parser.add_argument("--timeout_s", type=float, default=400, help="of each part")
    args = parser.parse_args()
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"--only={','.join(sorted(unknown))}: some of {', '.join(PARTS)} are accepted")
    if args.executions < 2:
        parser.error(f"--executions={args.executions}: 2 or more are accepted")
    if args.tokens < SMALL_TOKENS or args.tokens % SMALL_TOKENS:
        parser.error(f"--tokens={args.tokens}: a multiple of {SMALL_TOKENS} is accepted")
    return args


def main() -> None:
    """Check what is asked for."""
    args = parse()
    if len(args.only) == 1:
        sys.exit(EXIT_BAD if check_part(args.only[0], args) else 0)
    if problems := list(in_their_own_processes(args)):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
