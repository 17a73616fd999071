"""Image models of diffusers, small and random: joint, masked and cross attention, GQA, packed segments, a UNet."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.diffusers_cases import BATCH, TEXT, Case, keep, steps, text


def _flux_like(channels: int = 4, width: int = 32) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return {
        "hidden_states": torch.randn(BATCH, 16, channels), "encoder_hidden_states": text(width),
        "img_ids": places, "txt_ids": torch.zeros(TEXT, 3), "timestep": steps(),
    }  # fmt: skip


def _joint(kept: torch.Tensor) -> torch.Tensor:
    """The mask of text tokens with the image's behind them."""
    return torch.cat([kept, torch.ones(BATCH, 16, dtype=torch.bool)], dim=1)


_FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32,
}  # fmt: skip

IMAGE_MODELS = (
    Case(
        "FluxTransformer2DModel",
        _FLUX | {"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        lambda: _flux_like() | {"pooled_projections": torch.randn(BATCH, 32)},
        lambda: {"joint_attention_kwargs": {"attention_mask": _joint(keep(5, 8))[:, None, None]}},
    ),
    Case(
        "Flux2Transformer2DModel",
        _FLUX | {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        lambda: _flux_like() | {
            "img_ids": torch.randint(4, (BATCH, 16, 4)), "txt_ids": torch.randint(4, (BATCH, TEXT, 4)),
            "guidance": steps(),
        },
    ),
    Case(
        "ChromaTransformer2DModel",
        _FLUX | {
            "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _flux_like,
        lambda: {"attention_mask": _joint(keep(5, 8))},
    ),
    Case(
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
            "pooled_projection_dim": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 8, 8), "encoder_hidden_states": text(32),
            "pooled_projections": torch.randn(BATCH, 16), "timestep": torch.tensor([3, 700]),
        },
    ),
    Case(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 16, 16), "encoder_hidden_states": text(16), "timestep": steps(),
            "img_shapes": [(1, 4, 4)] * BATCH,
        },
        lambda: {"encoder_hidden_states_mask": keep(5, 8)},
    ),
    Case(
        "ZImageTransformer2DModel",
        {
            "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 32, "n_layers": 1,
            "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "qk_norm": True, "cap_feat_dim": 16,
            "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
        },
        lambda: {"x": _images(16, 16), "cap_feats": [torch.randn(8, 16), torch.randn(8, 16)], "t": steps()},
        lambda: {"x": _images(16, 8), "cap_feats": [torch.randn(40, 16), torch.randn(8, 16)]},
        note="samples of several sizes",
    ),
    Case(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
            "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "cap_feat_dim": 16,
            "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64),
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 8, 8), "encoder_hidden_states": text(16), "timestep": steps(),
            "encoder_attention_mask": keep(8, 8),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "SanaTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 4,
            "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
            "cross_attention_dim": 8, "caption_channels": 8, "sample_size": 8,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 8, 8), "encoder_hidden_states": text(8),
            "timestep": torch.tensor([3, 700]),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "Krea2Transformer2DModel",
        {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 32, "timestep_embed_dim": 8, "text_hidden_dim": 16,
            "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 1,
            "text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 4, 16), "encoder_hidden_states": torch.randn(BATCH, TEXT, 3, 16),
            "timestep": steps(), "position_ids": torch.randint(9, (TEXT + 4, 3)),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "Ideogram4Transformer2DModel",
        {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
            "intermediate_size": 32, "adaln_dim": 16, "llm_features_dim": 24, "mrope_section": (2, 1, 1),
        },
        lambda: _segments([1] * 12),
        lambda: _segments([1] * 5 + [2] * 7),
        note="packed segments",
    ),
    Case(
        "UNet2DConditionModel",
        {
            "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 16,
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4,
        },
        lambda: {
            "sample": torch.randn(BATCH, 4, 8, 8), "timestep": torch.tensor([3, 700]),
            "encoder_hidden_states": text(16),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
)  # fmt: skip


def _images(*heights: int) -> list[torch.Tensor]:
    return [torch.randn(16, 1, height, 16) for height in heights]


def _segments(numbers: list[int]) -> dict[str, Any]:
    """One row of several samples, each text and then image tokens; the model's mask keeps them apart."""
    from diffusers.models.transformers import transformer_ideogram4 as home

    tokens = len(numbers)
    text = torch.arange(tokens) % 5 < 2
    places = torch.arange(tokens)[None, :, None].expand(1, tokens, 3).clone()
    places[:, ~text] += home.IMAGE_POSITION_OFFSET
    kinds = torch.where(text, home.LLM_TOKEN_INDICATOR, home.OUTPUT_IMAGE_INDICATOR)
    return {
        "hidden_states": torch.randn(1, tokens, 16) * ~text[:, None],
        "encoder_hidden_states": torch.randn(1, tokens, 24) * text[:, None], "timestep": torch.tensor([0.5]),
        "position_ids": places, "segment_ids": torch.tensor([numbers]), "indicator": kinds[None],
    }  # fmt: skip
