"""Layers of a configuration as data, for the pure half of the loader: no file, no child."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ral_broker.config.document import Document, Kind, override_document, profile_document, read_document
from ral_broker.config.merge import Merged, merge, paths_of_interest
from ral_broker.config.parse import decode_answer
from ral_broker.config.values import ParsedFile
from ral_broker.config.where import Where
from ral_helpers import toml_reader

HOME = "/home/u"
PROJECT = "/home/u/work/p"
NAMES: dict[Kind, tuple[str, str]] = {
    "admin": ("/etc/ral/ral.toml", "/etc/ral/ral.toml"),
    "user": ("/home/u/.config/ral/ral.toml", "/home/u/.config/ral/ral.toml"),
    "conf.d": ("/home/u/.config/ral/conf.d/10.toml", "conf.d/10.toml"),
}


def parsed(text: str) -> ParsedFile:
    """What the child makes of a text, and the broker of its answer."""
    content = text.encode()
    answer = json.dumps([toml_reader.read_document(content)]).encode()
    (found,) = decode_answer(answer, [content])
    assert isinstance(found, ParsedFile), found
    return found


def layer(kind: Kind, text: str) -> Document:
    """One file."""
    return read_document(kind, *NAMES[kind], parsed(text), HOME)


def profile(**values: tuple[str, ...]) -> Document:
    """The layer of a profile named tool."""
    return profile_document("tool", "built-in", values, HOME)


def override(variable: str, value: str) -> Document:
    """The layer of one variable."""
    return override_document(variable, value)


def merged(*documents: Document, links: Mapping[str, str] | None = None, project: str = PROJECT) -> Merged:
    """What the layers come to on a host where ``links`` (name to target) are the only links."""
    return merge(documents, where(documents, links, project))


def where(
    documents: Sequence[Document], links: Mapping[str, str] | None = None, project: str = PROJECT
) -> Where:
    """The look at that host."""
    canonical = {path: followed(path, links or {}) for path in paths_of_interest(documents, HOME, project)}
    return Where(HOME, project, canonical)


def followed(path: str, links: Mapping[str, str]) -> str:
    """``path`` with every link followed, as realpath(3) would."""
    done = ""
    for part in path.split("/")[1:]:
        done = f"{done}/{part}"
        done = followed(links[done], links) if done in links else done
    return done or "/"


def warnings(result: Merged) -> list[str]:
    """The messages of what was put right."""
    return [problem.message for problem in result.problems if problem.severity == "warning"]


def errors(result: Merged) -> list[str]:
    """The messages of what refuses."""
    return [problem.message for problem in result.problems if problem.severity == "error"]
