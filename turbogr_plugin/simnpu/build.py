"""What the C++ part of the simulation is made of; native_build builds it on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from turbogr_plugin import native_build

SOURCE_FOLDER = Path(__file__).parent / "csrc"
DEVICE_SOURCES = tuple(
    f"{name}.cpp"
    for name in (
        "device",
        "order",
        "host_order",
        "allocator",
        "hooks",
        "tensors",
        "operators",
        "boxed",
        "autocast",
        "process_group",  # one library: it uses the checker and the memory of the device
        "bindings",
    )
)
# -O1: the kernels are torch's own; -O2 makes the build longer and nothing faster. NDEBUG as the wheel has it: classes
# in torch's headers have members that depend on it.
FLAGS = ("-O1", "-DNDEBUG", "-std=c++20")


def extension(name: str, sources: Sequence[str]) -> ModuleType:
    """An extension of the simulation, imported; built before if this version of it is not there.

    Args:
        name: of the Python module.
        sources: files of csrc/.

    Raises:
        RuntimeError: there is no C++ compiler, no ninja, or no folder for the result, or the build failed; the
            message says which.
    """
    return native_build.load(native_build.Extension(name, "the simulated npu", SOURCE_FOLDER, sources, FLAGS))
