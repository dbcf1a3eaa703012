"""Secrets: passwords, tokens and keys that a run needs and that no file, log or screen should show.

A parameter of type `Secret[str]` carries its value hidden; one whose name says that it is a secret (`api_key`, `password`,
`hf_token`) is treated the same when its value is text. Names of the field that only look so (`max_tokens`, `pad_token`,
`key_dim`, `sort_key`) are not. Numbers, paths and choices are never secrets by name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MASK = "**********"
"""What replaces a secret wherever values are written; pydantic writes its `SecretStr` the same way."""
SHORTEST_HIDDEN = 4
"""Characters; shorter secrets are not looked for in running text, where they would match parts of words."""

_ALWAYS = frozenset(
    "password passwords passwd passphrase passcode secret secrets credential credentials apikey apikeys accesskey secretkey "
    "privatekey authtoken accesstoken".split()
)
_OWNERS = frozenset(
    "api access auth authentication authorization bearer private secret ssh gpg pgp encryption decryption signing service "
    "account session refresh oauth jwt personal login client deploy license".split()
)
"""Words that make a secret of several `keys` or `tokens`."""
_TOKENS_OF_TEXT = frozenset(
    "pad padding unk unknown bos eos sep separator cls mask special start end stop begin bot eot first last next prev previous new "
    "image audio video prompt target source text word subword class register blank system tool im newline space sos prefix suffix "
    "per num max min n extra additional delimiter domain language lang task query key value".split()
)
"""Words before `token` that mean a piece of text."""
_KEYS_OF_DATA = frozenset(
    "sort target input output image images label labels text batch data dict column primary foreign group cache metric loss query "
    "feature features state name partition order index lookup join item first last config json yaml rng prng random seed mask model "
    "field split monitor source value attention hash num max min n tensor array d head dim file map table row record bucket object".split()
)
"""Words before `key` that mean an entry of a table, or a tensor of attention."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Secret(Generic[T]):
    """A value that is not shown: `str`, `repr` and formatting print a mask, `reveal()` returns it.

    >>> key = Secret("abc123")
    >>> print(key, f"{key!r}", key.reveal())
    ********** Secret('**********') abc123
    """

    __slots__ = ("_value",)

    def __init__(self, value: T):
        self._value = value

    def reveal(self) -> T:
        """Return the value."""
        return self._value

    get_secret_value = reveal

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and bool(other._value == self._value)

    def __hash__(self) -> int:
        return hash((Secret, self._value))


def is_secret_value(value: object) -> bool:
    """Return whether a value hides itself: ours, or pydantic's `SecretStr` and its like."""
    return callable(getattr(type(value), "get_secret_value", None))


def looks_secret(name: str) -> bool:
    """Return whether a name indicates a secret value.

    >>> [looks_secret(name) for name in ("api_key", "hf_token", "opt.password", "max_tokens", "pad_token", "key_dim")]
    [True, True, True, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _ALWAYS:
        return True
    if last == "token":
        return before not in _TOKENS_OF_TEXT
    if last == "key":
        return before not in _KEYS_OF_DATA
    return last in ("keys", "tokens") and before in _OWNERS


def masked(value: Any, *, is_secret: bool = False) -> Any:
    """Return a value to be written: a secret one is the mask, and so is text under a secret's name within a mapping.

    >>> masked({"lr": 0.1, "api_key": "abc"})
    {'lr': 0.1, 'api_key': '**********'}
    """
    if value is not None and (is_secret or is_secret_value(value)):
        return [MASK] * len(value) if isinstance(value, list | tuple | set | frozenset) else MASK
    if isinstance(value, Mapping):
        return {
            key: masked(item, is_secret=isinstance(key, str) and looks_secret(key) and _is_text(item))
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(masked(item) for item in value)
    return value


def is_masked(value: object) -> bool:
    """Return whether a value that was read back is, or holds, a mask."""
    if isinstance(value, Mapping):
        return any(is_masked(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(is_masked(item) for item in value)
    return isinstance(value, str) and value == MASK


def texts_of(value: Any, *, is_secret: bool = False) -> set[str]:
    """Return the texts that `masked` would hide."""
    if is_secret_value(value):
        return texts_of(value.get_secret_value(), is_secret=True)
    if isinstance(value, Mapping):
        every = (texts_of(v, is_secret=is_secret or (looks_secret(str(k)) and _is_text(v))) for k, v in value.items())
        return set().union(*every)
    if isinstance(value, list | tuple | set | frozenset):
        return set().union(*(texts_of(item, is_secret=is_secret) for item in value))
    return {str(value)} if is_secret and value not in (None, "") else set()


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return a text in which every secret is replaced by the mask.

    >>> hide("401: bad token abc123", {"abc123"})
    '401: bad token **********'
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST_HIDDEN:
            text = text.replace(secret, MASK)
    return text


def mask_command(words: Iterable[str], names: Iterable[str], secrets: Iterable[str]) -> list[str]:
    """Return a command line without secrets: `--api-key X`, `--api-key=X` and `api_key=X`, and any word that contains one.

    `names` are the secret parameters; an option whose name looks like a secret counts as one, because the command may be that of
    a program with options of its own.

    >>> mask_command(["train.py", "--api-key", "abc", "--lr=1", "--set", "password=x"], ["api_key"], [])
    ['train.py', '--api-key', '**********', '--lr=1', '--set', 'password=**********']
    """
    known, secrets, found, after_secret = set(names), list(secrets), list[str](), False
    for word in map(str, words):
        option, has_value, _ = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        is_option = (word.startswith("-") and word[1:2].isalpha()) or word.startswith("--")
        is_secret = name in known or (name.replace(".", "_").isidentifier() and looks_secret(name))
        if is_secret and has_value:
            word, after_secret = f"{option}={MASK}", False
        elif is_option:
            after_secret = is_secret
        elif after_secret:
            word = MASK
        found.append(hide(word, secrets))
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value))
