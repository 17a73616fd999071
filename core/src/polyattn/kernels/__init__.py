"""The room of portable Triton kernels: torch tensors in and out, one source for every vendor with Triton.

What is called, its Triton kernels, and what sizes their tiles:

    flash.py             flash_kernel.py       tiles.py            attention with LSE: padded batches, documents, spans
    paged_attention.py   paged_kernels.py      paged_tiles.py      attention over a block table
                         paged_parts.py                            - its rows, what they see, tiles of keys and values
                         combine_kernel.py                         - the splits of its keys put together
    pages.py             page_kernels.py       row_tiles.py        rows written into a paged cache by slots
    rows.py              row_kernels.py        row_tiles.py        rows packed, scattered back, cleared, blanked
    quantise.py          quantise_kernels.py   quantise_tiles.py   FP8 with a scale a head, queries and keys rotated
    tails.py             tails_kernel.py                           documents that NaN behind them would spoil
    video_attention.py   video_fine_kernel.py  video_tiles.py      block sparsity: video tiles, block maps
    video_fine.py        video_parts.py                            - the kept blocks, their keys gathered or packed
    video_select.py      video_select_kernels.py                   - which blocks are kept, and the coarse branch
                         video_list_kernels.py                     - lists of blocks as steps of the kernel
    video_hopper.py      video_hopper_kernel.py                    - the kept blocks on Hopper, in Gluon
                         video_hopper_parts.py                     - its rows, boxes of keys, and running softmax

    launch.py         starts a kernel on the device of its tensors, without Triton's look at what has not changed
    specialised.py    which launches run the same compiled code
    row_places.py     the inverse of an index of kept rows, on torch alone

Importing the package imports nothing; most of its files import Triton, so that only a platform's slots reach for them.

Rules of the room. Offsets of rows are 64 bits wide. Lengths and counts are arguments that Triton does not specialise
on, so that none of them compiles a kernel anew. What a mask hides is never read, or is zeroed before it is multiplied.
No block pointers; tensor descriptors only where there is another way too, and Gluon likewise: no device but sm_90
imports it. Kernels that are launched are named `*_kernel`; every one is compiled without a GPU for its architectures,
and runs under Triton's interpreter in the tests.
"""
