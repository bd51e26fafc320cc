"""Build hook: compiles the native helpers and gives the wheel the tag of the machine they are for."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Protocol, cast

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = ("trampoline", "holder")
MACHINES = ("x86_64", "aarch64")


class NativeBuild(Protocol):
    """helpers/build_native.py, which also works without hatchling."""

    BuildError: type[Exception]

    def compile_all(self, out_dir: Path) -> list[Path]:
        """Compile every native helper into ``out_dir``; BuildError says what is missing."""


class NativeHook(BuildHookInterface[BuilderConfig]):
    """Adds the native helpers to a wheel; an editable install gets them in place."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Compile. ``version`` is ``standard`` or ``editable``. Ends the build where it cannot be done."""
        if self.target_name != "wheel":
            return
        machine = os.uname().machine
        if sys.platform != "linux" or machine not in MACHINES:
            self.app.abort(f"ral: not built: it runs on Linux on {' or '.join(MACHINES)}, not on {machine}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
        if version == "editable":
            self._compile(Path(self.root) / "helpers" / "ral_helpers")
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="ral-build-")
        out_dir = Path(self._scratch.name)
        self._compile(out_dir)
        force_include = cast("dict[str, str]", build_data["force_include"])
        for name in NATIVE:
            force_include[str(out_dir / name)] = f"ral_helpers/{name}"

    def finalize(self, version: str, build_data: dict[str, object], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        del version, build_data, artifact_path
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _compile(self, out_dir: Path) -> None:
        source = Path(self.root) / "helpers" / "build_native.py"
        spec = importlib.util.spec_from_file_location("ral_build_native", source)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        build = cast("NativeBuild", module)
        try:
            build.compile_all(out_dir)
        except build.BuildError as error:
            # One line instead of the traceback that pip would show for an exception.
            self.app.abort(f"ral: not built: {error}")
