"""Print how the source is built: rooms, arrows, floors and circles of folders, long files, long argument lists, lines of code.

    python tools/structure.py [--against REVISION] [FOLDER ...]

A room is a first-level subfolder of FOLDER, or a module that lies in FOLDER itself. Imports within functions count, those for
type checkers do not. Floors are the rooms of the longest chain of imports; a circle of rooms is on one floor. Code is what is
no blank line, comment or docstring. The exit code is 1 where a measure is above its limit.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flashmoe_science"
FOLDERS = ("src/flashmoe_science", "src/flashmoe_science/ops/attention", "src/flashmoe_science/ops/moe")
# Rooms of an operation: each imports those of the lines after its own.
ORDER = (
    {"front"},
    {"proof"},
    {"forward", "backward"},
    {"products"},
    {"peers", "route"},
    {"device", "rows", "combine", "activation"},
    {"call"},
    {"problem"},
)
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
MOST_LINES, MOST_PARAMETERS = 400, 45
# Of what may be: what should not be has the limit 0.
LIMITS = {f"{FOLDERS[1]}: {name}": most for name, most in (("rooms", 8), ("floors", 6), ("arrows from room to room", 30))}

Arrows = Set[tuple[str, str]]
Measures = dict[str, tuple[int, list[str]]]  # by name: a number, and what it counts where that should be none


def measures(root: Path, folders: list[str]) -> Measures:
    """All measures of the source under ``root``."""
    found: Measures = {}
    graph = _graph(root / "src")
    for folder in folders:
        for name, value in _of_folder(graph, ".".join(Path(folder).parts[1:])).items():
            found[f"{folder}: {name}"] = value
    circles = _circles({(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)})
    found["circles of modules"] = len(circles), circles
    return found | _of_files(root / "src" / PACKAGE)


def _graph(source: Path) -> grimp.ImportGraph:
    sys.path.insert(0, str(source))
    try:
        return grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(source))


def _of_folder(graph: grimp.ImportGraph, package: str) -> Measures:
    modules = graph.find_descendants(package)
    room = {module: module.removeprefix(f"{package}.").partition(".")[0] for module in modules}
    imports = {(one, other) for one in modules for other in graph.find_modules_directly_imported_by(one) & modules}
    between = {(one, other) for one, other in imports if room[one] != room[other]}
    arrows = {(room[one], room[other]) for one, other in between}
    circles = _circles(arrows)
    found: Measures = {
        "rooms": (len(set(room.values())), []),
        "floors": (_floors(arrows), []),
        "arrows from room to room": (len(arrows), []),
        "imports from room to room, by module": (len(between), []),
        "circles of rooms": (len(circles), circles),
    }
    if "front" in room.values():
        upward = sorted(f"{a} -> {b}" for a, b in arrows if a in FLOOR and b in FLOOR and FLOOR[a] >= FLOOR[b])
        found["arrows against the order"] = len(upward), upward
    return found


def _components(arrows: Arrows) -> dict[str, int]:
    """By node, the number of the circle that it is in, or a number of its own."""
    nodes = sorted({node for arrow in arrows for node in arrow})
    place = {node: n for n, node in enumerate(nodes)}
    rows, columns = [place[one] for one, _ in arrows], [place[other] for _, other in arrows]
    matrix = coo_array(([True] * len(rows), (rows, columns)), shape=(len(nodes), len(nodes)))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    return dict(zip(nodes, map(int, labels), strict=True))


def _circles(arrows: Arrows) -> list[str]:
    members = defaultdict(list)
    for node, component in _components(arrows).items():
        members[component].append(node)
    return sorted(" <-> ".join(nodes) for nodes in members.values() if len(nodes) > 1)


def _floors(arrows: Arrows) -> int:
    component, below = _components(arrows), defaultdict(set)
    for one, other in arrows:
        if component[one] != component[other]:
            below[component[one]].add(component[other])
    height: dict[int, int] = {}
    for node in TopologicalSorter(below).static_order():
        height[node] = 1 + max((height[other] for other in below[node]), default=0)
    return max(height.values(), default=1)


def _of_files(package: Path) -> Measures:
    code: Counter[str] = Counter()
    long, wide = [], []
    for path in sorted(package.rglob("*.py")):
        place, text = path.relative_to(package), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        inside = place.parts[:-1]
        code["/".join(inside[: 2 if inside[:1] == ("ops",) else 1]) or "."] += len(code_lines(text, tree))
        if (lines := len(text.splitlines())) > MOST_LINES:
            long.append(f"{place}: {lines}")
        wide += [f"{place}: {name} {count}" for name, count in _parameters(tree) if count > MOST_PARAMETERS]
    found: Measures = {
        f"files above {MOST_LINES} lines": (len(long), long),
        f"functions with more than {MOST_PARAMETERS} parameters, but kernels' entries": (len(wide), wide),
        "lines of code": (code.total(), []),
    }
    return found | {f"lines of code: {name}": (count, []) for name, count in sorted(code.items())}


def _parameters(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("flashmoe_"):
            a = node.args
            yield node.name, len(a.posonlyargs + a.args + a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def _at(revision: str, folders: list[str]) -> Measures:
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        sys.exit(f"structure: git archive {revision}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as source:
            source.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 has none
            source.extractall(folder)
        return measures(Path(folder), [one for one in folders if Path(folder, one).is_dir()])


def main() -> None:
    parser = argparse.ArgumentParser(prog="structure", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--against", metavar="REVISION", help="print the change since this revision too")
    options = parser.parse_args()
    folders = list(options.folders)
    now = measures(ROOT, folders)
    before = _at(options.against, folders) if options.against else {}
    for name in now | before:
        count, what = now.get(name, (0, []))
        change = f"  ({count - before[name][0]:+})" if name in before else ""
        print(f"{count:6}  {name}{change}")
        print("".join(f"          {one}\n" for one in what), end="")
    above = [name for name, (count, what) in now.items() if what or count > LIMITS.get(name, count)]
    sys.exit(f"structure: above the limit: {', '.join(above)}" if above else None)


if __name__ == "__main__":
    main()
