"""Ahead-of-time compilation of every Triton kernel for given compute capabilities; needs no GPU.

    python tests/support/compile_kernels.py 80 90

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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memo.kernels import codec_triton, masks_triton

_TYPES = ("fp32", "bf16", "fp16")


def compile_all(capability: int) -> Iterator[dict[str, Any]]:
    """Yields one report for each kernel variant.

    Args:
        capability: Compute capability times ten, such as 90 for 9.0.
    """
    for name, kernel, signature, constants, aligned in kernels():
        source = ASTSource(
            fn=kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=dict(constants),
            attrs={(at,): [["tt.divisibility", 16]] for at in range(len(signature))} if aligned else None,
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


def kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], bool]]:
    """Yields name, kernel, argument types, constants, and whether addresses are multiples of 16, of each variant."""
    for name, code, aligned in itertools.product(_TYPES, ("int8", "fp8"), (True, False)):
        types = {"values": f"*{name}", "codes": "*u8", "scales": "*fp32", "count": "i64"}
        constants = {"INT8": code == "int8", "SIZE": codec_triton.GROUPS}
        which = f"{name} {code}{' aligned' if aligned else ''}"
        yield f"encode {which}", codec_triton._encode_kernel, types, constants, aligned
        order = {key: types[key] for key in ("codes", "scales", "values", "count")}
        yield f"decode {which}", codec_triton._decode_kernel, order, constants, aligned
    for name in ("u8", "fp32", "bf16"):
        constants = {"SIZE": masks_triton.SIZE}
        packs = {"mask": f"*{name}", "bits": "*u8", "count": "i64"}
        yield f"pack mask {name}", masks_triton._pack_kernel, packs, constants, False
        unpacks = {"bits": "*u8", "out": f"*{name}", "count": "i64"}
        yield f"unpack mask {name}", masks_triton._unpack_kernel, unpacks, constants, False


def main(capabilities: list[str]) -> None:
    """Prints the reports of all capabilities."""
    for capability in capabilities:
        for report in compile_all(int(capability)):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
