"""Device-agnostic forwards, one file a structure or job, and the backends that the core makes of them.

Two kernels (`fused.py`: torch's SDPA, `blocked.py`: plain matmul and softmax) run what is dense, square causal or
masked. Everything else is written once over either: bands, masks, padded rows here; documents, spans and pages in
`polyattn.compositions`. `cpu.py` and `generic.py` bind them into slots, on torch alone. `triton*.py` bind the kernels
of `polyattn.kernels`; `varlen*.py` makes slots of any vendor's kernel for packed documents.

Tensors are cut with narrow and unsqueeze, never with [...]: it is faster, and it runs on fake tensors of a device that
this build of torch lacks, which is how the absence of host reads is proved.
"""
