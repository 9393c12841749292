"""The judge condemns no honest kernel: 100 whole runs, of which ``make honest`` makes 10,000."""

from __future__ import annotations

import pytest
from tests.harness.honest import main


@pytest.mark.slow
def test_no_honest_kernel_is_condemned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(100) == 0, capsys.readouterr().out
