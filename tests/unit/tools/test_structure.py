"""tools/structure.py on a small package: what it counts, what it leaves out, and where it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "structure.py"
OPERATION = "src/flashmoe_science/ops/attention"
ATTENTION = "flashmoe_science.ops.attention"
SOURCE = {
    "__init__.py": "",
    "ops/__init__.py": "",
    "ops/attention/__init__.py": "",
    "ops/attention/lone.py": f"# A comment.\n\nfrom {ATTENTION}.front import choose, operator\n",
    "ops/attention/front/__init__.py": "",
    "ops/attention/front/operator.py": f'"""Three\n\nlines."""\n\nfrom {ATTENTION}.device import mask\n',
    "ops/attention/front/choose.py": f"def late():\n    from {ATTENTION}.device import mask\n    return mask\n",
    "ops/attention/device/__init__.py": "",
    "ops/attention/device/mask.py": f"import typing\nif typing.TYPE_CHECKING:\n    from {ATTENTION} import lone\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCE.items():
        path = tmp_path / "src" / "flashmoe_science" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOL, tmp_path / "tools")
    return tmp_path


def printed(root: Path, *arguments: str) -> dict[str, str]:
    """What is counted, by its name; the lines that name what should not be there are appended to its count. What fails: ""."""
    command = [sys.executable, str(root / "tools" / "structure.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == bool(done.stderr), done.stderr
    found, name = {"": done.stderr.replace(f"{OPERATION}: ", "")}, ""
    for line in done.stdout.splitlines():
        if line.startswith("          "):
            found[name] += f", {line.strip()}"
            continue
        count, _, name = line.strip().partition("  ")
        name, _, change = name.removeprefix(f"{OPERATION}: ").partition("  ")
        found[name] = count + change
    return found


def test_rooms_arrows_floors_and_code_are_counted(root: Path) -> None:
    found = printed(root, OPERATION)
    names = ("rooms", "floors", "arrows from room to room", "imports from room to room, by module", "circles of rooms")
    assert [found[name] for name in ("", *names)] == ["", "3", "3", "2", "4", "0"]
    assert found["arrows against the order"] == "0"
    assert found["lines of code"] == found["lines of code: ops/attention"] == "8"


def test_what_should_not_be_there_is_named_and_the_change_is_printed(root: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    for words in (["init", "-q"], ["add", "src"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    mask = root / OPERATION / "device" / "mask.py"
    names = ", ".join(f"a{n}" for n in range(46))
    entry = f"def flashmoe_all({names}):\n    pass\n"
    mask.write_text(f"from {ATTENTION}.front import choose\n{entry}def some({names}):\n    pass\n" + "#\n" * 400)
    found = printed(root, OPERATION, "--against", "HEAD")
    assert found["arrows against the order"] == "1(+1), device -> front"
    assert found["circles of rooms"] == "1(+1), device <-> front"
    assert found["floors"] == "2(-1)"
    place = "ops/attention/device/mask.py"
    assert found["files above 400 lines"] == f"1(+1), {place}: 405"
    wide = "functions with more than 45 parameters, but kernels' entries"
    assert found[wide] == f"1(+1), {place}: some 46"
    assert found["lines of code"] == "10(+2)"
    none = ("circles of rooms", "arrows against the order", "circles of modules", "files above 400 lines", wide)
    assert found[""] == f"structure: above the limit: {', '.join(none)}\n"


def test_more_rooms_floors_and_arrows_of_attention_than_its_limits_fail(root: Path) -> None:
    for n in range(9):
        (root / OPERATION / f"room{n}.py").write_text("".join(f"from {ATTENTION} import room{below}\n" for below in range(n)))
    found = printed(root, OPERATION)
    names = ("rooms", "floors", "arrows from room to room")
    assert [found[name] for name in names] == ["12", "9", "38"]
    assert found[""] == f"structure: above the limit: {', '.join(names)}\n"
