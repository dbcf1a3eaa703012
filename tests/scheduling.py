"""How pytest-xdist divides the tests among its workers (`--dist loadscope`).

A file stays on one worker, so that the fixtures of a module are made once. Files that call into a world (`tests/workers.py`)
stay together, so that its processes are started and warmed up once: importing what a first plan needs takes seconds in
each of them.
"""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling


class ByWorld(LoadScopeScheduling):
    """Largest scopes first, as xdist orders them: the worlds begin, and small files fill the gaps at the end."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(self.config.rootpath / nodeid.partition("::")[0])


@cache
def _scope_of(file: Path) -> str:
    text = file.read_text()
    return next((world for world in ("world4", "world2") if world in text), str(file))
