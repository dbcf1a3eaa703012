"""Types that many folders share: names for values whose form only a user's own code knows."""

from typing import Any

StateDict = dict[str, Any]
"""A state as `state_dict()` returns it: plain values, containers and tensors by name."""
JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None
"""What a JSON text holds."""
Settings = dict[str, Any]
"""Keyword arguments, parameters or configuration by name; whoever receives them checks each value."""
Batch = object
"""What a loader yields and a model takes: a tensor, or any container of them. It depends on the user's code."""
Item = Any
"""One object of a session: a module, an optimizer, a number, a container, or an object of the user's."""
Saved = Any
"""The saved form of an item, read from a file and not yet validated."""
