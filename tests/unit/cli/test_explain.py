"""`polyattn explain`: from shapes to a route and reasons, here and on a described machine."""

import io
import json

import pytest
import torch

import polyattn as pa
from polyattn.cli.asked import Asked, request_of
from polyattn.cli.failure import UsageError
from tests.unit.cli.conftest import add_kernels

Q = ("--q", "2,100,8,64")


def test_it_is_pa_explain_from_shapes(polyattn):
    answer = polyattn("explain", *Q, "--dtype", "float32", "--causal", "--lse", "--json")
    q = torch.zeros(2, 100, 8, 64)
    expected = pa.explain(q, q, q, causal=True, return_lse=True)
    assert answer.code == 0
    assert {name: answer.json[name] for name in expected.as_dict()} == json.loads(json.dumps(expected.as_dict()))


def test_the_table_says_what_the_json_says(polyattn):
    options = ("explain", *Q, "--softcap", "30", "--structure", "key_padding", "--backend", "auto")
    facts, text = polyattn(*options, "--json").json, polyattn(*options).out
    for row in facts["backends"]:
        line = next(line for line in text.splitlines() if line.split()[:1] == [row["backend"]])
        assert line.split() == [row["backend"], *row["verdict"].split(), *row["reasons"].split()]
    for said in (facts["summary"], facts["chosen"], *facts["assumed"], *facts["notes"], facts["machine"]["arch"]):
        assert said in text


def test_nothing_can_run(polyattn):
    answer = polyattn("explain", *Q, "--quant", "mxfp4")
    assert answer.code == 1
    assert "none: nothing can run it" in answer.out
    assert "quant 'mxfp4' not in" in answer.out
    refused = polyattn("explain", *Q, "--quant", "mxfp4", "--json")
    assert (refused.code, refused.json["chosen"]) == (1, None)
    assert "no backend of" in refused.json["refusal"]


def test_a_combination_that_means_nothing_can_run_nowhere(polyattn):
    answer = polyattn("explain", *Q, "--structure", "spans", "--window", "3,0")
    assert answer.code == 1
    assert answer.err == (
        "polyattn explain: spans do not combine with a window: which keys a span's query sees would be ambiguous\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--q", "1,8,x,64"), "sizes like 1,4608,24,128 are needed, got '1,8,x,64'"),
        (("--q", "1,-8,2,64"), "got '1,-8,2,64'"),
        (("--q", "8,2,64"), "--q: dense attention takes B,S,H,D, got 8, 2, 64"),
        (("--q", "1,8,2,64", "--k", "8,2,64"), "--k: dense attention with this q takes B,S,H,D, got 8, 2, 64"),
        (("--q", "1,8,3,64", "--k", "1,8,2,64"), "multiple of KV heads, got 3 and 2"),
        (("--q", "1,8,2,64", "--k", "1,8,2,32"), "one head_dim is needed"),
        (("--q", "1,8,2,64", "--v", "1,9,2,64"), "k, v: the same rows and heads are needed"),
        (("--q", "1,8,2,0"), "head_dim must be at least 1"),
        (("--q", "2,8,2,64", "--structure", "packed"), "packed"),
        (
            (*Q, "--dtype", "int8"),
            "--dtype: a floating dtype of torch is needed, as bfloat16, float16, float32; got 'int8'",
        ),
        ((*Q, "--dtype", "nn"), "got 'nn'"),
        ((*Q, "--softcap", "-1"), "softcap: a finite number >= 0 is needed"),
        ((*Q, "--softcap", "x"), "invalid float value: 'x'"),
        ((*Q, "--window", "1,2,3"), "L,R is needed, got '1,2,3'"),
        ((*Q, "--window", "a"), "each a number of keys or 'none', is needed, got 'a'"),
        ((*Q, "--documents", "3"), "--documents: only packed attention, or paged with q of T,H,D, has them, not dense"),
        (("--q", "8,2,64", "--structure", "packed", "--documents", "0"), "a number of at least 1 is needed, got '0'"),
        ((*Q, "--backend", "abacus"), "'abacus'"),
        ((*Q, "--device", "cuda:x"), "--device: TYPE or TYPE:INDEX is needed"),
        ((*Q, "--device", "abacus"), "torch knows no device type 'abacus'"),
        ((*Q, "--structure", "video_tiles"), "--grid: video tiles need the video's frames, height and width"),
        ((*Q, "--structure", "video_tiles", "--grid", "9,9,9"), "--grid: 9, 9, 9 has 729 tokens, q only"),
        ((*Q, "--structure", "video_tiles", "--grid", "1,1,2", "--tile", "4"), "tile"),
        ((*Q, "--gate"), "--grid, --gate: only video_tiles has them, not dense"),
        ((*Q, "--structure", "tree"), "invalid choice: 'tree'"),
        (("--q", "99999999999,99999999999,99999999999,64"), ""),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(polyattn, options, said):
    answer = polyattn("explain", *options)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("polyattn explain: ")
    assert said in answer.err


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"structure": "dense"}, "dense", {"documents": None}),
        ({"structure": "key_padding"}, "key_padding", {"documents": 2, "queries": "same", "prefix": True}),
        ({"structure": "key_padding", "k": (2, 77, 8, 64)}, "key_padding", {"queries": "all"}),
        ({"structure": "key_padding", "q": (1, 100, 8, 64)}, "prefix_kv", {"common_prefix": 50}),
        ({"structure": "mask"}, "mask", {"mask_shape": (2, 1, 100, 100), "mask_dtype": "bool", "host": False}),
        ({"structure": "bias"}, "bias", {"mask_dtype": "bfloat16"}),
        ({"structure": "packed", "q": (100, 8, 64)}, "packed", {"documents": 2, "same_lengths": True}),
        ({"structure": "packed", "q": (1, 100, 8, 64), "documents": 7}, "packed", {"documents": 7}),
        ({"structure": "packed", "q": (10, 8, 64), "k": (30, 8, 64)}, "packed", {"same_lengths": False}),
        ({"structure": "spans"}, "spans", {"documents": 2, "spans": True}),
        ({"structure": "paged"}, "paged", {"documents": 2, "page_size": 16, "query_layout": "batched"}),
        ({"structure": "paged", "k": (9, 32, 8, 64), "q": (2, 1, 8, 64)}, "paged", {"page_size": 32}),
        (
            {"structure": "paged", "q": (10, 8, 64), "documents": 3},
            "paged",
            {"documents": 3, "query_layout": "packed"},
        ),
        ({"structure": "video_tiles", "grid": (4, 5, 5)}, "video_tiles", {"host": True}),
        ({"structure": "block_map"}, "block_map", {"blocks": (64, 64)}),
    ],
)
def test_each_structure_becomes_a_plausible_request(options, kind, facts):
    request, assumed = request_of(Asked(**{"q": (2, 100, 8, 64), **options}), "toy:1")
    assert request.structure_kind == kind
    assert {name: getattr(request.structure_facts, name) for name in facts} == facts
    assert request.device == "toy:1"
    assert bool(assumed) == (kind != "dense"), "what was made up is said"


def test_rows_before_the_video_are_its_prefix_and_a_gate_is_a_fact():
    asked = Asked(q=(2, 107, 8, 64), structure="video_tiles", grid=(4, 5, 5), tile=(2, 5, 5), sparsity=0.5, gate=True)
    request, (assumed,) = request_of(asked, "toy:1")
    video = request.structure_facts.video
    assert (video.kept, video.gate) == (1, True)
    assert assumed == "1 of 2 tiles of 2, 5, 5 are kept, 7 rows before the video are a prefix"


def test_every_option_reaches_the_request():
    asked = Asked(
        q=(1, 8, 4, 64), k=(1, 9, 2, 64), v=(1, 9, 2, 32), dtype="bf16", causal=True, window=3, softcap=2.0,
        lse=True, grad=True, deterministic=True, quant="fp8",
    )  # fmt: skip
    request, _ = request_of(asked, "cpu")
    assert (request.k.shape, request.v.shape, request.dtype) == ((1, 9, 2, 64), (1, 9, 2, 32), "bfloat16")
    assert (request.causal, request.window, request.softcap, request.quant) == (True, (3, 0), 2.0, "fp8")
    assert (request.lse, request.grad, request.deterministic, request.scale) == (True, True, True, 64**-0.5)
    plain, _ = request_of(Asked(q=(1, 8, 4, 64)), "cpu")
    switches = ("causal", "window", "softcap", "quant", "lse", "grad", "deterministic")
    assert [name for name in switches if getattr(plain, name)] == []


def test_sizes_that_exist_nowhere_are_a_usage_error():
    with pytest.raises(UsageError, match="multiple of KV heads"):
        request_of(Asked(q=(1, 8, 4, 64), k=(1, 8, 0, 64)), "cpu")


MACHINE = {"platform": "toy", "device_type": "toy", "index": 1, "arch": "toy2", "versions": {"toy-kernels": "2.1"}}


@pytest.fixture
def machine_file(tmp_path):
    def write(text="", **changes):
        path = tmp_path / "machine.json"
        path.write_text(text or json.dumps({**MACHINE, **changes}))
        return str(path)

    return write


def test_a_described_machine_of_a_platform_whose_devices_are_elsewhere(polyattn, add_platform, machine_file):
    add_platform()
    facts = polyattn("explain", *Q, "--machine", machine_file(), "--json").json
    assert facts["chosen"] == "toy:fast"
    assert facts["device"] == "toy:1"
    old = polyattn("explain", *Q, "--machine", machine_file(versions={"toy-kernels": "1.9"}), "--json").json
    assert old["chosen"] == "toy:plain"
    assert {row["backend"]: row["reasons"] for row in old["backends"]}["toy:fast"] == (
        "package toy-kernels 1.9 is older than 2.0: pip install toy-kernels"
    )


def test_packages_that_a_third_party_backend_requires_are_seen(polyattn, tmp_path, monkeypatch):
    ask = ("explain", *Q, "--device", "cpu", "--backend", "fast,auto", "--json")
    add_kernels(tmp_path, monkeypatch, version="1.9")
    old = polyattn(*ask).json
    assert old["chosen"] != "cpu:fast"
    assert {row["backend"]: row["reasons"] for row in old["backends"]}["cpu:fast"] == (
        "package fast-kernels 1.9 is older than 2.0: pip install fast-kernels"
    )
    add_kernels(tmp_path, monkeypatch, version="2.1")
    assert polyattn(*ask).json["chosen"] == "cpu:fast"


def test_what_the_choice_leaves_out_is_not_chosen(polyattn):
    rows = polyattn("explain", *Q, "--dtype", "float32", "--backend=-sdpa", "--json").json["backends"]
    verdicts = {row["backend"]: row["verdict"] for row in rows}
    assert (verdicts["cpu:blocked"], verdicts["cpu:sdpa"]) == ("chosen", "not chosen")


def test_a_choice_binds_on_a_described_machine(polyattn, add_platform, machine_file):
    add_platform()
    path = machine_file()
    assert polyattn("explain", *Q, "--machine", path, "--backend", "plain", "--json").json["chosen"] == "toy:plain"
    wrong = polyattn("explain", *Q, "--machine", path, "--backend", "sdpa")
    assert wrong.code == 2
    assert "'sdpa'" in wrong.err
    assert "toy has fast, plain" in wrong.err
    nothing = polyattn("explain", *Q, "--machine", path, "--backend", "plain", "--lse")
    assert nothing.code == 1
    assert "LSE is not supported" in nothing.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is needed, got list"),
        ('{"platform": "toy"}', "missing fields ['device_type']"),
        ('{"platform": "toy", "device_type": "toy", "cores": 4}', "unknown fields ['cores']"),
        ('{"platform": "toy", "device_type": "toy", "versions": ["a"]}', "versions must be an object, got ['a']"),
        ('{"platform": "toy", "device_type": "toy", "versions": {"a": 2}}', "versions must be texts, got 2 for a"),
        ('{"platform": "toy", "device_type": "toy", "index": "0"}', "index must be a number, got '0'"),
        ('{"platform": "toy", "device_type": "cpu"}', "platform 'toy' has 'toy' devices, not 'cpu'"),
        ('{"platform": "nobody", "device_type": "toy"}', "platform 'nobody' is not installed"),
        ('{"platform": "musa", "device_type": "musa"}', 'is not installed; pip install "polyattn-musa"'),
    ],
)
def test_a_bad_machine_file_is_one_line_and_code_2(polyattn, add_platform, no_vendors, machine_file, text, said):
    add_platform()
    answer = polyattn("explain", *Q, "--machine", machine_file(text))
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert said in answer.err


def test_an_absent_or_binary_machine_file(polyattn, tmp_path):
    assert "No such file" in polyattn("explain", *Q, "--machine", str(tmp_path / "nowhere.json")).err
    assert "Is a directory" in polyattn("explain", *Q, "--machine", str(tmp_path)).err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    answer = polyattn("explain", *Q, "--machine", str(tmp_path / "binary"))
    assert (answer.code, "not JSON" in answer.err) == (2, True)


def test_a_platform_that_is_broken_or_of_another_level_cannot_be_asked(polyattn, add_platform, machine_file):
    add_platform(probe="1 / 0")
    answer = polyattn("explain", *Q, "--machine", machine_file())
    assert answer.code == 2
    assert "ZeroDivisionError" in answer.err


def test_a_device_that_is_elsewhere_is_asked_about_by_a_description(polyattn, add_platform):
    add_platform()
    answer = polyattn("explain", *Q, "--device", "toy")
    assert answer.code == 2
    assert "no /dev/toy" in answer.err
    assert "--machine" in answer.err


def test_the_device_and_the_machine_must_agree(polyattn, add_platform, machine_file):
    add_platform()
    path = machine_file()
    assert polyattn("explain", *Q, "--machine", path, "--device", "toy").code == 0
    assert polyattn("explain", *Q, "--machine", path, "--device", "toy:1").code == 0
    answer = polyattn("explain", *Q, "--machine", path, "--device", "cpu")
    assert answer.code == 2
    assert "is toy:1" in answer.err


def test_a_device_type_that_nobody_owns_is_served_by_torch_and_says_so(polyattn):
    facts = polyattn("explain", *Q, "--device", "mps", "--json").json
    assert facts["chosen"].startswith("mps:")
    assert facts["assumed"] == ["no installed platform owns 'mps' tensors: torch's own SDPA serves them"]


def test_this_machine_can_be_described_and_read_back(polyattn, tmp_path, monkeypatch):
    described = polyattn("info", "--machine")
    assert described.code == 0
    path = tmp_path / "here.json"
    path.write_text(described.out)
    here = polyattn("explain", *Q, "--device", described.json["device_type"])
    assert polyattn("explain", *Q, "--machine", str(path)).out == here.out
    monkeypatch.setattr("sys.stdin", io.StringIO(described.out))
    assert polyattn("explain", *Q, "--machine", "-").out == here.out
