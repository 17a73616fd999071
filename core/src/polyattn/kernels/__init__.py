"""The room of portable Triton kernels: torch tensors in and out, one source for every vendor with Triton.

    rows.py        packing kept rows, scattering them back, clearing what lies behind a row's end
    quantise.py    FP8 with a scale per head, queries and keys rotated
    flash.py       attention with LSE: padded batches, packed documents, spans
    tails.py       documents that NaN or infinity behind them would spoil
    pages.py, paged_attention.py    a paged cache: writing by slots, attention over a block table

Those are called; the Triton kernels are in files of their own beside them (`*_kernel.py`, `*_kernels.py`).

Importing the package imports nothing; its files import Triton, so that only a platform's slots reach for them. How
blocks are sized stands beside the kernels, never among them (`*_tiles.py`), and `launch.py` starts each kernel on its
tensors' device.

Rules of the room. Offsets of rows are 64 bits wide. Lengths and counts are arguments that Triton does not specialise
on, so that none of them compiles a kernel anew. What a mask hides is never read, or is zeroed before it is multiplied.
No block pointers; tensor descriptors only where there is another way too. Kernels that are launched are named
`*_kernel`; every one is compiled without a GPU for each architecture, and runs under Triton's interpreter in the tests.
"""
