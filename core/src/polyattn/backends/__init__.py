"""Device-agnostic forwards on torch alone, one file a structure or job, and the backends that the core makes of them.

Two kernels (`fused.py`: torch's SDPA, `blocked.py`: plain matmul and softmax) run what is dense, square causal or
masked. Everything else is written once over either: bands, masks, padded rows here; documents, spans and pages in
`polyattn.compositions`. `cpu.py` and `generic.py` bind them into slots.
"""
