"""How a child begins (``channel.Child``): ``python -P -m flashmoe_science.measure.start MODULE ...`` runs a module's ``main``.

Garbage collection is off during the import, of whose time it would take a sixth. Later collections skip what was imported,
which stays: going through it would take a tenth of a second each time.
"""

from __future__ import annotations

import gc
import importlib
import sys

MODULE = "flashmoe_science.measure.start"


def main() -> None:
    gc.disable()
    module = importlib.import_module(sys.argv.pop(1))
    gc.freeze()
    gc.enable()
    module.main()


if __name__ == "__main__":
    main()
