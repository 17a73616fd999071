"""fastvideo: VideoTiles over the block-sparse kernels of fastvideo_kernel, for tiles of 64, 128 and 256 tokens.

Of the package only the fine branch is called, under our own choice of tiles. Its own entry points round means and
scores to bfloat16, choose by a bisection that a wide range of scores defeats, and take no gate for a gate of one.
"""

from __future__ import annotations

from math import sqrt

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot

PACKAGE = "fastvideo-kernel"

#: Volumes of the tiles that it has kernels for.
VOLUMES = (64, 128, 256)

#: Without a limit of their own its kernels would answer for any head dim: the compiled one leaves others unwritten.
HEAD_DIMS = frozenset({64, 128})


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    video = request.structure_facts.video
    if request.structure_kind != "video_tiles" or video is None:
        return ()
    reasons = []
    if video.volume not in VOLUMES:
        reasons.append(f"tiles of {video.volume} tokens {video.tile}, and its kernels are for {_listed(VOLUMES)}")
    own = 1.0 / sqrt(request.head_dim)
    if abs(request.scale - own) > 1e-6 * own:
        reasons.append(f"scale {request.scale:g}, and its kernels scale by head_dim ** -0.5 = {own:g} alone")
    if machine.env.get("FASTVIDEO_VSA_CUTEDSL") == "1" and video.volume != 64 and request.lse:
        reasons.append("FASTVIDEO_VSA_CUTEDSL=1 sends these tiles to another package, whose LSE is not known")
    return tuple(reasons)


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def backend() -> Backend:
    """The backend `fastvideo`."""
    features = Features(
        kinds=frozenset({"video_tiles"}), lse=True, out=True, dtypes=frozenset({"bfloat16"}), head_dims=HEAD_DIMS
    )
    return Backend(
        "fastvideo",
        (Slot("polyattn_cuda.fastvideo_forward:video_tiles", features),),
        requires=(
            Requires(PACKAGE, "0.3.5", "pip install --no-deps fastvideo-kernel (its pin of torch is stricter than it)"),
            Requires("einops", hint="fastvideo-kernel imports it without declaring it: pip install einops"),
            Requires("triton", "3.0", "pip install triton"),
        ),
        check=_objections,
        tolerances={"bfloat16": 3e-2},
    )
