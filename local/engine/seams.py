"""The private names of ministack that the repairs replace are known to exist before any of them is applied."""

import importlib

PINNED = "1.5.33"


class SeamMissing(RuntimeError):
    """A private name of ministack is gone: another version is installed than the one the repairs were written for."""


def check(needs: dict[str, tuple[str, ...]]) -> None:
    """Every name of `needs` ({module: names}) exists. Raises SeamMissing with the name and the pinned version."""
    for module_name, names in needs.items():
        module = importlib.import_module(module_name)
        for name in names:
            if not hasattr(module, name):
                raise SeamMissing(
                    f"{module_name}.{name} does not exist in the installed ministack; "
                    f"local/engine was written for ministack=={PINNED}: install that version"
                )
