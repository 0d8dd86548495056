"""Language models of `transformers` that the sweep compiles."""

from benchmarks.cases.architectures import ABSENT, LOGITS, padded_tokens, rows, tokens, two_texts

ENCODERS = rows(
    "encoder",
    padded_tokens,
    LOGITS,
    {
        "bert_padded": ("BertForMaskedLM", {}),
        "roberta": ("RobertaForMaskedLM", {}),
        "albert": ("AlbertForMaskedLM", {}),
        "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
        "electra": ("ElectraForMaskedLM", {}),
        "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "deberta_v2": ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "mpnet": ("MPNetForMaskedLM", {}),
        "mobilebert": ("MobileBertForMaskedLM", {"intra_bottleneck_size": 16, "true_hidden_size": 16}),
        "squeezebert": ("SqueezeBertForMaskedLM", {"embedding_size": 32}),
        "funnel": (
            "FunnelForMaskedLM",
            {"num_hidden_layers": ABSENT, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 64},
        ),
        "convbert": ("ConvBertForMaskedLM", {"embedding_size": 32}),
        "roformer": ("RoFormerForMaskedLM", {}),
        "big_bird": ("BigBirdForMaskedLM", {"attention_type": "original_full"}),
        "longformer": ("LongformerForMaskedLM", {"attention_window": 8}),
        "xlnet": ("XLNetLMHeadModel", {"max_position_embeddings": ABSENT, "n_layer": 2, "n_head": 4, "d_inner": 64}),
        "modernbert": ("ModernBertForMaskedLM", {"global_attn_every_n_layers": 2, "local_attention": 8}),
        "esm": ("EsmForMaskedLM", {"position_embedding_type": "rotary", "mask_token_id": 3}),
        "megatron_bert": ("MegatronBertForMaskedLM", {}),
        "rembert": ("RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 24}),
        "xlm_roberta": ("XLMRobertaForMaskedLM", {}),
    },
) + rows(
    "encoder",
    tokens,
    LOGITS,
    {
        "fnet": ("FNetForMaskedLM", {}),
        "nystromformer": (
            "NystromformerForMaskedLM",
            {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 3},
        ),
    },
)

DECODERS = rows(
    "decoder",
    padded_tokens,
    LOGITS,
    {
        "gpt2_padded": ("GPT2LMHeadModel", {"n_inner": 64}),
        "gpt_neo": ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
        "gpt_neox": ("GPTNeoXForCausalLM", {}),
        "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}),
        "codegen": ("CodeGenForCausalLM", {"rotary_dim": 4}),
        "opt": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        "bloom": ("BloomForCausalLM", {}),
        "mpt": ("MptForCausalLM", {}),
        "falcon": ("FalconForCausalLM", {"head_dim": ABSENT}),
        "llama_padded": ("LlamaForCausalLM", {}),
        "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
        "gemma": ("GemmaForCausalLM", {}),
        "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 8}),
        "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 8}),
        "qwen2": ("Qwen2ForCausalLM", {}),
        "qwen3": ("Qwen3ForCausalLM", {}),
        "phi": ("PhiForCausalLM", {}),
        "phi3": ("Phi3ForCausalLM", {}),
        "stablelm": ("StableLmForCausalLM", {}),
        "starcoder2": ("Starcoder2ForCausalLM", {}),
        "olmo2": ("Olmo2ForCausalLM", {}),
        "cohere": ("CohereForCausalLM", {}),
        "glm4": ("Glm4ForCausalLM", {}),
        "smollm3": ("SmolLM3ForCausalLM", {}),
        "granite": ("GraniteForCausalLM", {}),
        "xglm": ("XGLMForCausalLM", {"attention_heads": 4, "ffn_dim": 64}),
        "biogpt": ("BioGptForCausalLM", {}),
        "ctrl": ("CTRLLMHeadModel", {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4}),
        "nemotron": ("NemotronForCausalLM", {}),
    },
)

BOTH = rows(
    "encoder-decoder",
    two_texts,
    LOGITS,
    {
        "t5_short": ("T5ForConditionalGeneration", {"num_heads": 4, "decoder_start_token_id": 0}),
        "mt5": ("MT5ForConditionalGeneration", {"num_heads": 4, "decoder_start_token_id": 0}),
        "longt5": (
            "LongT5ForConditionalGeneration",
            {"num_heads": 4, "local_radius": 4, "decoder_start_token_id": 0},
        ),
        "bart": ("BartForConditionalGeneration", {}),
        "mbart": ("MBartForConditionalGeneration", {}),
        "pegasus": ("PegasusForConditionalGeneration", {}),
        "marian": ("MarianMTModel", {"decoder_vocab_size": 101, "decoder_start_token_id": 0}),
        "m2m_100": ("M2M100ForConditionalGeneration", {}),
        "blenderbot": ("BlenderbotForConditionalGeneration", {}),
        "led": ("LEDForConditionalGeneration", {"attention_window": 8}),
        "prophetnet": (
            "ProphetNetForConditionalGeneration",
            {
                "num_hidden_layers": ABSENT,
                "num_encoder_layers": 2,
                "num_encoder_attention_heads": 4,
                "num_decoder_attention_heads": 4,
                "disable_ngram_loss": True,
            },
        ),
    },
)

STATE_SPACE = rows(
    "state space",
    tokens,
    LOGITS,
    {
        "mamba": ("MambaForCausalLM", {"state_size": 8}),
        "mamba2": ("Mamba2ForCausalLM", {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8}),
        "falcon_mamba": ("FalconMambaForCausalLM", {"state_size": 8}),
        "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32}),
        "recurrent_gemma": (
            "RecurrentGemmaForCausalLM",
            {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
        ),
        "bamba": (
            "BambaForCausalLM",
            {
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_chunk_size": 8,
                "attn_layer_indices": [1],
            },
        ),
        "jamba": (
            "JambaForCausalLM",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
        ),
    },
)

EXPERTS = rows(
    "mixture of experts",
    tokens,
    LOGITS,
    {
        "mixtral": ("MixtralForCausalLM", {}),
        "qwen2_moe": ("Qwen2MoeForCausalLM", {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}),
        "qwen3_moe": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 16}),
        "olmoe": ("OlmoeForCausalLM", {}),
        "deepseek_v3": (
            "DeepseekV3ForCausalLM",
            {
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 1,
                "num_key_value_heads": 4,
            },
        ),
        "gpt_oss": ("GptOssForCausalLM", {"sliding_window": 8}),
        "granitemoe": ("GraniteMoeForCausalLM", {}),
        "phimoe": ("PhimoeForCausalLM", {}),
        "dbrx": (
            "DbrxForCausalLM",
            {
                "n_heads": 4,
                "n_layers": 2,
                "max_seq_len": 64,
                "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            },
        ),
    },
) + rows(
    "mixture of experts",
    two_texts,
    LOGITS,
    {
        "switch_transformers": (
            "SwitchTransformersForConditionalGeneration",
            {
                "num_heads": 4,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 1,
                "expert_capacity": 8,
                "router_jitter_noise": 0.0,
                "decoder_start_token_id": 0,
            },
        ),
    },
)

TEXT = (*ENCODERS, *DECODERS, *BOTH, *STATE_SPACE, *EXPERTS)
