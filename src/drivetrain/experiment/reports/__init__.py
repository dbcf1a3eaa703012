"""The report: one HTML file with everything a run or several runs left behind, readable without network or server.

`gather` reads run folders into plain values, `chart` and `pictures` draw, `html` has the pieces, `page` puts them together.
"""

from drivetrain.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        ".page": ["write_report", "make_page"],
        ".gather": ["RunData", "gather_run"],
        ".chart": ["Curve", "draw_chart"],
    },
)
