"""`current_platform`: what it offers, and that it is one object which is never stale."""

BACKENDS = """(
    Backend("fast", (Slot("m:f", Features(lse=True, dtypes=HALF)), Slot("m:g", Features(window=True, dtypes=HALF)))),
    Backend("extra", (Slot("m:f", Features(softcap=True, dtypes=HALF)),), requires=(Requires("absent"),)),
    Backend("barred", (Slot("m:f", Features(out=True, dtypes=HALF)),), check=lambda request, machine: ("no",)),
)""".replace("HALF", "{'float16'}")


def test_its_attributes(sites):
    sites.add_platform("toy", device_type="toydev", priority=33, backends=BACKENDS)
    answer = sites.ask("""
import copy, pickle
from polyattn.vendor import Capability as C
p = current_platform
result = {
    "facts": [p.name, p.device_type, p.priority, p.collective_backend, [b.name for b in p.backends]],
    "is": [p.is_toy(), p.is_cuda(), p.is_anything_else()],
    "supports": [p.supports(c) for c in (C.LSE, C.WINDOW, C.LSE | C.WINDOW, C.SOFTCAP, C.OUT)],
    "repr": repr(p),
    "machine": p.machine(1).name,
    "record": p.platform.name,
    "one": all(q is p for q in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p)))),
    "has": [hasattr(p, n) for n in ("is_x", "is_", "nonsense", "__wrapped__")],
}
try:
    p.nonsense
except AttributeError as error:
    result["error"] = str(error)
""")
    assert answer.error is None, answer.error["trace"]
    result = answer.result
    assert result["facts"] == ["toy", "toydev", 33, "toyccl", ["fast", "extra", "barred"]]
    assert result["is"] == [True, False, False]
    assert result["supports"] == [True, True, False, False, False], "one slot, of a backend that takes calls here"
    assert result["repr"] == "<current_platform: toy, device type toydev, priority 33>"
    assert result["record"] == "toy"
    assert result["one"]
    assert result["has"] == [True, False, False, False]
    assert "'nonsense'" in result["error"]
    assert "is_<platform name>()" in result["error"]


def test_rocm_is_not_cuda_though_its_device_type_is(sites):  # fault row 20, the core's part
    sites.add_platform("rocm", device_type="cuda")
    sites.add_platform("cuda", device_type="cuda", priority=90, probe="Declined('torch.version.cuda is None')")
    answer = sites.ask("""
p = current_platform
result = [p.name, p.is_rocm(), p.is_cuda(), p.device_type, platform_for("cuda").name]
""")
    assert answer.result == ["rocm", True, False, "cuda", "rocm"]


def test_a_hidden_device_leaves_cpu_and_the_reason(sites):  # fault row 23, the core's part
    sites.add_platform("rocm", device_type="cuda", probe="Declined('HIP_VISIBLE_DEVICES=\"\" hides every device')")
    answer = sites.ask("result = [current_platform.name, [r.reason for r in platforms() if r.name == 'rocm']]")
    assert answer.result == ["cpu", ['HIP_VISIBLE_DEVICES="" hides every device']]


def test_repr_says_what_is_wrong(sites):
    answer = sites.ask("result = repr(current_platform)", {"POLYATTN_PLATFORM": "nothing"})
    assert answer.error is None
    assert answer.result.startswith("<current_platform: none, POLYATTN_PLATFORM='nothing'")
