"""The examples that need nothing but torch run, and say what they promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Example -> what it must print: numbers that it computes show that it was right.
SAYS = {
    "first_call": "padded rows are zero: True",
    "packed_documents": "largest difference from one call a document: 0.0",
    "padded_batch": "kept rows differ by 0.0 when the padding holds other values",
    "block_maps": "28% of the pairs",
}


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out
