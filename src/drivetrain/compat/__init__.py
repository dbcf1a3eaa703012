"""Names and file formats of other libraries, and nothing else: code written for them runs, or names what to use instead.

This package may import anything; nothing imports it but the doorways at the root. Lower folders reach it through `drivetrain.core.lazy`,
whose table is in `registry`. `docs/compat.md` lists what is here and for whom.
"""
