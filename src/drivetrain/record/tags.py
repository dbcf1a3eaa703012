"""Tags as file names: readable, different for different tags, and never outside their folder.

A slash becomes a dot, and every character that is not a letter, a digit, `_` or `-` is written as the percent codes of its bytes.
A dot of the tag is such a character too, so `a/b` and `a.b` stay apart and `..` cannot climb.
"""

import hashlib
import re

from drivetrain.core.errors import ConfigTypeError

_LONGEST = 200  # file systems allow 255 bytes, and a suffix may follow
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(?=\.|$)")  # device names, on one system at least


def check_tag(tag: object) -> str:
    """Return a tag that every sink can write, or raise an error that names the problem."""
    if not isinstance(tag, str) or not tag:
        raise ConfigTypeError(f"the tag is {tag!r}; expected a name such as 'train/loss'.")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise ConfigTypeError(
            f"the tag {tag!r} is not valid text ({error.reason}); it cannot be written as UTF-8."
        ) from None
    return tag


def safe_name(tag: str) -> str:
    """Return a tag as one file name.

    >>> safe_name("train/loss"), safe_name("../x"), safe_name('a,"b"')
    ('train.loss', '%2E%2E.x', 'a%2C%22b%22')
    """
    parts = [
        "".join(char if char.isalnum() or char in "_-" else _escaped(char) for char in part) for part in tag.split("/")
    ]
    name = ".".join(parts)
    if name.startswith("."):  # hidden, or the folder above
        name = "%2F" + name[1:]
    if name.endswith("."):
        name = name[:-1] + "%2F"
    if _RESERVED.match(name):
        name = _escaped(name[0]) + name[1:]
    if len(name.encode()) > _LONGEST:
        digest = hashlib.sha256(tag.encode()).hexdigest()[:16]
        name = name.encode()[: _LONGEST - 17].decode(errors="ignore") + "-" + digest
    return name


def picture_path(kind: str, tag: str, step: int, repeat: int = 0) -> str:
    """Return where a picture is kept within the output folder; `repeat` numbers those of one tag and step.

    >>> picture_path("image", "eval/sample", 12)
    'images/eval.sample/12.png'
    """
    return f"{kind}s/{safe_name(tag)}/{step}{f'-{repeat}' if repeat else ''}.png"


def _escaped(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())
