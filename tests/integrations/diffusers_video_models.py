"""Video models of diffusers, small and random: self and cross attention, joint and masked, packed modalities."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.diffusers_cases import BATCH, TEXT, Case, keep, steps, text


def _video(channels: int, size: int = 8, frames: int = 2) -> torch.Tensor:
    return torch.randn(BATCH, channels, frames, size, size)


def _wan(channels: int = 4, width: int = 16) -> dict[str, Any]:
    return {
        "hidden_states": _video(channels), "encoder_hidden_states": text(width), "timestep": torch.tensor([3, 700]),
    }  # fmt: skip


_WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
    "qk_norm": "rms_norm_across_heads",
}  # fmt: skip


VIDEO_MODELS = (
    Case("WanTransformer3DModel", _WAN, _wan, note="text to video"),
    Case(
        "WanTransformer3DModel",
        _WAN | {"in_channels": 12, "image_dim": 6, "added_kv_proj_dim": 24},
        lambda: _wan(12) | {"encoder_hidden_states_image": torch.randn(BATCH, 5, 6)},
        note="image to video",
    ),
    Case(
        "WanVACETransformer3DModel",
        _WAN | {"vace_layers": [0], "vace_in_channels": 12},
        lambda: _wan() | {"control_hidden_states": _video(12)},
    ),
    Case(
        "SkyReelsV2Transformer3DModel",
        _WAN,
        _wan,
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
            "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1,
            "guidance_embeds": True, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
        },
        lambda: {
            "hidden_states": _video(4, size=4), "timestep": steps(), "guidance": steps(),
            "encoder_hidden_states": text(16), "encoder_attention_mask": keep(8, 8),
            "pooled_projections": torch.randn(BATCH, 8),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
            "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16,
            "text_embed_2_dim": 8, "image_embed_dim": 12, "rope_axes_dim": (2, 2, 4), "target_size": 16,
            "task_type": "t2v",
        },
        lambda: {
            "hidden_states": _video(4, size=4), "timestep": steps(), "encoder_hidden_states": text(16),
            "encoder_hidden_states_2": torch.randn(BATCH, 4, 8), "encoder_attention_mask": keep(8, 8),
            "encoder_attention_mask_2": keep(4, 4, total=4), "image_embeds": torch.randn(BATCH, 3, 12),
        },
        lambda: {"encoder_attention_mask": keep(5, 8), "encoder_attention_mask_2": keep(4, 1, total=4)},
    ),
    Case(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
            "cross_attention_dim": 16, "num_layers": 1, "qk_norm": "rms_norm_across_heads", "caption_channels": 16,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 32, 4), "encoder_hidden_states": text(16),
            "timestep": torch.tensor([3, 700]), "encoder_attention_mask": None, "num_frames": 2, "height": 4,
            "width": 4,
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "time_embed_dim": 2, "text_embed_dim": 8, "sample_width": 8, "sample_height": 8, "sample_frames": 8,
            "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT,
        },
        lambda: {
            "hidden_states": torch.randn(BATCH, 2, 4, 8, 8), "encoder_hidden_states": text(8),
            "timestep": torch.tensor([3, 700]),
        },
    ),
    Case(
        "MochiTransformer3DModel",
        {
            "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4,
            "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16,
        },
        lambda: {
            "hidden_states": _video(4), "encoder_hidden_states": text(16), "timestep": torch.tensor([3, 700]),
            "encoder_attention_mask": keep(8, 8),
        },
        lambda: {"encoder_attention_mask": keep(5, 8)},
    ),
    Case(
        "Cosmos3OmniTransformer",
        {
            "head_dim": 6, "hidden_size": 12, "intermediate_size": 24, "latent_channel": 2, "latent_patch_size": 1,
            "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 2,
            "rope_axes_dim": [1, 1, 1], "vocab_size": 32,
        },
        lambda: {
            "input_ids": torch.tensor([1, 2, 5]), "text_indexes": torch.arange(3), "und_len": 3, "sequence_length": 7,
            "position_ids": torch.randint(9, (3, 7)), "vision_tokens": [torch.randn(1, 2, 1, 2, 2)],
            "vision_token_shapes": [(1, 2, 2)], "vision_sequence_indexes": torch.arange(3, 7),
            "vision_mse_loss_indexes": torch.arange(3, 7), "vision_timesteps": torch.ones(4),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
        },
        note="causal text, then images",
    ),
)  # fmt: skip
