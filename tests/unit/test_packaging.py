"""What is built and installed: the wheel, its contents, and what a machine without a compiler is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from ral_client import completion
from ral_protocol.exits import VERSION
from support.facilities import require
from support.installed import ROOT, python_path

pytestmark = pytest.mark.slow

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".hypothesis", "__pycache__", ".*_cache", "dist", "trampoline", "holder", "zygote"
)


def build(tree: Path, out: Path, *kinds: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m build` in ``tree``, without a network."""
    return subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds, str(tree)],
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: a build may write into it."""
    copy = tmp_path_factory.mktemp("tree") / "ral"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    done = build(tree, out, "--sdist")
    assert done.returncode == 0, done.stdout + done.stderr
    return out / f"ral-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an installer would."""
    require("gcc")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(["tar", "-xzf", sdist, "-C", out], check=True)
    done = build(out / f"ral-{VERSION}", out, "--wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    return out / f"ral-{VERSION}-py3-none-linux_{os.uname().machine}.whl"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with ral and nothing else; the client needs nothing else."""
    created = tmp_path_factory.mktemp("env")
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", created], check=True, timeout=60)
    install(wheel, created / "bin/python")
    return created


def install(wheel: Path, python: Path, *options: str, **environment: str) -> None:
    """`pip install` for another interpreter, without a network."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", *options, wheel],
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **environment},
        check=True,
        timeout=120,
    )


def assert_runs(ral: Path) -> None:
    done = subprocess.run([ral, "--version"], env={}, capture_output=True, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ral {VERSION}\n".encode(), b"")


def test_the_wheel_is_for_this_machine_and_any_python(wheel: Path) -> None:
    assert wheel.exists()
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"ral-{VERSION}.dist-info/WHEEL").decode().splitlines()
    assert "Root-Is-Purelib: false" in metadata
    assert f"Tag: py3-none-linux_{os.uname().machine}" in metadata


def test_the_wheel_holds_the_four_packages_and_their_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        assert {name.split("/")[0] for name in names} == {
            "ral_broker", "ral_client", "ral_helpers", "ral_protocol",
            f"ral-{VERSION}.data", f"ral-{VERSION}.dist-info",
        }  # fmt: skip
        for native in ("trampoline", "holder", "zygote"):
            assert archive.read(f"ral_helpers/{native}")[:4] == b"\x7fELF"
            assert modes[f"ral_helpers/{native}"] & 0o777 == 0o755
        command = f"ral-{VERSION}.data/scripts/ral"
        assert archive.read(command)[:4] == b"\x7fELF"
        assert modes[command] & 0o777 == 0o755
    units = {
        name.rpartition("/")[2] for name in names if f"ral-{VERSION}.data/data/lib/systemd/user/" in name
    }
    assert units == {"ral-broker.socket", "ral-broker.service"}
    assert not [name for name in names if name.endswith((".pyc", ".c", ".h"))]
    sources = {str(path.relative_to(path.parents[1])) for path in ROOT.glob("*/ral_*/*.py")}
    assert sources <= set(names)


def test_the_source_distribution_is_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE", "Makefile", "README.md", "NEWS.md", "SECURITY.md", "hatch_build.py", "pyproject.toml",
        "helpers/build_native.py", "helpers/native/kernel.h", "helpers/native/launcher.c", "tools/test.sh",
        "tests/conftest.py", "systemd/ral-broker.service", ".ci/run",
    } <= names  # fmt: skip
    assert not [
        name for name in names if name.endswith((".pyc", "/trampoline", "/holder", "/zygote", "/launcher"))
    ]
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "helpers/native").iterdir()}
    assert sources <= names


def test_a_clean_installation_runs(environment: Path) -> None:
    assert_runs(environment / "bin/ral")


def test_an_environment_may_be_moved(environment: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(environment, tmp_path / "moved", symlinks=True)
    assert_runs(moved / "bin/ral")
    (tmp_path / "ral").symlink_to("moved/bin/ral")
    assert_runs(tmp_path / "ral")


def test_pip_takes_away_what_it_installed(wheel: Path, environment: Path, tmp_path: Path) -> None:
    created = shutil.copytree(environment, tmp_path / "created", symlinks=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(created / "bin/python"),
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "ral"], check=True, timeout=60)
    assert not [path for path in created.rglob("*") if path.name.startswith("ral")]
    install(wheel, created / "bin/python")
    assert_runs(created / "bin/ral")


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ("--user", {"PYTHONUSERBASE": "{there}"}),
        ("--prefix={there}", {}),
        ("--root={there}", {}),
        ("--root={there}", {"DEB_PYTHON_INSTALL_LAYOUT": "deb"}),
    ],
    ids=["user", "prefix", "root", "debian package"],
)
def test_it_runs_wherever_pip_puts_it(
    wheel: Path, tmp_path: Path, options: str, variables: dict[str, str]
) -> None:
    there = tmp_path / "there"
    environment = {name: value.format(there=there) for name, value in variables.items()}
    option = options.format(there=there)
    install(
        wheel,
        Path("/usr/bin/python3"),
        "--break-system-packages",
        "--ignore-installed",
        option,
        **environment,
    )
    [ral] = there.rglob("bin/ral")
    assert_runs(ral)


def test_the_client_starts_from_byte_code_that_the_installer_made(environment: Path, tmp_path: Path) -> None:
    """Compiling the client's modules at every start costs more than starting the interpreter."""
    moved = shutil.copytree(environment, tmp_path / "moved", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(moved)}))
    for source in (*site.glob("ral_client/*.py"), *site.glob("ral_protocol/*.py")):
        before = source.stat()
        source.write_bytes(b"!" * before.st_size)
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_runs(moved / "bin/ral")
    started = subprocess.run(
        [moved / "bin/ral", "run", "--as-user", "no-such-user", "true"], capture_output=True, timeout=10
    )
    assert b"there is no such user" in started.stderr


def test_make_puts_manual_pages_units_and_completion_where_they_are_looked_for(
    environment: Path, tmp_path: Path
) -> None:
    """All of `make install` but the virtual environment, for which pip would want a network."""
    root = tmp_path / "root"
    library = root / "opt/ral/lib/ral"
    shutil.copytree(environment, library, symlinks=True)
    other = root / "opt/ral/share/zsh/site-functions/_other"
    other.parent.mkdir(parents=True)
    other.write_text("#compdef other\n")

    def make(target: str) -> None:
        done = subprocess.run(
            ["make", "-s", "-C", ROOT, target, f"DESTDIR={root}", "PREFIX=/opt/ral"],
            env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, umask=0o077,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    make("install-files")
    assert_runs(root / "opt/ral/bin/ral")
    service = (root / "opt/ral/lib/systemd/user/ral-broker.service").read_text()
    assert "ExecStart=/opt/ral/bin/ral " in service
    pages = {path.name for path in root.glob("opt/ral/share/man/man?/*")}
    assert pages == {path.name for path in (ROOT / "docs/man").iterdir()}
    share = root / "opt/ral/share"
    for shell, place in (
        ("bash", "bash-completion/completions/ral"),
        ("zsh", "zsh/site-functions/_ral"),
        ("fish", "fish/vendor_completions.d/ral.fish"),
    ):
        assert (share / place).read_text(encoding="utf-8") == completion.script(shell)
        assert (share / place).stat().st_mode & 0o777 == 0o644
    make("uninstall")
    assert [path for path in root.rglob("*") if not path.is_dir()] == [other]


def test_native_helpers_are_executable_where_installed(environment: Path) -> None:
    helpers = next(environment.glob("lib/python3.*/site-packages/ral_helpers"))
    assert all(os.access(helpers / name, os.X_OK) for name in ("trampoline", "holder", "zygote"))


def test_without_a_compiler_the_build_says_so_in_one_line(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, "--wheel", CC="no-such-compiler")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
    assert "ral: not built: the C compiler no-such-compiler is missing; install it" in said
    assert "Traceback" not in said


def test_the_tests_run_what_users_run() -> None:
    """Not the checkout: an installation of it, by the interpreter that the fixtures start."""
    found = subprocess.run(
        [
            python_path(),
            "-I",
            "-c",
            "import ral_broker, ral_client; print(ral_broker.__file__, ral_client.__file__)",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert all("/site-packages/" in name for name in found.stdout.split())
