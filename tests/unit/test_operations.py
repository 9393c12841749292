"""Every operation has the same rooms."""

from __future__ import annotations

import importlib

import pytest
from tests.harness.listed_faults import WRONG

from flashmoe_science.operations import OPERATIONS, Operation, parse_problem

# Operations whose suites have none for a CPU, and why.
WITHOUT_CPU = {"moe": "it has no kernel of ours yet: a problem is named on the command line"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_an_operation_has_all_that_the_commands_ask_for(op: Operation) -> None:
    for module in ("problem", "kernels", "contract", "oracle"):
        importlib.import_module(f"{op.package}.{module}")
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
