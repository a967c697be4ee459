"""The published checkpoints: the class of each, and what its tiny configuration has beside the common sizes."""

from typing import Any, NamedTuple

from tests.helpers.models import SPEC


class Checkpoint(NamedTuple):
    """A class as published configs name it; one line for a new one."""

    name: str
    kind: str
    """`model_type`."""
    media: str = ""
    """The function of `inputs` that makes its image or audio."""
    features: int = 0
    """Placeholders of one image or recording in the text; 0: it is read by an encoder, or takes no place."""
    heads: str = ""
    """Draft heads that are published for it."""
    settings: dict[str, Any] = {}
    architecture: str = ""
    """The class, where the mapping tables of Transformers do not name it."""


def row(name: str, kind: str, media: str = "", heads: str = "", architecture: str = "", **settings: Any) -> Checkpoint:
    """A line of the table; `media` as "pixels 4", with the number of placeholders."""
    kind_of_media, _, features = media.partition(" ")
    for part in ("text", "vision"):
        if part in settings:
            settings[f"{part}_config"] = settings.pop(part)
    return Checkpoint(name, kind, kind_of_media, int(features or 0), heads, settings, architecture)


def rope(*section: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of several axes."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*section], **more}}


def of(model_type: str, **settings: Any) -> dict[str, Any]:
    """A part of another type than the default one."""
    return {"model_type": model_type, **settings}


def decoder(model_type: str) -> dict[str, Any]:
    """The decoder of an encoder-decoder that is made of two models."""
    return of(model_type, is_decoder=True, add_cross_attention=True)


MLA: dict[str, Any] = {"num_key_value_heads": 4, "qk_rope_head_dim": 8}
MROPE = rope(2, 3, 3)
QWEN: dict[str, Any] = {**rope(1, 1, 2, partial_rotary_factor=0.5), "linear_num_value_heads": 4, "layers": "lflf"}
DSA: dict[str, Any] = {**MLA, "pad_token_id": None, "q_lora_rank": 32, "layers": ""}
QWEN_VISION: dict[str, Any] = {"embed_dim": 32, "hidden_size": 64}
MIXED: dict[str, Any] = {"layers": "sf"}
IMAGE_TO_TEXT = "vision-encoder-decoder"
STATES: dict[str, Any] = {"layers": "lf", "linear_num_value_heads": 4}
INDEXED = {"layers": ["linear_attention", "indexed_attention"], "indexer_n_heads": 4, "indexer_kv_heads": 1}
QWEN4 = QWEN | MROPE | INDEXED | {"indexer_head_dim": 16, "indexer_budget": 6, "indexer_compress_ratio": 2}
GLM_NEXT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "index_kpool": 2, "qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 16},
    "layers": ["linear_attention", "indexed_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
COMPRESSED = {
    "layers": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "index_topk": 3,
}
KIMI = {"projection_hidden_size": 32}
GEMMA_VISION = of("gemma4_vision", pooling_kernel_size=2)
UNIFIED = of("gemma4_unified_vision")
GEMMA_E = {"layers": "sfsf", "num_kv_shared_layers": 1}
GEMMA_DENSE = {"layers": "sf", "hidden_size_per_layer_input": 0}
GEMMA_MOE = {**GEMMA_DENSE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
MLLAMA = {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
MLLAMA_VISION = {
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
    "num_global_layers": 1,
}
LLAMA4 = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128}
ALL_FEATURES = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
ONE_TILE = {"image_grid_pinpoints": [[16, 16]]}
PHI_VISION = {"image_token_id": 98, "crop_size": 16}
PHI_AUDIO = {"ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32}
GRANITE_SPEECH = {
    "encoder_config": {"input_dim": 16, "hidden_dim": 32, "dim_head": 16, "output_dim": 8, "context_size": 8},
    "projector_config": {"encoder_hidden_size": 32},
}
VIBE = {"num_filters": 2, "depths": [1] * 7}
CSM = {
    "codec_config": {"upsample_groups": 32, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16},
    "depth_decoder_config": {"backbone_hidden_size": 64},
}
FLORENCE: dict[str, Any] = {
    **{"depths": [1, 1], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "window_size": 2},
    **{"patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2]},
}
SWIN_HEADS = {"num_heads": [2, 2], "num_attention_heads": [2, 2]}
SWIN = of("donut-swin", **SWIN_HEADS, depths=[1, 1], embed_dim=16, window_size=2, patch_size=2, image_size=[16, 16])

CHECKPOINTS = [
    # Text alone
    row("Qwen3", "qwen3", heads="EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark, PARD, PARD-2, Domino, JetSpec, Uno"),
    row("Qwen3-30B-A3B, Qwen3-Coder", "qwen3_moe", heads="EAGLE-3, DFlash"),
    row("Qwen3-Next, Qwen3-Coder-Next", "qwen3_next", heads="DFlash, MTP, EAGLE-3", **STATES),
    row("gpt-oss", "gpt_oss", heads="EAGLE-3, P-EAGLE, DFlash", layers="sf"),
    row("OLMo 2", "olmo2"),
    row("Hunyuan dense", "hunyuan_v1_dense"),
    row("BitNet", "bitnet"),
    row("Phi-4", "phi3"),
    row("Gemma 3 1B", "gemma3_text", **MIXED),
    row("Mistral Small 4 (text)", "mistral4", num_key_value_heads=4),
    row("DeepSeek-V3.2", "deepseek_v32", heads="MTP", **DSA),
    row("GLM-5, GLM-5.2, GLM-5.3", "glm_moe_dsa", heads="DSpark, DFlash2, MTP", **DSA),
    row("LFM2, LFM2.5", "lfm2", heads="DSpark", layers="vfvf"),
    row("LFM2-MoE", "lfm2_moe", heads="DSpark", layers="vfvf", num_dense_layers=1),
    row("Bamba", "bamba", num_hidden_layers=4, attn_layer_indices=[1, 3]),
    row("Falcon-H1", "falcon_h1", mamba_d_ssm=128),
    row("Granite 4 H", "granitemoehybrid", layers="lflf"),
    row("Nemotron-H, Nemotron 3", "nemotron_h", heads="DFlash, DSpark", **SPEC["recurrent"]["nemotron_h"]),
    row("Zamba 2", "zamba2", attention_hidden_size=128, attention_head_dim=32, **SPEC["recurrent"]["zamba2"]),
    row("DeepSeek-V4", "deepseek_v4", heads="DSpark", **COMPRESSED),
    row("Jamba", "jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1),
    row("Falcon-Mamba", "falcon_mamba"),
    row("Mamba", "mamba"),
    row("RecurrentGemma", "recurrent_gemma", num_hidden_layers=3, num_key_value_heads=1),
    row("Mamba 2, Codestral Mamba", "mamba2", num_heads=4, head_dim=32, n_groups=1, chunk_size=8),
    row("Zamba", "zamba", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, attention_hidden_size=128),
    row("Zaya", "zaya", num_experts_per_tok=1),
    row("Sarvam 105B", "sarvam_mla", num_key_value_heads=4),
    row("Sarvam 30B", "sarvam_moe"),
    row("A.X K2", "axk2", num_key_value_heads=4),
    row("Lara Mini", "lara_mini"),
    # Text and images
    row("Qwen2-VL", "qwen2_vl", "grid 4", text=MROPE, vision=QWEN_VISION),
    row("Qwen2.5-VL", "qwen2_5_vl", "grid 4", text=MROPE),
    row("Qwen3-VL", "qwen3_vl", "grid 4", heads="EAGLE-3", text=MROPE),
    row("Qwen3-VL-MoE", "qwen3_vl_moe", "grid 4", heads="EAGLE-3", text=MROPE),
    row("Qwen3.5, 3.6, 3.8 (dense)", "qwen3_5", "grid 4", heads="DFlash, DFlash2, DSpark, MTP", text=QWEN),
    row("Qwen3.5, 3.6 (MoE)", "qwen3_5_moe", "grid 4", heads="DFlash, DSpark, MTP", text=QWEN),
    row("Qwen4-Exp", "qwen4_exp", "grid 4", text=QWEN4),
    row("Qwen2.5-Omni (thinker)", "qwen2_5_omni_thinker", "grid 4", text=MROPE, vision_start_token_id=95),
    row("GLM-4.1V", "glm4v", "grid 4", text=MROPE),
    row("GLM-4.5V, GLM-4.6V", "glm4v_moe", "grid 4", text=rope(1, 1, 2)),
    row("GLM-4.6V-Flash", "glm46v", "grid 4", text=MROPE),
    row("GLM-OCR", "glm_ocr", "grid 4", text=MROPE),
    row(
        "GLM-5.3-Flash",
        "glm5_next",
        "grid 4",
        "DSpark, DFlash2",
        text=GLM_NEXT,
        vision={"projection_intermediate_size": 64},
    ),
    row("ERNIE-4.5-VL", "ernie4_5_vl_moe", "grid 4", text={"moe_intermediate_size": [48, 32], **rope(3, 3, 2)}),
    row("PaddleOCR-VL", "paddleocr_vl", "grid_pixels 4", text=MROPE),
    row("EXAONE 4.5", "exaone4_5", "grid 4", text=MIXED),
    row("MiniMax-M3", "minimax_m3_vl", "grid 4", heads="DFlash, DSpark"),
    row("Kimi K2.5, K2.6, K2.7", "kimi_k25", "grid_pixels 4", heads="DFlash, EAGLE-3", text=MLA, **KIMI),
    row("Gemma 3", "gemma3", "pixels 4", heads="EAGLE-3", text=MIXED),
    row("Gemma 3n", "gemma3n", "pixels 4", text=MIXED),
    row("Gemma 4 E2B, E4B", "gemma4", "patches 4", vision=GEMMA_VISION, heads="assistant", text=GEMMA_E),
    row(
        "Gemma 4 31B",
        "gemma4",
        "patches 4",
        vision=GEMMA_VISION,
        heads="assistant, EAGLE-3, DFlash, DSpark",
        text=GEMMA_DENSE,
    ),
    row(
        "Gemma 4 26B-A4B",
        "gemma4",
        "patches 4",
        vision=GEMMA_VISION,
        heads="assistant, EAGLE-3, DFlash",
        text=GEMMA_MOE,
    ),
    row("Gemma 4 12B", "gemma4_unified", "patches 16", "assistant, DFlash", text=MIXED, vision=UNIFIED),
    row("PaliGemma", "paligemma", "pixels 16"),
    row("PaliGemma 2", "paligemma", "pixels 16", text=of("gemma2", **MIXED)),
    row("Llama 4", "llama4", "pixels 4", heads="EAGLE-3, PARD", text={"layers": "cf"}, vision=LLAMA4),
    row("Llama 3.2 Vision", "mllama", "mllama", text=MLLAMA, vision=MLLAMA_VISION),
    row("Mistral Small 3.1, 3.2", "mistral3", "pixels 4", heads="EAGLE-3"),
    row("Ministral 3", "mistral3", "pixels 4", text=of("ministral3")),
    row("Mistral Small 4", "mistral3", "pixels 4", heads="DFlash, DSpark", text=of("mistral4", num_key_value_heads=4)),
    row("Mistral Large 4", "mistral_large4", "pixels 4", text=DSA),
    row("Pixtral", "llava", "pixels 16", vision=of("pixtral"), text=of("mistral"), **ALL_FEATURES),
    row("LLaVA 1.5", "llava", "pixels 16", vision=of("clip_vision_model")),
    row("LLaVA-NeXT", "llava_next", "tiles_of_size 36", **ONE_TILE),
    row("LLaVA-OneVision", "llava_onevision", "tiles_of_size 36", **ONE_TILE, text=of("qwen2")),
    row("InternVL 3", "internvl", "pixels 4", text=of("qwen2")),
    row("InternVL 3.5 (gpt-oss)", "internvl", "pixels 4", text=of("gpt_oss", **MIXED)),
    row("InternVL 3.5", "internvl", "pixels 4", text=of("qwen3")),
    row("Cohere Command A Vision", "cohere2_vision", "pixels 4", text=MIXED),
    row("Aya Vision", "aya_vision", "pixels 4", text=MIXED),
    row("SmolVLM", "smolvlm", "tiles 4"),
    row("Idefics 3", "idefics3", "tiles 4"),
    row("LFM2-VL", "lfm2_vl", "naflex 4", text={"layers": "vfvf"}),
    row("LightOnOCR", "lighton_ocr", "pixels 4"),
    row("GOT-OCR 2", "got_ocr2", "pixels 1"),
    row("DeepSeek-VL", "deepseek_vl", "pixels 16"),
    row("MiniCPM-V 4.6", "minicpmv4_6", "minicpm 1", text=QWEN),
    row("Phi-4-multimodal", "phi4_multimodal", "crops 13", vision=PHI_VISION, audio_config=PHI_AUDIO),
    row("GIT", "git", "pixels"),
    row("BLIP", "blip", "pixels"),
    row("BLIP-2", "blip-2", "pixels 4"),
    row("InstructBLIP", "instructblip", "instructed 4"),
    row("Kosmos-2", "kosmos-2", "marked_pixels 4", latent_query_num=4),
    row("Aria", "aria", "pixels 4", projector_patch_to_query_dict={16: 4}),
    row("Idefics 2", "idefics2", "tiles 64"),
    row("LLaVA-NeXT-Video", "llava_next_video", "tiles_of_size 36", **ONE_TILE),
    row("ViP-LLaVA", "vipllava", "pixels 16", vision_feature_layers=[-1, -2]),
    row("Video-LLaVA", "video_llava", "pixels 16"),
    row("Ovis 2", "ovis2", "pixels 16"),
    row("Janus-Pro", "janus", "pixels 16"),
    row("Qwen3-Omni (thinker)", "qwen3_omni_moe_thinker", "grid 4", text=MROPE, vision_start_token_id=95),
    row("LFM3-VL", "lfm3_vl", "grid 4", text={"layers": "vfvf"}),
    row("ShieldGemma 2", "shieldgemma2", "pixels 4", text=MIXED),
    row("Qianfan-OCR", "qianfan_ocr", "pixels 4"),
    row("Step 3.7", "step3p7", "pixels 1", text={"sliding_window": 8}),
    row("Fuyu", "fuyu", "flat_patches 16", patch_size=4),
    # Text and audio
    row("Qwen2-Audio", "qwen2_audio", "mel_seen 4"),
    row("Voxtral", "voxtral", "mel 8"),
    row("Voxtral Realtime", "voxtral_realtime", "mel"),
    row("Granite Speech", "granite_speech", "mel_last 6", **GRANITE_SPEECH),
    row("Qwen3-ASR", "qwen3_asr", "mel_masked 13", audio_config={"downsample_hidden_size": 32}),
    row("Audio Flamingo 3", "audioflamingo3", "mel_masked 4"),
    row("GLM-ASR", "glmasr", "mel_masked 2", audio_config={"intermediate_size": 128}),
    row("CSM", "csm", architecture="CsmForConditionalGeneration", **CSM),
    row("Higgs Audio v2", "higgs_audio_v2", architecture="HiggsAudioV2ForConditionalGeneration"),
    row("VibeVoice", "vibevoice", audio_config=VIBE, semantic_model_config=VIBE),
    # Encoder-decoders
    row("Whisper", "whisper", "encoder_mel", heads="distil-whisper"),
    row("Moonshine", "moonshine", "encoder_wave"),
    row("T5, FLAN-T5", "t5", "encoder_text"),
    row("T5Gemma", "t5gemma", "encoder_text", encoder=MIXED, decoder=MIXED),
    row("T5Gemma 2", "t5gemma2", "encoder_text", "DSpark", encoder={"text_config": MIXED}, decoder=MIXED),
    row("BART", "bart", "encoder_text"),
    row("Marian", "marian", "encoder_text"),
    row("NLLB, M2M-100", "m2m_100", "encoder_text"),
    row("Florence-2", "florence2", "encoder_pixels_text", vision=FLORENCE),
    row("TrOCR", IMAGE_TO_TEXT, "encoder_pixels", encoder=of("vit"), decoder=decoder("trocr")),
    row("Donut", IMAGE_TO_TEXT, "encoder_pixels", encoder=SWIN, decoder=decoder("mbart")),
    row("ViT-GPT2", IMAGE_TO_TEXT, "encoder_pixels", encoder=of("vit"), decoder=decoder("gpt2")),
]
