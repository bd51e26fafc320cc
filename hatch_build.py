"""Build hook: compiles the native programs and gives the wheel the tag of the machine they are for."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = ("x86_64", "aarch64")


class NativeBuild(Protocol):
    """helpers/build_native.py, which also works without hatchling."""

    BuildError: type[Exception]
    HELPERS: Sequence[str]
    LAUNCHER: str

    def compile_programs(self, out_dir: Path, programs: Sequence[str]) -> list[Path]:
        """Compile ``programs`` into ``out_dir``; BuildError says what is missing."""


class NativeHook(BuildHookInterface[BuilderConfig]):
    """Adds the helpers and the launcher to a wheel; an editable install gets the helpers in place."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Compile. ``version`` is ``standard`` or ``editable``. Ends the build where it cannot be done."""
        if self.target_name != "wheel":
            return
        machine = os.uname().machine
        if sys.platform != "linux" or machine not in MACHINES:
            self.app.abort(f"ral: not built: it runs on Linux on {' or '.join(MACHINES)}, not on {machine}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
        build = self._native_build()
        self._scratch = tempfile.TemporaryDirectory(prefix="ral-build-")
        scratch = Path(self._scratch.name)
        force_include = cast("dict[str, str]", build_data["force_include"])
        shared_scripts = cast("dict[str, str]", build_data["shared_scripts"])
        try:
            if version == "editable":
                build.compile_programs(Path(self.root) / "helpers" / "ral_helpers", build.HELPERS)
            else:
                for helper in build.compile_programs(scratch, build.HELPERS):
                    force_include[str(helper)] = f"ral_helpers/{helper.name}"
            # Not an entry point: a console script imports site and costs twice as much as the launcher.
            for launcher in build.compile_programs(scratch, [build.LAUNCHER]):
                shared_scripts[str(launcher)] = "ral"
        except build.BuildError as error:
            # One line instead of the traceback that pip would show for an exception.
            self.app.abort(f"ral: not built: {error}")

    def finalize(self, version: str, build_data: dict[str, object], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        del version, build_data, artifact_path
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _native_build(self) -> NativeBuild:
        source = Path(self.root) / "helpers" / "build_native.py"
        spec = importlib.util.spec_from_file_location("ral_build_native", source)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cast("NativeBuild", module)
