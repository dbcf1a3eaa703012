"""The one strict YAML reader: what every configuration file of the library is read with.

Scalars follow YAML 1.2, so `1e-3` is a number and `no` is a word; a key that appears twice is rejected; mapping keys are
text. Nothing in a file can run code: of tags, only the core schema's and our `!ref`, `!tuple`, `!list` and `!str` are
known. Input is hostile until proven otherwise: size, nesting and what aliases and references expand to are limited.
Every failure is one error that names file and line. JSON is read by the same functions.

The reader composes with a `SafeLoader` subclass (libyaml's scanner where it is installed) and then builds plain Python
values itself, because that is where lines are still known.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import IO, Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from drivetrain.core.errors import ConfigError, did_you_mean, nearest_name
from drivetrain.core.types import Settings
from drivetrain.core.yaml_tags import BracketProblem, ReferenceProblem, RefTag, parse_brackets, resolve_references

KeyPath = tuple[str | int, ...]
YamlSource = str | os.PathLike[str] | IO[str] | IO[bytes]

MAX_BYTES = 1_000_000
MAX_VALUES = 100_000  # about a second of reading; configuration files have a few hundred
MAX_DEPTH = 64
MAX_EXPANDED = 1_500_000  # values plus characters of text, after aliases and references have been followed

_CORE = "tag:yaml.org,2002:"
_DECIMAL = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_SCALARS: dict[str, tuple[re.Pattern[str], list[str | None]]] = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    "float": (re.compile(rf"^(?:{_DECIMAL}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"), list("-+.0123456789")),
}
"""The form of each kind of plain scalar, and the characters it may begin with; the first that fits decides."""
_TAGS = ("!ref", "!tuple", "!list", "!str")
_SCANNER = yaml.cyaml.CParser if yaml.__with_libyaml__ else None  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class YamlFile:
    """What a file holds, and where in the file each key was written."""

    data: Settings
    """Plain values: dict, list, tuple, str, int, float, bool, None."""
    name: str
    """The file's name as errors print it."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """The line, counted from 1, of each key and list item."""

    def line(self, *path: str | int) -> int | None:
        """Return the line of the key, or of the nearest enclosing one that was written in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def where(self, *path: str | int, key: str | int | None = None) -> str:
        """Return `file:line path` for an error message; `key` moves the line to that entry of the place.

        >>> YamlFile(data={}, name="train.yaml", lines={("a", "b"): 3}).where("a", key="b")
        'train.yaml:3 a'
        """
        line = self.line(*path) if key is None else self.line(*path, key)
        place = f"{self.name}:{line}" if line else self.name
        dotted = ".".join(map(str, path))
        return f"{place} {dotted}" if dotted else place


def load_yaml(source: YamlSource, *, tags: bool = True, error: type[Exception] = ConfigError) -> Settings:
    """Read a YAML or JSON file, or an open stream, and return the mapping it holds; an empty file is an empty mapping.

    >>> import io
    >>> load_yaml(io.StringIO("lr: 1e-3\\nbetas: !tuple (0.9, 0.98)"))
    {'lr': 0.001, 'betas': (0.9, 0.98)}
    """
    return read_yaml(source, tags=tags, error=error).data


def read_yaml(source: YamlSource, *, tags: bool = True, error: type[Exception] = ConfigError) -> YamlFile:
    """Read a YAML or JSON file like `load_yaml`, and keep the line of every key.

    `tags=False` rejects our own tags too, for files that are data rather than configuration. Failures raise `error`.
    """
    name, text = _read_text(source, error)
    is_json = name.endswith(".json")
    if is_json:
        text = _json_as_yaml(text)
    reader = _NodeReader(name, tags=tags, plain_text=not is_json, error=error)
    try:
        root = StrictLoader(text).get_single_node()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        reason = ", ".join(part for part in (problem.context, problem.problem, problem.note) if part)
        raise error(f"{name}:{mark.line + 1 if mark else 1}: {reason}.") from None
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        code = problem.character if isinstance(problem.character, int) else ord(problem.character)
        raise error(f"{name}:{line}: the character #x{code:04x} is not allowed in YAML.") from None
    except yaml.YAMLError as problem:
        raise error(f"{name}: {problem}") from None
    if root is None or (isinstance(root, ScalarNode) and root.tag == _CORE + "null" and not root.value):
        return YamlFile(data={}, name=name)
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else f"the single value {root.value[:60]!r}"
        raise error(f"{name}:{root.start_mark.line + 1}: the file holds {kind}; expected `key: value` pairs.")
    data = reader.build(root, ())
    if tags:
        try:
            data = resolve_references(data, limit=MAX_EXPANDED)
        except ReferenceProblem as problem:
            raise error(f"{name}:{problem.line}: {problem}") from None
    return YamlFile(data=data, name=name, lines=reader.lines)


def dump_yaml(data: Mapping[str, object]) -> str:
    """Write plain values as YAML text that `load_yaml` reads back equal, tuples included.

    >>> print(dump_yaml({"lr": 1e-5, "betas": (0.9, 0.98), "name": "1e-3"}), end="")
    lr: 1.0e-05
    betas: !tuple [0.9, 0.98]
    name: '1e-3'
    """
    try:
        return str(yaml.dump(dict(data), Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, width=100))
    except yaml.representer.RepresenterError as problem:
        value = problem.args[-1]
        raise ConfigError(f"{value!r} ({type(value).__name__}) cannot be written as YAML; use plain values.") from None


class StrictLoader(yaml.SafeLoader):
    """Composes one document with YAML 1.2 scalars and rejects aliases and nesting that could exhaust the reader."""

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def __init__(self, text: str):
        super().__init__("" if _SCANNER else text)
        if _SCANNER:  # the same events from libyaml, about ten times as fast
            events = _SCANNER(text)
            self.check_event, self.peek_event, self.get_event = events.check_event, events.peek_event, events.get_event  # type: ignore[method-assign]
        self._depth, self._expanded = 0, 0
        self._sizes: dict[int, int] = {}  # id of a finished node: what it expands to

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Compose one node, counting what it would expand to."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            node: Node | None = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias refers to the value it is part of", mark)
            self._count(self._sizes[id(node)], mark)
            return node
        mark = self.peek_event().start_mark
        self._depth += 1
        if len(self._sizes) > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"there are more than {MAX_VALUES:,} values", mark)
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"values are nested more than {MAX_DEPTH} deep", mark)
        before = self._expanded
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._count(1 + (len(node.value) if isinstance(node, ScalarNode) else 0), mark)
        self._sizes[id(node)] = self._expanded - before
        return node

    def _count(self, size: int, mark: Any) -> None:
        self._expanded += size
        if self._expanded > MAX_EXPANDED:
            raise yaml.composer.ComposerError(None, None, "aliases expand to too many values", mark)


class _StrictDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, and tags tuples."""

    def ignore_aliases(self, data: object) -> bool:
        return True


for _kind, (_pattern, _first) in _SCALARS.items():
    StrictLoader.add_implicit_resolver(_CORE + _kind, _pattern, _first)
    _StrictDumper.add_implicit_resolver(_CORE + _kind, _pattern, _first)
StrictLoader.add_implicit_resolver(_CORE + "merge", re.compile(r"^<<$"), ["<"])
for _unreadable in (bytes, set, date, datetime):
    _StrictDumper.add_representer(_unreadable, _StrictDumper.represent_undefined)
# PyYAML folds a line that this character ends, and reads it back as a space.
_StrictDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_CORE + "str", text, style='"' if "\x85" in text else None)
)
_StrictDumper.add_representer(tuple, lambda dumper, data: dumper.represent_sequence("!tuple", data, flow_style=True))


class _NodeReader:
    """Turns composed nodes into plain values, remembering the line of every key."""

    def __init__(self, name: str, *, tags: bool, plain_text: bool, error: type[Exception]):
        self.name, self.tags, self.plain_text, self.error = name, tags, plain_text, error
        self.lines: dict[KeyPath, int] = {}

    def build(self, node: Node, path: KeyPath) -> Any:
        """Return the value of a node."""
        tag = node.tag
        if tag.startswith("!") and tag != "!":
            return self._build_tagged(node, path)
        if isinstance(node, ScalarNode):
            return self._build_scalar(node)
        is_mapping = isinstance(node, MappingNode)
        if tag != _CORE + ("map" if is_mapping else "seq"):
            raise self._unknown_tag(node)
        build: Callable[[Any, KeyPath], object] = self._build_mapping if is_mapping else self._build_items
        return build(node, path)

    def fail(self, node: Node, message: str) -> Exception:
        """Return the error of this reader for a place in the file."""
        return self.error(f"{self.name}:{node.start_mark.line + 1}: {message}")

    def _unknown_tag(self, node: Node) -> Exception:
        shown = node.tag.replace(_CORE, "!!")
        hint = did_you_mean(shown, _TAGS) if self.tags else ""
        known = f"Known tags: {', '.join(_TAGS)}." if self.tags else "This file must not use tags."
        return self.fail(node, f"the tag {shown!r} is not allowed.{hint} {known}")

    def _build_mapping(self, node: MappingNode, path: KeyPath) -> dict[str, object]:
        merged: dict[str, object] = {}
        own: dict[str, object] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in first_line:
                place = f" in {'.'.join(map(str, path))}" if path else ""
                raise self.fail(key_node, f"the key {key!r} appears twice{place}, first in line {first_line[key]}.")
            first_line[key] = line
            if key_node.tag == _CORE + "merge":
                merged = self._merge(value_node, path)
            else:
                self.lines[(*path, key)] = line
                own[key] = self.build(value_node, (*path, key))
        return {**merged, **own}

    def _merge(self, node: Node, path: KeyPath) -> dict[str, object]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        merged: dict[str, object] = {}
        for source in reversed(sources):  # the first of several mappings wins
            if not isinstance(source, MappingNode):
                raise self.fail(source, "'<<' merges mappings, given by an alias such as `<<: *defaults`.")
            merged.update(self._build_mapping(source, path))
        return merged

    def _key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode) or not node.tag.startswith(_CORE):
            raise self.fail(node, "a key must be plain text or a number.")
        if not node.style and not self.plain_text:
            raise self.fail(node, f"the key {node.value[:60]!r} needs double quotes in JSON.")
        return str(node.value)

    def _build_items(self, node: SequenceNode, path: KeyPath) -> list[object]:
        items = []
        for index, item in enumerate(node.value):
            self.lines[(*path, index)] = item.start_mark.line + 1
            items.append(self.build(item, (*path, index)))
        return items

    def _build_scalar(self, node: ScalarNode) -> object:
        kind = "str" if node.tag == "!" else node.tag.removeprefix(_CORE)
        text: str = node.value
        if kind == "str":
            if not node.style and not self.plain_text:
                raise self.fail(node, f"JSON has no value {text[:60]!r}; text needs double quotes.")
            return text
        if kind not in _SCALARS:
            raise self._unknown_tag(node)
        if not _SCALARS[kind][0].match(text):
            raise self.fail(node, f"{text[:60]!r} is not a {kind}.")
        return self._convert(node, kind, text)

    def _convert(self, node: ScalarNode, kind: str, text: str) -> object:
        if kind == "null":
            return None
        if kind == "bool":
            return text in ("true", "True", "TRUE")
        if kind == "int":
            try:
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            except ValueError:  # Python limits the digits of a number
                raise self.fail(node, f"the number {text[:20]}... has {len(text)} digits.") from None
        if text.lstrip("+-").lower() in (".inf", ".nan"):
            return float(text.replace(".", ""))
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise self.fail(node, f"the number {text[:60]} is too large; write .inf for infinity.")
        return value

    def _build_tagged(self, node: Node, path: KeyPath) -> object:
        tag = node.tag
        if not self.tags or tag not in _TAGS:
            raise self._unknown_tag(node)
        if tag in ("!tuple", "!list"):
            items = self._build_items(node, path) if isinstance(node, SequenceNode) else self._read_brackets(node)
            return tuple(items) if tag == "!tuple" else items
        if not isinstance(node, ScalarNode):
            raise self.fail(node, f"{tag} expects text, not a list or mapping.")
        return node.value if tag == "!str" else RefTag(text=node.value, line=node.start_mark.line + 1)

    def _read_brackets(self, node: Node) -> list[object]:
        if not isinstance(node, ScalarNode):
            raise self.fail(node, f"{node.tag} expects items in brackets, not a mapping.")

        def plain(text: str) -> object:  # what YAML would read on its own
            kind = next((kind for kind, (pattern, _) in _SCALARS.items() if pattern.match(text)), None)
            return text if kind is None else self._convert(node, kind, text)

        try:
            return parse_brackets(node.value, plain)
        except BracketProblem as problem:
            raise self.fail(node, f"{node.tag} {node.value[:60]}: {problem}") from None


def _read_text(source: YamlSource, error: type[Exception]) -> tuple[str, str]:
    """Return the name and the text of a path or stream."""
    content: str | bytes
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if "\n" in name:
            raise error("expected the path of a file or a stream, got text. Wrap it: load_yaml(io.StringIO(text)).")
        content = _read_file(Path(name), error)
        name = Path(name).name
    else:
        name = Path(str(getattr(source, "name", None) or "<stream>")).name
        content = source.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise error(f"{name}: the file is longer than {MAX_BYTES:,} bytes, the limit for a configuration.")
    try:
        text = content if isinstance(content, str) else content.decode()
    except UnicodeDecodeError as problem:
        line = problem.object.count(b"\n", 0, problem.start) + 1
        byte = problem.object[problem.start]
        raise error(f"{name}:{line}: the file is not UTF-8 text (byte 0x{byte:02x}).") from None
    return name, text.removeprefix("\ufeff")


def _read_file(path: Path, error: type[Exception]) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        folder = path.parent
        near = nearest_name(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else None
        hint = f" Did you mean {str(folder / near)!r}?" if near else ""
        raise error(f"there is no file {str(path)!r}.{hint}") from None
    except (OSError, ValueError) as problem:
        raise error(f"the file {str(path)!r} cannot be read: {problem}") from None


_SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


_JSON_ONLY = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")


def _json_as_yaml(text: str) -> str:
    """Rewrite what JSON allows and YAML does not: tabs between tokens, characters as surrogate pairs, and others as they are."""

    def character(match: re.Match[str]) -> str:
        high, low = int(match[2], 16), int(match[3], 16)
        return match[1] + chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))

    text = _JSON_ONLY.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\t", " "))  # only text can hold them
    return _SURROGATES.sub(character, text)
