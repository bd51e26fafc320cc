#!/usr/bin/python3
"""Print the requirements of pyproject.toml, one a line: ``runtime`` or names of dependency groups.

pip reads groups itself from 25.1 on; the pip of a Debian 12 virtual environment is 23.0.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print what the arguments name."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    named = {"runtime": pyproject["project"]["dependencies"], **pyproject["dependency-groups"]}
    for name in sys.argv[1:]:
        print(*named[name], sep="\n")


if __name__ == "__main__":
    main()
