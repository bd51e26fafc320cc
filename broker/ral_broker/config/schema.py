"""The JSON Schema (2020-12) of a configuration file, for editors. Pure.

It is made from the settings, so that an editor and the loader take the same files; docs/ral.schema.json is
its text: ``python -m ral_broker.config.schema >docs/ral.schema.json``.
"""

from __future__ import annotations

import sys

import msgspec

from ral_broker.config.document import DEFAULTS, EXPECTED, MAX_ENTRIES
from ral_broker.config.entries import MAX_ENTRY
from ral_broker.config.settings import SETTINGS, Entries

Json = str | int | bool | list["Json"] | dict[str, "Json"]

# Regular expressions of ECMA-262, without what editors do not have. A path that goes up is found by the
# loader alone.
_HOME = r"(~|\$HOME|\$\{HOME\})(/|$)"
_NO_SHELL = r"[^`\u0000-\u001f\u007f]*$"
_PATTERNS: dict[Entries, str] = {
    "absolute": rf"^(/|{_HOME}){_NO_SHELL}",
    "below project": rf"^(/|{_HOME}|[^~$/]){_NO_SHELL}",
    "in project": rf"^(/|{_HOME}|[^~$/]){_NO_SHELL}",
    "below home": rf"^(/|{_HOME}|[^~$/]){_NO_SHELL}",
    "device": r"^/dev/[^\u0000-\u001f\u007f]+$",
    "variable": r"^[^=\s\u0000-\u001f\u007f]+$",
    "pattern": r"^[^=\s\u0000-\u001f\u007f]+$",
    "assignment": r"^[^\u0000-\u001f\u007f]+$",
    "word": r"^[^\u0000-\u001f\u007f]+$",
}


def json_schema() -> dict[str, Json]:
    """Return the schema as a document."""
    properties: dict[str, Json] = {name: _property(name) for name in SETTINGS}
    lists: dict[str, Json] = {
        name: {"$ref": f"#/properties/{name}"} for name in SETTINGS if EXPECTED[name].type is tuple
    }
    properties["replace"] = {
        "description": "Lists that replace what weaker layers say, instead of adding to it.",
        "type": "object",
        "additionalProperties": False,
        "properties": lists,
    }
    properties["match"] = {
        "description": "In conf.d only: the projects that this file is for.",
        "type": "object",
        "additionalProperties": False,
        "required": ["project"],
        "properties": {
            "project": {
                "description": "Patterns of project directories: `*` within one component, `**` any number.",
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "pattern": _PATTERNS["absolute"]},
            }
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of ral",
        "description": "ral.toml(5)",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(name: str) -> Json:
    setting, expected, default = SETTINGS[name], EXPECTED[name], DEFAULTS[name]
    text = setting.doc[0].upper() + setting.doc[1:] + "."
    if setting.admin_only:
        text += " In /etc/ral/ral.toml only."
    found: dict[str, Json] = {"description": text}
    if setting.state == "refused":
        found["description"] = f"{text} Refused: {setting.note}."
        # None of them has a default that TOML cannot write.
        found["const"] = list(default) if isinstance(default, tuple) else default or False
        return found
    if expected.type is tuple:
        items: Json = {
            "type": "string", "minLength": 1, "maxLength": MAX_ENTRY, "pattern": _PATTERNS[setting.entries]
        }  # fmt: skip
        found |= {"type": "array", "maxItems": MAX_ENTRIES, "items": items}
    elif expected.words:
        found |= {"type": "string", "enum": list(expected.words)}
    elif expected.type is bool:
        found["type"] = "boolean"
    elif expected.type is int:
        found |= {"type": "integer", "minimum": setting.least, "maximum": 0x7FFFFFFF}
    else:
        found["type"] = "string"
    if default is not None:
        found["default"] = list(default) if isinstance(default, tuple) else default
    return found


def render() -> str:
    """Return the schema as the text of docs/ral.schema.json."""
    return msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
