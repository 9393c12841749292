"""Every operation has the same rooms; nothing outside them names one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.harness.listed_faults import WRONG

import flashmoe_science
from flashmoe_science.operations import OPERATIONS, Operation, parse_problem

SOURCE = Path(flashmoe_science.__file__).parent
# Operations whose suites have none for a CPU, and why.
WITHOUT_CPU = {
    "attention_backward": "the suites of all operations have names of their own, and `cpu` is the forward's",
    "attention_merge": "as the backward of attention",
    "moe_backward": "as the backward of attention",
    "moe": "it has no kernel of ours yet: a problem is named on the command line",
}
# What names an operation on purpose: (file, the text of it), each with its reason.
ALLOWED = {
    ("contract.py", "attention"): "DEFAULT: the contract of a function that names none",
    ("cli/fit.py", "attn b4 h16 q4096 d128 bf16 causal"): "the default of an option, shown in its help",
    ("cli/explain.py", 'The problem as text, such as "attn b1 h16 q4096 d128 bf16 causal".'): "an example in help",
    ("cli/tune.py", "moe-qwen3"): "a suite of the default",
    ("measure/bench.py", "flash-attn-4"): "the distribution of a peer, whose version a run's header gives",
}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_an_operation_has_all_that_the_commands_ask_for(op: Operation) -> None:
    for module in (("problem",), ("front", "kernels"), ("proof", "contract"), ("proof", "oracle")):
        assert op.module(*module)
    contract, peers = op.contract(), op.peers()
    assert contract.name == op.name
    assert op.fallback() in {peer.name for peer in peers}
    assert len(peers) >= 2
    assert {kernel.op for kernel in op.kernels()} == {op.name}
    assert {kernel.origin for kernel in op.ours()} <= {"ours"}
    assert {peer.origin for peer in peers} == {"peer"}
    assert any(peer.on_cpu for peer in peers)
    assert ("cpu" in contract.suites()) != (op.name in WITHOUT_CPU)
    for text in (*contract.default_problems(), *(text for texts in contract.suites().values() for text in texts)):
        problem = parse_problem(str(text))
        assert (problem.op, str(problem).split()[0]) == (op.name, op.word)
    planted = {parse_problem(one.problem).op for one in WRONG if one.problem is not None}
    assert op.name in planted, "the fault corpus has no fault of it"


def test_names_and_words_of_operations_and_kernels_differ() -> None:
    names = [kernel.name for op in OPERATIONS for kernel in op.kernels()]
    assert len(set(names)) == len(names)
    assert len({op.name for op in OPERATIONS}) == len({op.word for op in OPERATIONS}) == len(OPERATIONS)


@cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    """Identifiers and strings of a file with their lines; docstrings and comments are left out."""
    tree = ast.parse(path.read_bytes())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        texts = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            texts.append(node.value)
        found += [(getattr(node, "lineno", 0), text) for text in texts if isinstance(text, str)]
    return found


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_nothing_outside_its_folder_names_an_operation(op: Operation) -> None:
    # Its line, the public modules (ahead.py and its command describe a model by all operations), and the public names.
    own = {
        "operations.py",
        f"{op.name}.py",
        "ahead.py",
        "cli/warmup.py",
        "nn.py",
        "packed.py",
        "serving.py",
        "bert_padding.py",
        "checkpointing.py",
        "__init__.py",
    }
    # As a word of its own, or in the name of a type; an underscore parts words too.
    words = re.compile(rf"(?<![a-z])({op.name}|{op.word})(?![a-z])|{op.name}(?=Problem|Contract|Inputs|Kernel)", re.IGNORECASE)
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place in own or place.startswith(
            (f"{op.package.partition('.')[2].replace('.', '/')}/", "integrations/", "parallel/")
        ):
            continue
        found += [
            f"{place}:{line}: {text}" for line, text in texts_of(path) if words.search(text) and (place, text) not in ALLOWED
        ]
    assert found == []


def test_what_is_allowed_is_still_there() -> None:
    for place, text in ALLOWED:
        assert text in {one for _, one in texts_of(SOURCE / place)}, (place, text)
