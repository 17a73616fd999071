"""The schemas of the attention ops, as the op list in torch_npu (2.6.0 to 2.14.0) declares them."""

from __future__ import annotations

from tests.emulators.npu.stack import Stack

_HEAD = "Tensor query, Tensor key, Tensor value, "
_FUSION = (
    _HEAD + "int head_num, str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "float scale=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    "int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False"
)
_FUSION_TAIL = ', str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0'
_GRAD = (
    _HEAD + "Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, "
    "Tensor? attention_in=None, float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    "bool sync=False"
)
_GRAD_TAIL = ', str softmax_layout="", Tensor? sink=None'
_FIA = (
    _HEAD + "*, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
    "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
    "float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"
)
_FIA_V2 = (
    _HEAD + "*, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, "
    "Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, "
    "Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, "
    "Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, "
    "Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', int sparse_mode=0, "
    "int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, "
    "bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, "
    "int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, int? out_dtype=None"
)
_PROMPT = (
    _HEAD + "*, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, "
    "int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None, Tensor? deq_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, int num_heads=1, float scale_value=1.0, "
    "int pre_tokens=2147483647, int next_tokens=0, str input_layout='BSH', int num_key_value_heads=0, "
    "int[]? actual_seq_lengths_kv=None, int sparse_mode=0"
)
_SEVEN = " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"


def npu(stack: Stack) -> dict[str, str]:
    """Name -> schema of the attention ops that this torch_npu has."""
    release = stack.release
    fusion_tail, grad_tail = (_FUSION_TAIL, _GRAD_TAIL) if release.fusion_tail else ("", "")
    ops = {
        "npu_fusion_attention": f"({_FUSION}{fusion_tail}){_SEVEN}",
        "npu_fusion_attention_grad": f"({_GRAD}{grad_tail}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "npu_fused_infer_attention_score": f"({_FIA}) -> (Tensor, Tensor)",
        "npu_prompt_flash_attention": f"({_PROMPT}) -> Tensor",
    }
    if release.fia_v2:
        ops["npu_fused_infer_attention_score_v2"] = f"({_FIA_V2}) -> (Tensor, Tensor)"
    return ops
