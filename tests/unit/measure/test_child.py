"""How a child words what went wrong in it."""

from __future__ import annotations

from flashmoe_science.measure.child import in_words


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_is_told_by_its_first_words_or_its_name() -> None:
    assert in_words(ValueError("\n  too long \n more")) == "ValueError: too long"
    assert in_words(Wordless()) == "Wordless"
    assert in_words(SystemExit(3)) == "it called sys.exit(3)"
    assert len(in_words(ValueError("x" * 10**6))) < 400


def test_triton_without_a_gpu_is_told_in_plain_words() -> None:
    said = RuntimeError("0 active drivers ([]). There should only be one.")
    assert in_words(said) == "Triton finds no GPU here that it has a driver for"
    assert in_words(RuntimeError("2 active drivers")) == "RuntimeError: 2 active drivers"
