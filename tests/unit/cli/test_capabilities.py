"""The capability matrix: derived from slots, as data, as Markdown."""

from dataclasses import replace

import pytest

from polyattn.cli.capabilities import markdown, matrix, sections
from polyattn.vendor import Backend, Capability, Features, Slot


def backend(*features, name="b"):
    return Backend(name, tuple(Slot("m:f", f) for f in features))


DENSE = Features(dtypes=frozenset({"float16"}), head_dims=range(8, 129, 8), lse=True, compile=False)
PACKED = Features(
    kinds=frozenset({"packed"}),
    dtypes=frozenset({"bfloat16"}),
    head_dims=frozenset({192}),
    max_documents=1,
    compile=False,
)
PAGED = Features(kinds=frozenset({"paged"}), page_sizes=frozenset({16, 64}), compile=False)


def facts(*features):
    return matrix("toy", [backend(*features)])["backends"]["b"]


def test_a_backend_can_do_what_any_of_its_slots_can():
    assert facts(DENSE)["capabilities"] == ["LSE"]
    assert facts(DENSE, PACKED)["capabilities"] == ["PACKED_MASK_FREE", "LSE"]


@pytest.mark.parametrize(
    ("features", "limits"),
    [
        ((DENSE,), ("float16", "8 to 128 in steps of 8", "-", "-")),
        ((DENSE, PACKED), ("bfloat16, float16", "8 to 128 in steps of 8, 192", "-", "1")),
        ((PACKED, PAGED), ("bfloat16", "any", "16, 64", "1")),
        ((PACKED, Features(kinds=frozenset({"packed", "paged"}))), ("bfloat16", "any", "any", "any")),
        ((Features(head_dims=()),), ("none", "none", "-", "-")),
        ((Features(head_dims={1, 2, 3, 4, 8}),), ("none", "1, 2, 3, 4, 8", "-", "-")),
        ((Features(head_dims={16, 32, *range(64, 513, 64)}),), ("none", "16, 32, 64 to 512 in steps of 64", "-", "-")),
    ],
)  # fmt: skip
def test_limits_are_the_union_over_slots(features, limits):
    assert tuple(facts(*features)["limits"].values()) == limits


def test_dtypes_are_those_of_slots_that_do_not_always_quantise_where_there_are_any():
    quantised = replace(DENSE, quant=frozenset({"fp8"}), exact=False)
    assert facts(PACKED, quantised)["limits"]["dtypes"] == "bfloat16"
    assert facts(quantised)["limits"]["dtypes"] == "float16"


def test_markdown_has_every_capability_and_every_backend():
    matrices = [
        matrix("toy", [backend(DENSE, name="one"), backend(PACKED, name="two")]),
        matrix("none", []),
        matrix("other", [backend(PAGED)]),
    ]
    first, second = markdown(matrices).split("\n\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    assert lines[:2] == [["toy", "one", "two"], ["---"] * 3]
    assert [line[0] for line in lines[2:-4]] == list(Capability.__members__)
    assert ["LSE", "yes", ""] in lines
    assert ["PACKED_MASK_FREE", "", "yes"] in lines
    assert lines[-1] == ["documents", "-", "1"]
    assert second.startswith("| other | b |")


def test_tables_and_markdown_agree():
    facts = matrix("toy", [backend(DENSE, PACKED)])
    (section,) = sections([facts])
    pasted = [[cell.strip() or "-" for cell in line.strip("|").split("|")] for line in markdown([facts]).splitlines()]
    assert pasted[2:] == [list(row) for row in section.rows]


def test_the_command_prints_installed_platforms_even_without_their_devices(polyattn, add_platform, no_vendors):
    add_platform()
    answer = polyattn("info", "--capabilities")
    assert answer.code == 0
    assert [line for line in answer.out.splitlines() if line.startswith(("| cpu |", "| toy |"))] == [
        "| cpu | sdpa | blocked |",
        "| toy | fast | plain |",
    ]
    as_json = polyattn("info", "--capabilities", "--json").json
    assert answer.out == markdown(as_json)


def test_the_command_says_what_it_could_not_read(polyattn, add_platform, no_vendors):
    add_platform(backends="'toy_kernels_nowhere:ALL'")
    answer = polyattn("info", "--capabilities")
    assert answer.code == 1
    assert answer.out.startswith("| cpu |")
    assert "polyattn info: no capabilities of toy: BackendUnavailable" in answer.err
