"""Models of `transformers` for images, sound, and images with text that the sweep compiles."""

from typing import Any

from benchmarks.cases.architectures import (
    ABSENT,
    HIDDEN,
    LOGITS,
    SMALL,
    Architecture,
    heard_and_said,
    image,
    images,
    rows,
    spectrogram,
    text_and_image,
    waveform,
)

STAGES: dict[str, Any] = {"num_hidden_layers": ABSENT, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}

VISION = [
    *rows(
        "vision",
        image,
        LOGITS,
        {
            "vit": ("ViTForImageClassification", {}),
            "deit": ("DeiTForImageClassification", {}),
            "beit": ("BeitForImageClassification", {}),
            "dinov2": ("Dinov2ForImageClassification", {}),
            "vit_msn": ("ViTMSNForImageClassification", {}),
            "yolos": ("YolosForObjectDetection", {"image_size": [32, 32], "num_detection_tokens": 5}),
            "siglip": (
                "SiglipForImageClassification",
                {
                    "vision_config": {k: SMALL[k] for k in ("hidden_size", "image_size", "patch_size")}
                    | {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
                },
            ),
        },
    ),
    *rows(
        "vision",
        images(64),
        LOGITS,
        {
            "swin": (
                "SwinForImageClassification",
                {
                    "image_size": 64,
                    "patch_size": 4,
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "num_attention_heads": ABSENT,
                    "num_layers": ABSENT,
                    "num_hidden_layers": ABSENT,
                    "hidden_size": ABSENT,
                    "window_size": 4,
                },
            ),
            "swinv2": (
                "Swinv2ForImageClassification",
                {
                    "image_size": 64,
                    "patch_size": 4,
                    "embed_dim": 16,
                    "depths": [2, 2],
                    "num_heads": [2, 4],
                    "num_attention_heads": ABSENT,
                    "num_layers": ABSENT,
                    "num_hidden_layers": ABSENT,
                    "hidden_size": ABSENT,
                    "window_size": 4,
                    "pretrained_window_sizes": [0, 0],
                },
            ),
            "convnext": ("ConvNextForImageClassification", {**STAGES, "patch_size": 4}),
            "convnextv2": ("ConvNextV2ForImageClassification", {**STAGES, "patch_size": 4}),
            "resnet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 8}),
            "regnet": ("RegNetForImageClassification", {**STAGES, "embedding_size": 8, "groups_width": 8}),
            "mobilenet_v1": ("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25}),
            "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
            "mobilevit": (
                "MobileViTForImageClassification",
                {
                    "image_size": 64,
                    "patch_size": 2,
                    "hidden_sizes": [16, 24, 32],
                    "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
                },
            ),
            "segformer": (
                "SegformerForSemanticSegmentation",
                {
                    "depths": [1, 1, 1, 1],
                    "hidden_sizes": [8, 16, 24, 32],
                    "num_attention_heads": [1, 2, 2, 4],
                    "decoder_hidden_size": 16,
                },
            ),
            "pvt_v2": (
                "PvtV2ForImageClassification",
                {
                    "image_size": 64,
                    "depths": [1, 1, 1, 1],
                    "hidden_sizes": [8, 16, 24, 32],
                    "num_attention_heads": [1, 2, 2, 4],
                },
            ),
            "poolformer": ("PoolFormerForImageClassification", {**STAGES, "patch_size": 7}),
            "focalnet": (
                "FocalNetForImageClassification",
                {
                    "image_size": 64,
                    "patch_size": 4,
                    "embed_dim": 16,
                    "depths": [1, 1, 1, 1],
                    "hidden_sizes": [16, 16, 32, 32],
                    "focal_levels": [2, 2, 2, 2],
                    "focal_windows": [3, 3, 3, 3],
                },
            ),
            "hiera": (
                "HieraForImageClassification",
                {
                    "image_size": [64, 64],
                    "patch_size": [7, 7],
                    "embed_dim": 16,
                    "depths": [1, 1, 1, 1],
                    "num_heads": [1, 2, 4, 8],
                },
            ),
        },
    ),
    Architecture(
        "dpt",
        "vision",
        "DPTForDepthEstimation",
        images(64),
        {
            "image_size": 64,
            "patch_size": 16,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
        "predicted_depth",
    ),
]

CONVOLUTIONS: dict[str, Any] = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

SPEECH = [
    *rows(
        "speech",
        waveform,
        LOGITS,
        {
            "wav2vec2": ("Wav2Vec2ForCTC", CONVOLUTIONS),
            "hubert": ("HubertForCTC", CONVOLUTIONS),
            "wavlm": ("WavLMForCTC", {**CONVOLUTIONS, "num_buckets": 32, "max_bucket_distance": 64}),
            "unispeech": ("UniSpeechForCTC", CONVOLUTIONS),
            "sew": ("SEWForCTC", {**CONVOLUTIONS, "squeeze_factor": 2}),
        },
    ),
    Architecture(
        "whisper",
        "speech",
        "WhisperForConditionalGeneration",
        heard_and_said(spectrogram(64, 16, bins_first=True)),
        {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
    Architecture(
        "speech_to_text",
        "speech",
        "Speech2TextForConditionalGeneration",
        heard_and_said(spectrogram(32, 16)),
        {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64, "max_target_positions": 64},
    ),
    Architecture(
        "audio_spectrogram",
        "speech",
        "ASTForAudioClassification",
        spectrogram(32, 16, "input_values"),
        {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 4, "time_stride": 4},
    ),
]

_TEXT_HALF: dict[str, Any] = {
    k: SMALL[k]
    for k in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "eos_token_id",
    )
}

_IMAGE_HALF: dict[str, Any] = {
    k: SMALL[k]
    for k in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    )
}

SEVERAL = rows(
    "several",
    text_and_image,
    "logits_per_image",
    {
        "clip": ("CLIPModel", {"text_config": _TEXT_HALF, "vision_config": _IMAGE_HALF, "projection_dim": 16}),
        "siglip_pair": (
            "SiglipModel",
            {"text_config": _TEXT_HALF | {"projection_size": 32}, "vision_config": _IMAGE_HALF},
        ),
    },
) + rows("several", text_and_image, HIDDEN, {"vilt": ("ViltModel", {})})

SENSES = (*VISION, *SPEECH, *SEVERAL)
