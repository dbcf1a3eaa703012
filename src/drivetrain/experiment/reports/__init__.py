"""The report: one page about a run or several, as a file that needs neither network nor server, or live while they go on.

`curves` reads metrics, `gather` the rest of a run folder, `data` makes plain values of it, `page` puts them into HTML, `live` keeps
a page up to date. Style and script of the page are in `assets`.
"""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {".page": ["write_report", "make_page"], ".gather": ["RunData", "gather_run"], ".live": ["Board", "serve"]},
)
