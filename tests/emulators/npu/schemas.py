"""The schemas of the attention ops, as the op list in torch_npu (2.6.0 to 2.14.0) declares them."""

from __future__ import annotations

from tests.emulators.npu.stack import Stack

_HEAD = "Tensor query, Tensor key, Tensor value, "
_TERMS = "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
_STATISTICS = "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, "
_ROPE = "Tensor? query_rope=None, Tensor? key_rope=None, "
#: The band, as the first and third version spell it, and as the second does.
_TOCKENS = "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
_TOKENS = "int pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0, "
_LENGTHS = "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
_LENGTH_TENSORS = "Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, "
_FLAGS = "bool gen_mask_parallel=True, bool sync=False"
_INNER_BIAS = ", int pse_type=1, int[]? q_start_idx=None, int[]? kv_start_idx=None"
_SINK = ', str softmax_layout="", Tensor? sink=None'
_DROPOUT = ", Tensor? dropout_mask=None, int seed=0, int offset=0"
_SEEDS = "int seed=0, int offset=0, int numels=0, "
_PROB = "float keep_prob=1., "
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
_INCRE = (
    _HEAD + "*, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, "
    "SymInt[]? actual_seq_lengths=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? kv_padding_size=None, int num_heads=1, "
    "float scale_value=1.0, str input_layout='BSH', int num_key_value_heads=0, int block_size=0, int inner_precise=1"
)
_BLOCK_QUANT = (
    "Tensor x, *, float min_scale=0.0, str round_mode='rint', int dst_type=1, int row_block_size=1, "
    "int col_block_size=128, float dst_type_max=0.0"
)
_MX_QUANT = (
    "Tensor input, *, int axis=-1, str round_mode='rint', int dst_type=296, int block_size=32, int? scale_alg=0, "
    "float dst_type_max=0.0"
)
_SEVEN = " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
_SIX = " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_FIVE = " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_OUT = ", Tensor? workspace=None, Tensor(a!) attention_out, Tensor(b!) softmax_lse) -> (Tensor(a!), Tensor(b!))"


def npu(stack: Stack) -> dict[str, str]:
    """Name, with its overload -> schema, of the attention ops and what they need that this torch_npu has."""
    release = stack.release
    ops = _fusion(stack) | {
        "npu_fused_infer_attention_score": f"({_FIA}) -> (Tensor, Tensor)",
        "npu_fused_infer_attention_score.out": f"({_FIA}{_OUT}",
        "_npu_fused_infer_attention_score_get_max_workspace": f"({_FIA}) -> Tensor",
        "npu_prompt_flash_attention": f"({_PROMPT}) -> Tensor",
        "npu_incre_flash_attention": f"({_INCRE}) -> Tensor",
    }
    if release.fia_v2:
        ops |= {
            "npu_fused_infer_attention_score_v2": f"({_FIA_V2}) -> (Tensor, Tensor)",
            "npu_fused_infer_attention_score_v2.out": f"({_FIA_V2}{_OUT}",
            "_npu_fused_infer_attention_score_v2_get_max_workspace": f"({_FIA_V2}) -> Tensor",
        }
    if release.block_quant:
        ops["npu_dynamic_block_quant"] = f"({_BLOCK_QUANT}) -> (Tensor y, Tensor scale)"
    if release.mx_quant:
        bound = ", float max_low_bound=0.0" if release.mx_low_bound else ""
        ops["npu_dynamic_mx_quant"] = f"({_MX_QUANT}{bound}) -> (Tensor, Tensor)"
    return ops


def _fusion(stack: Stack) -> dict[str, str]:
    release = stack.release
    sink = _SINK if release.fusion_sink else ""
    tail = sink + (_DROPOUT if release.fusion_dropout_mask else "")
    head, back = _HEAD + "int head_num, str input_layout, ", _HEAD + "Tensor dy, int head_num, str input_layout, *, "
    scaled = "float scale=1., " + _PROB
    given = _TERMS + _STATISTICS
    ops = {
        "npu_fusion_attention": (
            f"({head}{_TERMS}{scaled}{_TOCKENS}int[]? prefix=None, {_LENGTHS}{_FLAGS}{tail}){_SEVEN}"
        ),
        "npu_fusion_attention_grad": (
            f"({back}{given}float scale_value=1., {_PROB}{_TOCKENS}{_SEEDS}int[]? prefix=None, {_LENGTHS}{_FLAGS}"
            f"{sink}){_FIVE}"
        ),
        "npu_fusion_attention_v2": (
            f"({head}*, {_TERMS}{_ROPE}{scaled}{_TOKENS}int[]? prefix=None, {_LENGTHS}{_FLAGS}{_INNER_BIAS}{tail})"
            f"{_SEVEN}"
        ),
        "npu_fusion_attention_grad_v2": (
            f"({back}{given}{_ROPE}float scale_value=1., {_PROB}{_TOKENS}{_SEEDS}int[]? prefix=None, {_LENGTHS}"
            f"{_FLAGS}{_INNER_BIAS}{sink}){_SIX[:-1]}{', Tensor' if sink else ''})"
        ),
    }
    if release.fusion_v3:
        lengths = f"SymInt[]? prefix=None, {_LENGTH_TENSORS}{_FLAGS}{_SINK}"
        ops["npu_fusion_attention_v3"] = f"({head}{_TERMS}{scaled}{_TOCKENS}{lengths}){_SIX}"
        ops["npu_fusion_attention_grad_v3"] = (
            f"({back}{given}float scale_value=1., {_PROB}{_TOCKENS}Tensor? seed=None, Tensor? offset=None, {lengths})"
            f"{_FIVE}"
        )
    return ops
