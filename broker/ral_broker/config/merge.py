"""Layers into one effective configuration. Pure: which paths are links, somebody else has looked up.

What the administrator's file names is pinned at the moment a weaker-trusted layer is applied, for each layer
anew, so no order of layers and no combination of them gets around a pin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec

from ral_broker.config.document import DEFAULTS, Document, Setting, toml_text
from ral_broker.config.effective import Origin, Problem
from ral_broker.config.entries import join
from ral_broker.config.profile import BUILT_IN
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.config.where import Tree, Where, applies, forms_of, literal_part
from ral_broker.log import shown

WRITABLE = ("extra_writable_paths", "home_writable")
_BUILT_IN = Document(kind="profile", file=BUILT_IN, name=BUILT_IN)


class Merged(msgspec.Struct, frozen=True):
    """``problems`` in the order of the layers; with an error among them the settings are not to be used."""

    settings: Settings
    origins: dict[str, tuple[Origin, ...]]
    problems: tuple[Problem, ...]


def paths_of_interest(documents: Sequence[Document], home: str, project: str) -> list[str]:
    """Return the paths whose canonical form the merge asks for."""
    paths = [home, project]
    for document in documents:
        paths += ["/" + "/".join(literal_part(pattern)) for pattern in document.projects or ()]
        for key in ("allowed_project_parents", "denied_writable_paths"):
            paths += _list(document, key)
        paths += [_absolute(path, project) for path in _list(document, "extra_writable_paths")]
        paths += [join(home, path) for path in _list(document, "home_writable")]
        if document.kind == "admin":
            paths += [join(home, path) for path in _list(document, "home_readonly")]
    return list(dict.fromkeys(paths))


def _list(document: Document, key: str) -> tuple[str, ...]:
    value = document.values.get(key, ())
    return value if isinstance(value, tuple) else ()


def _absolute(path: str, project: str) -> str:
    return path if path.startswith("/") else join(project, path)


class _Merger:
    """The values so far, and where each is from."""

    def __init__(self, documents: Sequence[Document], where: Where) -> None:
        self._where = where
        self._admin = next(
            (d for d in documents if d.kind == "admin"), Document(kind="admin", file="", name="")
        )
        self._pins = self._admin.values
        self.problems: list[Problem] = []
        self.scalars: dict[str, tuple[Setting | None, Document]] = {}
        self.lists: dict[str, dict[str, Document]] = {}
        self._narrowed: set[str] = set()
        for name, default in DEFAULTS.items():
            if isinstance(default, tuple):
                self.lists[name] = dict.fromkeys(default, _BUILT_IN)
            else:
                self.scalars[name] = default, _BUILT_IN

    def apply(self, document: Document) -> None:
        """Take up one layer; what a pin of the administrator's forbids stays out, with a warning."""
        for name, value in document.values.items():
            if isinstance(value, tuple):
                self._apply_list(document, name, value)
            elif document.kind == "admin" or self._may_set(document, name, value):
                self.scalars[name] = value, document

    def _may_set(self, document: Document, name: str, value: Setting) -> bool:
        setting, pin = SETTINGS[name], self._pins.get(name)
        if pin is None:
            return True
        match setting.merge:
            case "hard":
                weaker = pin is True and value is not True
            case "ordered":
                weaker = setting.order.index(str(value)) < setting.order.index(str(pin))
            case "admin":
                weaker = value != pin
            case _:
                return True
        if weaker:
            self._warn(
                document,
                name,
                f"{toml_text(value)} is weaker than what {self._admin.file} pins; restored to "
                f"{toml_text(pin)}",
            )
        return not weaker  # wall

    def _apply_list(self, document: Document, name: str, entries: tuple[str, ...]) -> None:
        setting = SETTINGS[name]
        if name in ("extra_writable_paths", "extra_blocked_paths", "blocked_files"):
            entries = tuple(_absolute(entry, self._where.project) for entry in entries)
        trusted = document.kind == "admin"
        pinned = () if trusted else self._pinned(name)
        if setting.merge == "narrow":
            self._narrow(document, name, entries, trusted=trusted)
            return
        if setting.merge == "admin" and pinned:
            for entry in entries:
                if entry not in pinned:
                    self._warn(
                        document,
                        name,
                        f"'{shown(entry)}' is left out: {self._admin.file} decides this alone",
                    )
            return
        if name not in document.replaced:
            self._add(document, name, entries)
            return
        if setting.merge in ("enforced", "additive"):
            if setting.merge == "enforced":
                for entry in pinned:
                    if entry not in entries:
                        self._warn(
                            document,
                            name,
                            f"removed admin-enforced {name} entry '{shown(entry)}' — restored",
                        )
            self.lists[name] = dict.fromkeys(pinned, self._admin)  # wall
        else:
            self.lists[name] = {}
        self._add(document, name, entries)

    def _pinned(self, name: str) -> tuple[str, ...]:
        """Return what the administrator lists of a list, absolute."""
        value = self._pins.get(name, ())
        if not isinstance(value, tuple):
            return ()
        if SETTINGS[name].entries == "below project":
            return tuple(_absolute(entry, self._where.project) for entry in value)
        return value

    def _add(self, document: Document, name: str, entries: Iterable[str]) -> None:
        present = self.lists[name]
        for entry in entries:
            present.setdefault(entry, document)

    def _narrow(self, document: Document, name: str, entries: tuple[str, ...], *, trusted: bool) -> None:
        """The user's first layer takes the place of the administrator's list, later ones add to it."""
        baseline = Tree(forms_of(self._pinned(name) or ("/",), self._where))
        admitted = []
        for entry in entries:
            canonical = self._where.canonical.get(entry)
            if trusted or (canonical is not None and baseline.above(canonical) is not None):  # wall
                admitted.append(entry)
            else:
                resolves = (
                    f" (it resolves to '{shown(canonical)}')" if canonical not in (None, entry) else ""
                )
                self._warn(
                    document,
                    name,
                    f"'{shown(entry)}' is not under any admin-allowed parent{resolves}; left out",
                )
        if trusted or name in document.replaced or name not in self._narrowed:
            self.lists[name] = {}
        if not trusted:
            self._narrowed.add(name)
        self._add(document, name, admitted)
        if not self.lists[name]:
            self.fail(document, name, "allows no directory at all, so no session can start; add one")

    def _warn(self, document: Document, name: str, text: str) -> None:
        self.problems.append(document.warning(name, text))

    def fail(self, document: Document, name: str, text: str) -> None:
        """Note an error that a layer makes."""
        self.problems.append(Problem("error", document.file, document.lines.get(name), name, text))

    # What holds for the result, whichever layer it is from.

    def finish(self) -> None:
        """Take out of the result what no layer may bring about, with a warning for each."""
        self._filter_writable()
        if "PATH" in self.lists["hide_from_sandbox"]:
            document = self.lists["hide_from_sandbox"].pop("PATH")
            self._warn(document, "hide_from_sandbox", "PATH cannot be hidden: nothing would start; left out")
        value, document = self.scalars["bind_dev_pts"]
        if value:
            self._warn(
                document,
                "bind_dev_pts",
                "has no effect: a session always has terminals of its own; leave it out",
            )
        for stronger, word in (("home_writable", "writable"), ("home_seeded_files", "seeded")):
            for entry in self.lists[stronger]:
                document = self.lists["home_readonly"].get(entry, _BUILT_IN)
                if document is not _BUILT_IN:
                    self._warn(
                        document, "home_readonly", f"'{shown(entry)}' is also in {stronger}: {word} wins"
                    )
                self.lists["home_readonly"].pop(entry, None)
        self._check_project()

    def _filter_writable(self) -> None:
        where = self._where
        denied = Tree(forms_of(self.lists["denied_writable_paths"], where))
        readonly = Tree(
            forms_of((join(where.home, entry) for entry in self._pinned("home_readonly")), where, where.home)
        )
        home = Tree(dict.fromkeys(where.forms(where.home), ""))
        for name in WRITABLE:
            trusted = self._pinned(name)
            for entry, document in list(self.lists[name].items()):
                path = entry if name == "extra_writable_paths" else join(where.home, entry)
                reason = self._objection(path, denied, home, readonly if entry not in trusted else None)
                if reason is not None:
                    del self.lists[name][entry]  # wall
                    self._warn(document, name, f"'{shown(entry)}' {reason}; left out")

    def _objection(self, path: str, denied: Tree, home: Tree, readonly: Tree | None) -> str | None:
        if path not in self._where.canonical:
            return "did not answer, so it cannot be told where it leads"
        for form in self._where.forms(path):
            if home.below(form) is not None:
                return "is $HOME or an ancestor of it"
            if (entry := denied.above(form)) is not None:
                return f"lies in '{shown(entry)}' of denied_writable_paths"
            if readonly is not None:
                entry = readonly.above(form) or readonly.below(form)
                if entry is not None:
                    return f"overlaps admin home_readonly entry '{shown(entry)}'"
        return None

    def _check_project(self) -> None:
        where = self._where
        parents = self.lists["allowed_project_parents"]
        forms = where.forms(where.project)
        allowed = Tree(forms_of(parents, where))
        if parents and not any(allowed.above(form) is not None for form in forms):
            document = next(iter(parents.values()))
            names = ", ".join(f"'{shown(parent)}'" for parent in parents)
            self.fail(
                document,
                "allowed_project_parents",
                f"the project '{shown(where.project)}' is not under {names}; start ral in a project that is",
            )
        denied = Tree(forms_of(self.lists["denied_writable_paths"], where))
        for form in forms:
            entry = denied.above(form)
            if entry is not None:
                self.fail(
                    self.lists["denied_writable_paths"][entry],
                    "denied_writable_paths",
                    f"the project '{shown(where.project)}' lies in '{shown(entry)}', which nothing may "
                    "write; start ral in another directory",
                )
                return

    def merged(self) -> Merged:
        """Return the result."""
        values: dict[str, object] = {name: value for name, (value, _) in self.scalars.items()}
        origins: dict[str, tuple[Origin, ...]] = {}
        for name in SETTINGS:
            if name in self.lists:
                values[name] = tuple(self.lists[name])
                origins[name] = tuple(_origin(name, e, document) for e, document in self.lists[name].items())
            else:
                value, document = self.scalars[name]
                origins[name] = () if value is None else (_origin(name, value, document),)
        return Merged(msgspec.convert(values, Settings), origins, tuple(self.problems))


def _origin(name: str, value: Setting, document: Document) -> Origin:
    if document is _BUILT_IN:
        return _built_in_origin(value)
    return Origin(toml_text(value), document.name, document.lines.get(name))


@functools.lru_cache(maxsize=1024, typed=True)
def _built_in_origin(value: Setting) -> Origin:
    return Origin(toml_text(value), BUILT_IN)


def merge(documents: Sequence[Document], where: Where) -> Merged:
    """Return what the layers come to, weakest first: profile, administrator, user, conf.d, environment."""
    merger = _Merger(documents, where)
    for document in documents:
        merger.problems += document.problems
        if applies(document, where):
            merger.apply(document)
    merger.finish()
    return merger.merged()


def enabled_agents(documents: Sequence[Document], where: Where) -> tuple[str, ...]:
    """Return that setting alone: it decides which profile there is, and a profile is a layer."""
    merger = _Merger(documents, where)
    for document in documents:
        if "enabled_agents" in document.values and applies(document, where):
            only = {"enabled_agents": document.values["enabled_agents"]}
            merger.apply(msgspec.structs.replace(document, values=only))
    return tuple(merger.lists["enabled_agents"])
