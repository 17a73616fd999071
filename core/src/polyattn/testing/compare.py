"""How far an answer may lie from the float64 reference, and the words for one that lies further."""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: The largest error that a backend may declare, by dtype, on unit-normal inputs: about ten units of rounding where
#: scores are accumulated in float32 and weights and output are rounded once (an error of one unit in a weight moves the
#: output by one unit of a value of about 4). float32 leaves room for fast exponentials, not for TF32 (1e-3); float64
#: for none but its own rounding.
#: By format of a quantised call, relative: the norm of the error over the norm of the output. About twice what it costs
#: on these inputs to round q, k, v and the weights once each, and all else exactly: 0.055 in fp8 (3 bits of mantissa:
#: a rounding is off by 1/32 of its value, and four of them are independent), 0.055 in mxfp8, 0.2 in mxfp4 (1 bit), and
#: in int8 0.015 with weights and v left in half precision, 0.04 with those in fp8.
CEILINGS: Mapping[str, float] = {
    "float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2,
    "fp8": 0.12, "int8": 0.08, "mxfp8": 0.12, "mxfp4": 0.4,
}  # fmt: skip

#: Below this relative error nothing was quantised: under half of what rounding q and k alone costs.
FLOORS: Mapping[str, float] = {"fp8": 0.012, "int8": 0.005, "mxfp8": 0.012, "mxfp4": 0.05}

#: A single row of a quantised output may be off by so many times more: it is an average over fewer roundings.
_ROW_FACTOR = 4.0

#: LSE is float32 whatever the inputs are.
_LSE_FLOOR = 2e-6

#: A gradient passes through the weights twice and sums over rows.
_GRADIENT_FACTOR = 4.0


def tolerance(declared: Mapping[str, float], of: torch.dtype | str) -> float:
    """What answers of this dtype, or of this format, are judged by: as declared, never above the ceiling."""
    name = str(of).removeprefix("torch.")
    return min(declared.get(name, CEILINGS[name]), CEILINGS[name])


def tolerance_problems(declared: Mapping[str, float]) -> list[str]:
    """What is wrong with the tolerances that a backend declares."""
    return [
        f"tolerance {limit:g} declared for {name} is above the ceiling {CEILINGS[name]:g}"
        for name, limit in declared.items()
        if name in CEILINGS and not limit <= CEILINGS[name]
    ]


def output_problems(
    out: torch.Tensor, want: torch.Tensor, lse: torch.Tensor, like: torch.Tensor, limit: float
) -> list[str]:
    """What is wrong with an output; `want`, `lse` are the reference's, `like` has the dtype and device expected."""
    wrong = _form_problems("output", out, want, like.dtype, like.device)
    if wrong:
        return wrong
    out = out.cpu()
    return _value_problems("output", out, want, limit) + _empty_row_problems(out, lse)


def quantised_problems(
    out: torch.Tensor, want: torch.Tensor, lse: torch.Tensor, like: torch.Tensor, limit: float, least: float
) -> list[str]:
    """What is wrong with the output of a quantised call: its error is bounded as a whole and by row, and from below."""
    wrong = _form_problems("output", out, want, like.dtype, like.device)
    if wrong:
        return wrong
    out = out.cpu()
    return _relative_problems(out, want, limit, least) + _empty_row_problems(out, lse)


def without_poison(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with 0 where the reference is NaN: there a row sees NaN by right, and may hold anything."""
    poison = want.isnan()
    if got.shape != want.shape:
        return got, want
    return got.masked_fill(poison.to(got.device), 0.0), want.masked_fill(poison, 0.0)


def lse_problems(lse: torch.Tensor | None, want: torch.Tensor, like: torch.Tensor, limit: float) -> list[str]:
    """What is wrong with an LSE."""
    if lse is None:
        return ["LSE: none was returned"]
    wrong = _form_problems("LSE", lse, want, torch.float32, like.device)
    if wrong:
        return wrong
    lse = lse.cpu()
    if not torch.equal(lse.isneginf(), want.isneginf()):
        return ["LSE: -inf must stand on the rows that see no key, and on no other"]
    finite = want.isfinite()
    return _value_problems("LSE", lse[finite], want[finite], max(limit, _LSE_FLOOR))


def gradient_problems(name: str, gradient: torch.Tensor, want: torch.Tensor, limit: float) -> list[str]:
    """What is wrong with the gradient of one input."""
    wrong = _form_problems(f"gradient of {name}", gradient, want, gradient.dtype, gradient.device)
    return wrong or _value_problems(f"gradient of {name}", gradient.cpu(), want.cpu(), _GRADIENT_FACTOR * limit)


def _form_problems(
    what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> list[str]:
    problems = []
    if got.shape != want.shape:
        problems.append(f"{what}: shape {list(want.shape)} is right, got {list(got.shape)}")
    if got.dtype != dtype:
        problems.append(f"{what}: dtype {dtype} is right, got {got.dtype}")
    if got.device != device:
        problems.append(f"{what}: device {device} is right, got {got.device}")
    return problems


def _empty_row_problems(out: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """Empty rows are exactly 0: a caller merges or adds them unmasked."""
    empty = lse.isneginf().transpose(-1, -2)
    strays = (out[empty] != 0).any(dim=-1)
    return [f"output: {int(strays.sum())} rows that see no key are not 0"] if bool(strays.any()) else []


def _relative_problems(got: torch.Tensor, want: torch.Tensor, limit: float, least: float) -> list[str]:
    if not want.numel() or not bool(want.any()):
        return []
    strange = ~got.isfinite()
    if bool(strange.any()):
        return [f"output: {int(strange.sum())} of {got.numel()} entries are NaN or infinite"]
    error = (got.to(torch.float64) - want).flatten(-2).norm(dim=-1)
    size = want.flatten(-2).norm(dim=-1)
    relative = float(error.norm() / size.norm())
    if not relative <= limit:
        return [f"output: its error is {relative:.3g} of its norm, more than {limit:.2g}"]
    if relative < least:
        return [f"output: its error is {relative:.3g} of its norm, less than {least:.2g}: nothing was quantised"]
    rows = error / size.clamp(min=float(size[size > 0].square().mean().sqrt()))
    if float(rows.max()) <= _ROW_FACTOR * limit:
        return []
    place = [int(index) for index in torch.unravel_index(rows.argmax(), rows.shape)]
    return [f"output: the error of row {place} is {float(rows.max()):.3g} of its norm, more than {_ROW_FACTOR * limit}"]


def _value_problems(what: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> list[str]:
    if not want.numel():
        return []
    strange = ~got.isfinite()
    if bool(strange.any()):
        return [f"{what}: {int(strange.sum())} of {got.numel()} entries are NaN or infinite"]
    error = (got.to(torch.float64) - want).abs()
    allowed = limit * max(1.0, float(want.abs().max()))
    worst = int(error.argmax())
    if float(error.flatten()[worst]) <= allowed:
        return []
    values = float(got.flatten()[worst]), float(want.flatten()[worst])
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst), want.shape)]
    return [
        f"{what}: {int((error > allowed).sum())} of {got.numel()} entries are off by more than {allowed:.2g}; "
        f"the worst at {place} is {values[0]:.6g}, not {values[1]:.6g}"
    ]
