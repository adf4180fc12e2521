"""The kernels' texts, which need no Triton, and their sources in Triton's interpreter, where it is installed.

As a script, with TRITON_INTERPRET=1: runs the kernels on the tensors of one file and writes another.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import norm_helpers
import numpy as np
import pytest

from tfbench import kernels
from tfbench.models import bert

ROOT = Path(__file__).parents[1]
TEXTS = sorted((ROOT / "tfbench" / "kernels" / "ttir").glob("*.ttir"))
BATCH, SIZE = 2, kernels.HEAD_SIZE
KEYS = (0xDEADBEEF, 0x87654321)


def stem(path: Path) -> str:
    return path.stem


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    pytest.importorskip("triton", reason="the extra `kernels` is not installed")
    from tfbench.kernels import generate

    return generate


@pytest.mark.parametrize("path", TEXTS, ids=stem)
def test_a_text_is_a_single_kernel_of_pointers_without_a_path(path):
    text = path.read_text()
    name, arguments = re.search(r"tt\.func public @(\w+)\((.*?)\) attributes", text).groups()
    assert text.count("tt.func") == 1
    assert name in path.stem
    for argument in arguments.split(", %"):
        assert re.fullmatch(r"%?\w+: !tt\.ptr<(f16|f32|i32)> \{tt\.divisibility = 16 : i32\}", argument)
    assert text.count("{") == text.count("}")
    assert "loc(" not in text
    assert "/" not in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("length", [128, 256, 384, 512])
def test_attention_has_kernels_for(length, drops, dtype):
    for kernel in kernels.attention_kernels(dtype, length, SIZE, drops):
        assert f"@{kernel.name}(" in kernel.ir
        assert ("bf16" in kernel.ir) == (dtype == "bfloat16")
        assert bool(re.search(r"(?<!b)f16", kernel.ir)) == (dtype == "float16")
        assert ("arith.shrui" in kernel.ir) == drops  # the mask's hash
        assert length % kernel.block == 0
        assert kernel.sums_in_memory == ("%d_query" in kernel.ir)


@pytest.mark.parametrize(
    ("dtype", "length", "size"),
    [("float32", 128, 64), ("float16", 192, 64), ("float16", 640, 64), ("float16", 128, 32)],
)
def test_attention_has_no_kernels_for(dtype, length, size):
    with pytest.raises(
        ValueError, match=f"{dtype}, length {length}, heads of width {size}; accepted are float16 "
    ):
        kernels.attention_kernels(dtype, length, size, True)


def test_the_texts_are_what_the_sources_give(generate):
    made = {name: generate.text(source, name) for source in generate.SOURCES for name in source.TEXTS}
    assert made == {path.stem: path.read_text() for path in TEXTS}


@pytest.mark.parametrize("path", TEXTS, ids=stem)
def test_a_bfloat16_text_is_the_float16_one_with_the_name_changed(generate, path):
    source = next(source for source in generate.SOURCES if path.stem in source.TEXTS)
    assert generate.text(source, path.stem, "bf16") == kernels._text(path.stem, "bfloat16")


def unfenced_product(ptx: str) -> str | None:
    """The first product of matrix units that can run with no fence.proxy.async since an asynchronous copy.

    These units read shared memory through another proxy than copies write it through, and without the fence
    may miss what was written (PTX ISA, async proxy). Every loop is gone through twice.
    """
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$L")}
    number, dirty, taken = 0, False, set()
    while number < len(lines):
        line = lines[number]
        if "fence.proxy.async" in line or ".shared.global" in line:
            dirty = ".shared.global" in line
        elif dirty and "wgmma.mma_async" in line:
            return line.strip()
        back = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if back and labels[back[1]] < number and number not in taken:
            taken.add(number)
            number = labels[back[1]]
        number += 1
    return None


COPY, PRODUCT = "cp.async.cg.shared.global [%r1 + 0], [%rd1 + 0], 0x10;", "wgmma.mma_async.sync.aligned.m64"
FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([COPY, FENCE, PRODUCT], False),
        ([FENCE, COPY, PRODUCT], True),
        ([COPY, FENCE, "$L1:", PRODUCT, COPY, "@%p1 bra \t$L1;"], True),
        ([COPY, "$L1:", FENCE, PRODUCT, COPY, "@%p1 bra \t$L1;"], False),
        ([PRODUCT, COPY], False),
    ],
)
def test_products_without_a_fence_are_found(lines, found):
    assert (unfenced_product("\n".join(lines)) is not None) == found


def ptx_of(generate: ModuleType, kernel: kernels.Kernel, folder: Path) -> str:
    """A text compiled as XLA does it: subnormal numbers are kept, where no instruction says otherwise."""
    from triton.compiler import compile as compile_text

    path = folder / "kernel.ttir"
    path.write_text(kernel.ir)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_reflect_ftz": False}
    return compile_text(str(path), target=generate.TARGET, options=options).asm["ptx"]


@pytest.mark.parametrize("length", [128, 512])
def test_matrix_units_read_no_asynchronous_copy_without_a_fence(generate, length, tmp_path):
    for kernel in kernels.attention_kernels("float16", length, SIZE, drops=True):
        ptx = ptx_of(generate, kernel, tmp_path)
        assert "wgmma.mma_async" in ptx
        assert unfenced_product(ptx) is None


def test_no_exponential_or_root_keeps_subnormal_numbers(generate, tmp_path):
    attention = [kernels.attention_kernels("float16", length, SIZE, drops=True) for length in (128, 512)]
    for kernel in (*attention[0], *attention[1], *kernels.gelu_kernels("float16", 4096)):
        instructions = set(re.findall(r"\b(?:ex2|rsqrt)\.[\w.]+", ptx_of(generate, kernel, tmp_path)))
        roots = {"rsqrt.approx.ftz.f32"} if "gelu" in kernel.name else set()
        assert instructions == {"ex2.approx.ftz.f32"} | roots


def kept(shape: tuple[int, ...], rate: float) -> np.ndarray:
    """What dropout multiplies the weights with: `layers.dropout`'s hash in NumPy's uint32."""
    if not rate:
        return np.ones(shape)
    with np.errstate(over="ignore"):
        bits = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(KEYS[0])
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D) + np.uint32(KEYS[1])
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return ((bits ^ (bits >> np.uint32(16))) >= np.uint32(int(rate * 2**32))).reshape(shape) / (1 - rate)


def formula(qkv: Any, bias: Any, d_out: Any, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its gradient by qkv in float64, but for the bias, which float32 scores are added to."""
    query, key, value = np.moveaxis(qkv.astype(float), 2, 0)
    scores = (np.einsum("bqhd,bkhd->bhqk", query, key) / SIZE**0.5).astype("float32") + bias[:, None, None, :]
    weights = np.exp(scores - scores.max(-1, keepdims=True), dtype=float)
    weights /= weights.sum(-1, keepdims=True)
    factors = kept(weights.shape, rate)
    out = np.einsum("bhqk,bkhd->bqhd", weights * factors, value)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out.astype(float), value) * factors
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) / SIZE**0.5
    d_query = np.einsum("bhqk,bkhd->bqhd", d_scores, key)
    d_key = np.einsum("bhqk,bqhd->bkhd", d_scores, query)
    d_value = np.einsum("bhqk,bqhd->bkhd", weights * factors, d_out.astype(float))
    return out, np.stack([d_query, d_key, d_value], axis=2)


def tensors(length: int, heads: int, padded: int) -> dict[str, np.ndarray]:
    """Random ones; the second sequence's last `padded` places, or both sequences' all, are no tokens."""
    random = np.random.default_rng(length)
    bias = np.zeros((BATCH, length), "float32")
    bias[0 if padded == length else 1 :, length - padded :] = -1e9
    return {
        "qkv": random.standard_normal((BATCH, length, 3, heads, SIZE)).astype("float16"),
        "d_out": random.standard_normal((BATCH, length, heads, SIZE)).astype("float16"),
        "bias": bias,
    }


CASES = {  # length, heads, padded places, dropout rate
    **{f"tile-{rate}": (128, 3, 30, rate) for rate in (0.0, 0.1, 0.5)},
    **{f"blocks-{rate}": (256, 3, 30, rate) for rate in (0.0, 0.1, 0.5)},
    "four blocks-0.1": (512, 1, 30, 0.1),
    "tile-empty": (128, 4, 128, 0.0),
    "blocks-empty": (256, 2, 256, 0.0),
}


def without_ptx() -> None:
    """Puts Triton's functions in the places of instructions, which Triton's interpreter cannot run."""
    import triton.language as tl

    from tfbench.kernels import attention, gelu

    # Looked up when they are called: while a kernel runs, the interpreter has others under these names.
    attention.exp2 = gelu.exp2 = lambda x: tl.exp2(x)
    gelu.rsqrt = lambda x: tl.rsqrt(x)
    attention._dropped = lambda x, bits, threshold: tl.where(bits >= threshold, x, 0.0)


def interpret(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Output and gradient of the kernels that a run of the case's length takes."""
    import torch

    from tfbench.kernels import attention

    length, heads, padded, rate = CASES[case]
    named = {name: torch.from_numpy(array) for name, array in tensors(length, heads, padded).items()}
    named["keys"] = torch.from_numpy(np.array([*KEYS, int(rate * 2**32)], np.uint32))
    named["out"], named["d_qkv"] = torch.zeros_like(named["d_out"]), torch.zeros_like(named["qkv"])
    named["statistics"] = torch.zeros(BATCH, heads, 2, length)
    named["d_query"] = torch.full((BATCH, heads, length, SIZE), torch.nan)
    for kernel in kernels.attention_kernels("float16", length, SIZE, bool(rate)):
        function = getattr(attention, kernel.name)
        pointers = [named[name] for name in function.arg_names if name in named]
        stem = f"attention_{kernel.name}{f'_{length}' * kernel.sums_in_memory}{'_dropout' * bool(rate)}"
        _, constants = attention.TEXTS[stem]
        function[heads, BATCH, length // kernel.block](*pointers, **constants)
    return named["out"].numpy(), named["d_qkv"].numpy()


GELU_SHAPE = (2 * kernels.GELU_SUM_ROWS, 2 * kernels.GELU_BLOCK)


def gelu_inputs() -> dict[str, np.ndarray]:
    """Sums of product and bias from -12 to 12, and an upstream gradient."""
    random = np.random.default_rng(5)
    h = np.linspace(-12, 12, np.prod(GELU_SHAPE)).reshape(GELU_SHAPE)
    bias = random.standard_normal(GELU_SHAPE[1]).astype("float32")
    return {
        "h": (random.permuted(h) - bias).astype("float16"),
        "bias": bias,
        "d_y": random.standard_normal(GELU_SHAPE).astype("float16"),
    }


def interpret_gelu() -> dict[str, np.ndarray]:
    """What its kernels write."""
    import torch

    from tfbench.kernels import gelu

    named = {name: torch.from_numpy(array) for name, array in gelu_inputs().items()}
    written = {name: torch.full(GELU_SHAPE, np.nan, dtype=torch.float16) for name in ("y", "d_h")}
    written["partial"] = torch.full((GELU_SHAPE[0] // kernels.GELU_SUM_ROWS, GELU_SHAPE[1]), np.nan)
    named |= written
    for kernel in kernels.gelu_kernels("float16", GELU_SHAPE[1]):
        function = getattr(gelu, kernel.name)
        pointers = [named[name] for name in function.arg_names if name in named]
        grid = (GELU_SHAPE[1] // kernels.GELU_BLOCK, GELU_SHAPE[0] // kernel.block)
        function[grid](*pointers, **gelu.TEXTS[kernel.name][1])
    return {name: tensor.numpy() for name, tensor in written.items()}


def interpreted_by(script: str, folder: Path) -> dict[str, np.ndarray]:
    """What a script writes in a process that has Triton interpret its kernels."""
    for module in ("triton", "torch"):
        pytest.importorskip(module, reason="the extra `kernels` is not installed")
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter fails with NumPy 2.4")
    path = folder / "results.npz"
    search = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search}
    subprocess.run([sys.executable, script, path], env=environment, check=True)
    return dict(np.load(path))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, np.ndarray]:
    """`interpret` of every case, and `interpret_gelu`."""
    return interpreted_by(__file__, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("case", [case for case in CASES if "empty" not in case])
def test_attention_in_the_interpreter_is_the_formula_with_its_mask(interpreted, case):
    *shape, rate = CASES[case]
    wanted = formula(**tensors(*shape), rate=rate)
    for mine, truth in zip((interpreted[f"{case}-out"], interpreted[f"{case}-d_qkv"]), wanted, strict=True):
        # Half precision keeps 11 bits; a wrong mask or a missing factor is off by tenths.
        np.testing.assert_allclose(mine, truth, rtol=0, atol=2e-3 * np.abs(truth).max())


@pytest.mark.parametrize("case", [case for case in CASES if "empty" in case])
def test_a_sequence_without_a_token_is_attended_to_uniformly(interpreted, case):
    """As the formula has it: each score vanishes in float32 beside the bias."""
    given = tensors(*CASES[case][:3])
    out, d_qkv = interpreted[f"{case}-out"], interpreted[f"{case}-d_qkv"]
    for mine, averaged in ((out, given["qkv"][:, :, 2]), (d_qkv[:, :, 2], given["d_out"])):
        mean = averaged.astype(float).mean(1, keepdims=True)
        np.testing.assert_allclose(mine, np.broadcast_to(mean, mine.shape), rtol=0, atol=1e-3)


def test_the_gelu_in_the_interpreter_is_the_formula(interpreted):
    given = gelu_inputs()
    x = (given["h"] + given["bias"].astype("float16")).astype(float)
    cumulative = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))(x)
    slope = cumulative + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    d_h = given["d_y"].astype(float) * slope
    # Half precision keeps 11 bits.
    np.testing.assert_allclose(interpreted["gelu-y"], x * cumulative, rtol=2**-11, atol=1e-6)
    np.testing.assert_allclose(interpreted["gelu-d_h"], d_h, rtol=2**-11, atol=2e-6)
    parts = d_h.reshape(-1, kernels.GELU_SUM_ROWS, GELU_SHAPE[1]).sum(1)
    np.testing.assert_allclose(interpreted["gelu-partial"], parts, rtol=0, atol=2e-5)


def test_every_model_has_kernels_for_its_gelu():
    for shape in (bert.BERT_TINY_SHAPE, bert.BERT_BASE_SHAPE, bert.BERT_LARGE_SHAPE):
        for dtype in ("float16", "bfloat16"):
            for kernel in kernels.gelu_kernels(dtype, shape.intermediate):
                assert f"@{kernel.name}(" in kernel.ir
                assert ("bf16" in kernel.ir) == (dtype == "bfloat16")
                assert f"%c{kernels.GELU_BLOCK}_i32 = " in kernel.ir
                assert kernels.LENGTH_UNIT % kernel.block == 0


@pytest.mark.parametrize(("dtype", "features"), [("float32", 1024), ("float16", 768), ("float16", 0)])
def test_the_gelu_has_no_kernels_for(dtype, features):
    with pytest.raises(
        ValueError, match=f"no fused GELU of {dtype}, {features} features; accepted are float16 "
    ):
        kernels.gelu_kernels(dtype, features)


@pytest.fixture(scope="module")
def interpreted_norms(tmp_path_factory) -> dict[str, np.ndarray]:
    """`norm_helpers.interpret` of every case."""
    return interpreted_by(norm_helpers.__file__, tmp_path_factory.mktemp("norms"))


@pytest.mark.parametrize("case", norm_helpers.CASES, ids=str)
def test_the_norm_in_the_interpreter_is_the_formula_with_its_mask(interpreted_norms, case):
    """Each kernel by itself: the backward one reads the rounded sum that the forward one wrote."""
    features, rate = case
    given = norm_helpers.kernel_inputs(features)
    mine = {name.split("-")[1]: a for name, a in interpreted_norms.items() if name.startswith(f"{case}-")}
    kept = norm_helpers.mask_of(norm_helpers.keys_of(rate), given["x"].shape)
    # Half precision, rounded where the plain path rounds: the same bits.
    branch = (given["y"] + given["bias"].astype("float16")) * np.float16(1 / (1 - rate))
    np.testing.assert_array_equal(mine["total"], given["x"] + np.where(kept, branch, np.float16(0)))
    np.testing.assert_array_equal(
        mine["d_y"], np.where(kept, mine["d_total"] * np.float16(1 / (1 - rate)), np.float16(0))
    )
    truth = norm_helpers.formula(**given, kept=kept / (1 - rate), total=mine["total"])
    truth["partial"] = truth["partial"].reshape(len(mine["partial"]), -1, 3, features).sum(1)
    assert mine.keys() == truth.keys()
    for name, wanted in truth.items():
        # Half precision keeps 11 bits; the bias' sum is over rounded gradients.
        np.testing.assert_allclose(mine[name], wanted, rtol=0, atol=2e-3 * np.abs(wanted).max(), err_msg=name)


def test_every_model_has_kernels_for_its_norms():
    shapes = (bert.BERT_TINY_SHAPE, bert.BERT_BASE_SHAPE, bert.BERT_LARGE_SHAPE)
    assert {shape.hidden for shape in shapes} == set(kernels.NORM_FEATURES)
    assert kernels.LENGTH_UNIT % kernels.NORM_SUM_ROWS == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("features", kernels.NORM_FEATURES)
def test_norms_have_kernels_for(features, dtype):
    for kernel in kernels.norm_kernels(dtype, features):
        assert f"@{kernel.name}(" in kernel.ir
        assert ("bf16" in kernel.ir) == (dtype == "bfloat16")
        assert f"dense<{features}> : tensor<" in kernel.ir


@pytest.mark.parametrize(("dtype", "features"), [("float32", 768), ("float16", 512)])
def test_norms_have_no_kernels_for(dtype, features):
    with pytest.raises(
        ValueError, match=f"no fused norm of {dtype}, {features} features; accepted are float16 "
    ):
        kernels.norm_kernels(dtype, features)


if __name__ == "__main__":
    without_ptx()
    results = {case: interpret(case) for case in CASES}
    np.savez(
        sys.argv[1],
        **{f"{case}-out": out for case, (out, _) in results.items()},
        **{f"{case}-d_qkv": d_qkv for case, (_, d_qkv) in results.items()},
        **{f"gelu-{name}": array for name, array in interpret_gelu().items()},
    )
