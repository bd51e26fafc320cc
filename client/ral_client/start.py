"""First file of every client: run as ``python3 -I -S start.py IGNORED-SIGNALS ARGUMENT…``.

The launcher hands the interpreter this file's byte code where it can: to compile a script costs more than
everything below.
"""

import posix
import sys

ALWAYS = (
    "ral_protocol", "ral_protocol.exits", "ral_protocol.wire",
    "ral_client", "ral_client.answer", "ral_client.call", "ral_client.main",
)  # fmt: skip
RUN = ("ral_client.signals", "ral_client.run")
TERMINAL = ("ral_client.terminal",)
MOST = 65536
"""Bytes of byte code of one module at most."""


def preload(site: str, names: "tuple[str, ...]") -> None:
    """Import modules below ``site``, in an order in which they need each other, without looking for them.

    What takes the time in an import is the search and the objects that describe its result. Here a module is
    the byte code beside its source, under the conditions of import itself (PEP 552): the interpreter's magic
    number, time and size of the source. At the first one that is not so, the rest is left to import.
    """
    from _frozen_importlib_external import MAGIC_NUMBER
    from marshal import loads

    cache = f".{sys.implementation.cache_tag}.pyc"
    for name in names:
        package, _, module_name = name.partition(".")
        directory, stem = f"{site}/{package}", module_name or "__init__"
        source = f"{directory}/{stem}.py"
        try:
            status = posix.stat(source)
            fd = posix.open(f"{directory}/__pycache__/{stem}{cache}", posix.O_RDONLY)
        except OSError:
            return
        data = posix.read(fd, MOST)
        posix.close(fd)
        stamp = int(status.st_mtime) & 0xFFFFFFFF | (status.st_size & 0xFFFFFFFF) << 32
        if data[:16] != MAGIC_NUMBER + bytes(4) + stamp.to_bytes(8, "little") or len(data) == MOST:
            return
        module = type(sys)(name)
        module.__file__ = source
        if module_name:
            setattr(sys.modules[package], module_name, module)
        else:
            module.__path__ = [directory]
        sys.modules[name] = module
        # What import does, with the same bytes.
        exec(loads(memoryview(data)[16:]), module.__dict__)  # noqa: S102, S302


if __name__ == "__main__":
    site = __file__.rpartition("/ral_client/")[0]
    sys.path.append(site)
    needed: tuple[str, ...] = ALWAYS
    if sys.argv[2:3] == ["run"]:
        on_terminal = posix.isatty(0) or posix.isatty(1) or posix.isatty(2)
        needed += RUN + TERMINAL if on_terminal else RUN
    preload(site, needed)
    from ral_client.main import main

    main(sys.argv)
