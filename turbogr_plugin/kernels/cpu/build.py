"""The C++ kernels: one extension per operator family, for the vector instructions that ATen uses in this process.

Every kernel is written on at::vec and on the small matrix product of ATen (brgemm), so one source serves AVX-512, AVX2
and the rest; where AVX-512 has a much better instruction, a header takes it behind a portable path. Which variant is
built is ATen's own choice for its operators (`torch.backends.cpu.get_cpu_capability()`), so that ATEN_CPU_CAPABILITY
holds these kernels, too. The flags name the instructions and never say -march=native: a cache may serve two machines.

Left out: choosing between variants by measurement.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from turbogr_plugin import native_build

SOURCE_FOLDER = Path(__file__).parent / "csrc"

# -fopenmp: at::parallel_for is a template of the caller's code. NDEBUG as the wheel has it.
# -fno-strict-aliasing: pairs of bf16 are moved as 32-bit values.
_COMMON_FLAGS = ("-O3", "-DNDEBUG", "-std=c++20", "-fopenmp", "-fno-strict-aliasing")
# GCC prefers 256-bit vectors for its own loops, which halves those around the kernels' 512-bit ones.
_AVX512_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512", "-DCPU_CAPABILITY_AVX512", "-DCPU_CAPABILITY=AVX512")
_AVX2_FLAGS = ("-march=x86-64-v3", "-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2")
_DEFAULT_FLAGS = ("-DCPU_CAPABILITY_DEFAULT", "-DCPU_CAPABILITY=DEFAULT")
# Lookups and their updates are the same bits as the reference: no product is fused with a sum. Square roots and
# comparisons are vectors only where they set no flags.
_FAMILY_FLAGS = {"jagged_lookup": ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")}
# Redzones between the pieces of a kernel's workspace come with it (see workspace.h).
_SANITIZE_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address", "-U_FORTIFY_SOURCE")


def families() -> tuple[str, ...]:
    """The operator families that have C++ kernels: those with a source named like them."""
    from turbogr_plugin.kernels.dispatch import FAMILIES

    return tuple(family for family in FAMILIES if (SOURCE_FOLDER / f"{family}.cpp").exists())


_SHARED_EXTENSIONS = dict.fromkeys(("jagged_unique", "coalesce_rows", "fused_update"), "jagged_lookup")


def extension_of(family: str) -> str:
    """The extension that has the C++ of a family: its own, or that of the lookup, which is made of the same parts."""
    return _SHARED_EXTENSIONS.get(family, family)


def capability() -> str:
    """The vector instructions that the kernels are built for: AVX512, AVX2 or DEFAULT (on aarch64 that is NEON)."""
    known = torch.backends.cpu.get_cpu_capability()
    return known if known in ("AVX512", "AVX2") else "DEFAULT"


def compiler_flags(capability: str, *, bf16: bool) -> tuple[str, ...]:
    """The flags of a variant.

    Args:
        capability: AVX512, AVX2 or DEFAULT.
        bf16: whether the machine has AVX-512's bf16 instructions.
    """
    if capability == "AVX512":
        return (*_COMMON_FLAGS, *_AVX512_FLAGS, *(("-mavx512bf16",) if bf16 else ()))
    return (*_COMMON_FLAGS, *(_AVX2_FLAGS if capability == "AVX2" else _DEFAULT_FLAGS))


def extension(family: str, *, sanitize: bool = False) -> native_build.Extension:
    """What the extension of a family is made of, for this process.

    Args:
        family: all of csrc/FAMILY*.cpp are its sources.
        sanitize: with AddressSanitizer, whose runtime must then be loaded before the interpreter's own allocations.
    """
    flags = compiler_flags(capability(), bf16=torch.cpu._is_avx512_bf16_supported())
    sources = sorted(path.name for path in SOURCE_FOLDER.glob(f"{family}*.cpp"))
    assert sources, f"no sources of {family} in {SOURCE_FOLDER}"
    return native_build.Extension(
        name=f"turbogr_{family}{'_sanitized' if sanitize else ''}",
        what=f"the C++ kernel of {family}",
        folder=SOURCE_FOLDER,
        sources=sources,
        flags=(*flags, *_FAMILY_FLAGS.get(family, ()), *(_SANITIZE_FLAGS if sanitize else ())),
        link_flags=("-fopenmp", *(("-fsanitize=address",) if sanitize else ())),
    )


_loaded: dict[str, ModuleType] = {}
_failed: dict[str, str] = {}


def load(family: str, *, sanitize: bool = False) -> ModuleType:
    """The extension of a family, imported; built before if this version of it is not there.

    Args:
        family: one of `families`.
        sanitize: take the one with AddressSanitizer, in this process from now on.

    Raises:
        RuntimeError: it cannot be built; the message says why and what to do.
    """
    module = None if sanitize else _loaded.get(family)
    if module is None:
        try:
            module = native_build.load(extension(family, sanitize=sanitize))
        except RuntimeError as error:
            _failed[family] = f"its build failed: {error}"
            raise
        _loaded[family] = module
    return module


def missing(family: str) -> str | None:
    """Why the extension of a family cannot be had on this machine; None where it is there or can be built.

    Builds nothing and is cheap enough to be asked by every call.
    """
    if family in _loaded:
        return None
    return _failed.get(family) or _missing(family)


@cache
def _missing(family: str) -> str | None:
    wanted = extension(family)
    return None if native_build.library_path(wanted).exists() else native_build.missing_tools(wanted)


_MULTIPLIED_TYPES = {
    "jagged_attention": ("float32", "bfloat16", "float16"),
    "fuxi_attention": ("float32", "bfloat16", "float16"),
    "uvqk_projection": ("float32",),
    "output_projection": ("float32",),
}
"""The types of the matrix products of each family that has any."""


def describe(family: str = "jagged_attention") -> dict[str, str]:
    """Which paths the kernels take in this process, for explain, doctor and metrics.json. Builds nothing.

    Returns:
        vectors (the at::vec variant), and for each type of matrix that the family multiplies, by what.
    """
    vectors = {"AVX512": "AVX-512", "AVX2": "AVX2", "DEFAULT": f"plain {platform.machine()}"}[capability()]
    types = _MULTIPLIED_TYPES.get(family, ())
    asked = "jagged_attention"  # all products are those of one header, which this extension tells about
    if not types:
        return {"vectors": vectors}
    if asked not in _loaded and not native_build.library_path(extension(asked)).exists():
        return {"vectors": vectors, **dict.fromkeys(types, "not known before turbogr build")}
    products = load(asked).matrix_products()
    return {"vectors": vectors, **{name: text for name, text in products.items() if name.startswith(types)}}


def brgemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of ATen's brgemm on 64 x 256 x 64 tiles that stay in cache, on all of torch's threads at once.

    The yardstick for kernels made of such tiles: torch.mm is no upper bound where its library has no kernels for the
    machine's vectors (MKL runs at AVX2 speed on some AMD parts). The best of three runs of a few milliseconds.

    Args:
        dtype: torch.float32 or torch.bfloat16 (operands in pairs, sums in float32).

    Raises:
        ValueError: another dtype, or bfloat16 where this machine multiplies it as float32.
        RuntimeError: the kernels cannot be built.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
    rate: float = load("jagged_attention").brgemm_rate(dtype == torch.bfloat16)
    return rate
