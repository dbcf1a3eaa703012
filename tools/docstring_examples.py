"""Show doctests in the API reference as code: an extension of griffe, which reads the docstrings."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*?(?=\n *\n|\Z)", re.DOTALL | re.MULTILINE)


class FencedDoctests(Extension):
    """Puts each doctest into a fence; Markdown would take its `>>>` for quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(self._fence, obj.docstring.value)

    @staticmethod
    def _fence(found: re.Match[str]) -> str:
        indent = found["indent"]
        return f"{indent}```pycon\n{found[0]}\n{indent}```"
