"""Check that the wheel in a folder holds what the package needs at run time: ``python tools/check_wheel.py dist``.

The data files are easily lost: a source tree works without them being declared, an installed package does not.
"""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "flashmoe_science"
MAX_BYTES = 2_000_000


def main(folder: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"wheel: {folder} holds {len(wheels)} wheels, not one")
    with zipfile.ZipFile(wheels[0]) as archive:
        files = {name.removeprefix("flashmoe_science/") for name in archive.namelist()}
    missing = sorted(_expected() - files)
    if missing:
        sys.exit(f"wheel: {wheels[0].name} lacks {', '.join(missing)}")
    size = wheels[0].stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"wheel: {wheels[0].name} is {size} bytes, above {MAX_BYTES}")
    print(f"wheel: {wheels[0].name}, {len(files)} files, {size / 1024:.0f} KiB")


def _expected() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    for pattern in settings["package-data"]["flashmoe_science"]:
        found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.glob(pattern)}
        if not found:
            sys.exit(f"wheel: package-data names {pattern!r}, which matches no file in {PACKAGE.relative_to(ROOT)}")
        expected |= found
    return expected


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/check_wheel.py FOLDER")
    main(Path(sys.argv[1]))
