"""Ahead-of-time compilation of every Triton kernel for given compute capabilities; needs no GPU.

    python -m memo.kernels.compile_all 80 90

Prints one JSON object per kernel: name, architecture, bytes of machine code and shared memory, and properties of the
assembly. Must not run under TRITON_INTERPRET, which compiles nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memo.kernels import masks_triton, staging_triton

__all__ = ["compile_all", "kernels"]

_NAMES = {tl.float32: "fp32", tl.bfloat16: "bf16", tl.float16: "fp16"}


def compile_all(capability: int) -> Iterator[dict[str, Any]]:
    """Yields one report for each kernel variant.

    Args:
        capability: Compute capability times ten, such as 90 for 9.0.
    """
    for name, kernel, signature, constants in kernels():
        source = ASTSource(
            fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=dict(constants)
        )
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assembly = built.asm["ptx"]
        yield {
            "kernel": name,
            "target": next(line.split()[1] for line in assembly.splitlines() if line.startswith(".target")).rstrip(","),
            "is_elf": built.asm["cubin"][:4] == b"\x7fELF",
            "cubin_nbytes": len(built.asm["cubin"]),
            "shared_nbytes": built.metadata.shared,
            "accesses_of_16_bytes": sum(
                line.count("global.") and (".v4.b32" in line or ".v2.b64" in line) for line in assembly.splitlines()
            ),
            "rounds_to_nearest_even": "cvt.rn.bf16" in assembly,
        }


def kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Yields name, kernel, argument types and constants of each kernel variant that a launch can ask for."""
    st, table = staging_triton, {"table": "*i64"}
    for word, aligned in ((tl.int64, True), (tl.int64, False), (tl.int32, False), (tl.int16, False), (tl.int8, False)):
        for packs in (True, False):
            constants = {"TENSORS": st.LEAST_ROOM, "WORD": word, "ALIGNED": aligned, "SIZE": st.WORDS, "PACKS": packs}
            yield (
                f"{'pack' if packs else 'unpack'} {word.name}{' aligned' if aligned else ''}",
                st._copy_kernel,
                table,
                constants,
            )
    for value, name in _NAMES.items():
        for code, even, aligned in itertools.product(("int8", "fp8"), (True, False), (True, False)):
            if aligned and not even:
                continue
            constants = {
                "TENSORS": st.LEAST_ROOM,
                "VALUE": value,
                "INT8": code == "int8",
                "EVEN": even,
                "ALIGNED": aligned,
            }
            constants["SIZE"] = st.GROUPS
            which = f"{name} {code}{' even' if even else ''}{' aligned' if aligned else ''}"
            yield f"encode {which}", st._encode_kernel, table, constants
            yield f"decode {which}", st._decode_kernel, table, constants
    for name, even in itertools.product(("u8", "fp32", "bf16"), (True, False)):
        strides = dict.fromkeys(("run", "stride", "count", "per_run"), "i64")
        constants, which = {"EVEN": even, "SIZE": masks_triton.SIZE}, f"{name}{' even' if even else ''}"
        yield f"pack mask {which}", masks_triton._pack_kernel, {"mask": f"*{name}", "bits": "*u8"} | strides, constants
        yield (
            f"unpack mask {which}",
            masks_triton._unpack_kernel,
            {"bits": "*u8", "out": f"*{name}"} | strides,
            constants,
        )


def main(capabilities: list[str]) -> None:
    """Prints the reports of all capabilities."""
    for capability in capabilities:
        for report in compile_all(int(capability)):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
