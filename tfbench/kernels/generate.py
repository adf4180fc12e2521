"""Writes the kernels' texts, TTIR, from their Triton sources: `python -m tfbench.kernels.generate`.

Needs Triton of the version in the `kernels` extra, and no GPU. Where a source changes, its texts are to be
written and committed anew; a test compares them.
"""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tfbench.kernels import attention, gelu, norm

SOURCES = (attention, gelu, norm)  # each with POINTERS and TEXTS
TARGET = GPUTarget("cuda", 90, 32)  # says nothing about the text, which is the same for every NVIDIA GPU
ALIGNED = [["tt.divisibility", 16]]  # bytes: of every tensor that XLA allocates
_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|^#loc.*\n", re.MULTILINE)


def text(source: ModuleType, stem: str, half: str = "f16") -> str:
    """The TTIR that `source` has under the name `stem` in its TEXTS, for tensors of dtype f16 or bf16."""
    function, constants = source.TEXTS[stem]
    kernel = getattr(source, function)
    name = {"f16": "fp16", "bf16": "bf16"}[half]  # Triton's
    types = {argument: pointer.format(half=name) for argument, pointer in source.POINTERS.items()}
    return _without_locations(_ttir(kernel, types, constants))


def _ttir(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Triton's text of a kernel: pointers of these types, the other arguments constant."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(index,): ALIGNED for index, name in enumerate(kernel.arg_names) if name in types}
    return str(triton.compile(ASTSource(kernel, signature, constants, aligned), target=TARGET).asm["ttir"])


def _without_locations(ttir: str) -> str:
    """The text without paths and lines of the source."""
    return _LOCATION.sub("", ttir)


def main() -> None:
    """Writes all texts."""
    folder = Path(__file__).parent / "ttir"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.ttir"):
        old.unlink()
    for source in SOURCES:
        for stem in source.TEXTS:
            (folder / f"{stem}.ttir").write_text(text(source, stem))


if __name__ == "__main__":
    main()
