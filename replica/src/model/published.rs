//! Configuration files of published checkpoints: rejecting one of their keys would keep the model from being served.
//!
//! The keys are those of the repositories as of 2025; sizes are reduced where they do not matter.

use serde_json::{Value, json};

use super::architecture::Architecture;
use super::{ModelError, TokenizerConfig};

fn parse(raw: &Value) -> Result<Architecture, ModelError> {
    Architecture::read(std::path::Path::new("config.json"), raw.as_object().unwrap())
}

fn with(base: &Value, more: Value) -> Value {
    let mut all = base.clone();
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

/// BERT's keys, as written by version 4 of transformers.
fn bert() -> Value {
    json!({
        "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": false, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02, "intermediate_size": 1536,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522
    })
}

/// XLM-RoBERTa's keys.
fn xlm_roberta() -> Value {
    with(
        &bert(),
        json!({
            "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "classifier_dropout": null, "eos_token_id": 2,
            "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "xlm-roberta", "output_past": true,
            "pad_token_id": 1, "torch_dtype": "float32", "type_vocab_size": 1, "vocab_size": 250_002
        }),
    )
}

/// Keys of decoders.
fn decoder() -> Value {
    json!({
        "attention_dropout": 0.0, "bos_token_id": 151_643, "eos_token_id": 151_643, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 32768,
        "num_attention_heads": 16, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.2", "use_cache": true, "vocab_size": 151_669
    })
}

fn published() -> Vec<(&'static str, Value)> {
    let qwen3 = with(
        &decoder(),
        json!({
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "max_window_layers": 28,
            "model_type": "qwen3", "rope_scaling": null, "sliding_window": null, "use_sliding_window": false
        }),
    );
    let nomic = json!({
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
            "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining"
        },
        "bos_token_id": null, "causal": false, "dense_seq_output": true, "embd_pdrop": 0.0, "eos_token_id": null,
        "fused_bias_fc": true, "fused_dropout_add_ln": true, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 2048, "mlp_fc1_bias": false, "mlp_fc2_bias": false, "model_type": "nomic_bert",
        "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
        "pad_vocab_size_multiple": 64, "parallel_block": false, "parallel_block_tied_norm": false, "prenorm": false,
        "qkv_proj_bias": false, "reorder_and_upcast_attn": false, "resid_pdrop": 0.0, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": false, "rotary_emb_scale_base": null,
        "rotary_scaling_factor": null, "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true,
        "summary_activation": null, "summary_first_dropout": 0.0, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true, "torch_dtype": "float32",
        "transformers_version": "4.37.2", "type_vocab_size": 2, "use_cache": true, "use_flash_attn": true,
        "use_rms_norm": false, "use_xentropy": true, "vocab_size": 30528
    });
    let modernbert = json!({
        "_name_or_path": "answerdotai/ModernBERT-base", "architectures": ["ModernBertModel"],
        "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
        "classifier_bias": false, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
        "decoder_bias": true, "deterministic_flash_attn": false, "embedding_dropout": 0.0, "eos_token_id": 50282,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "gradient_checkpointing": false,
        "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
        "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": false, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": false, "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "reference_compile": null,
        "repad_logits_with_grad": false, "sep_token_id": 50282, "sparse_pred_ignore_index": -100,
        "sparse_prediction": false, "torch_dtype": "float16", "transformers_version": "4.48.0.dev0",
        "vocab_size": 50368
    });
    let jina = json!({
        "_name_or_path": "jinaai/jina-bert-implementation", "model_max_length": 8192,
        "architectures": ["JinaBertForMaskedLM"], "attention_probs_dropout_prob": 0.0,
        "auto_map": {
            "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
            "AutoModelForMaskedLM": "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM",
            "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
            "AutoModelForSequenceClassification":
                "jinaai/jina-bert-implementation--modeling_bert.JinaBertForSequenceClassification"
        },
        "classifier_dropout": null, "gradient_checkpointing": false, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 0, "position_embedding_type": "alibi", "torch_dtype": "float32",
        "transformers_version": "4.26.0", "type_vocab_size": 2, "use_cache": true, "vocab_size": 30528,
        "feed_forward_type": "geglu", "emb_pooler": "mean", "attn_implementation": null
    });
    let gemma3 = json!({
        "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": false,
        "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "dtype": "float32",
        "eos_token_id": 1, "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 1152, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3,
        "num_hidden_layers": 2, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_scaling": null, "rope_theta": 1_000_000.0,
        "sliding_window": 512, "transformers_version": "4.57.0.dev0", "use_bidirectional_attention": true,
        "use_cache": true, "vocab_size": 262_144
    });
    let qwen2 = json!({
        "auto_map": {
            "AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
            "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification"
        },
        "architectures": ["Qwen2ForCausalLM"], "is_causal": false, "max_window_layers": 28, "model_type": "qwen2",
        "sliding_window": 131_072, "use_sliding_window": false
    });
    let labels = json!({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}});
    vec![
        ("sentence-transformers/all-MiniLM-L6-v2", bert()),
        (
            "BAAI/bge-small-en-v1.5",
            with(&bert(), with(&labels, json!({"classifier_dropout": null, "torch_dtype": "float32"}))),
        ),
        ("intfloat/e5-base-v2", with(&bert(), json!({"classifier_dropout": null}))),
        (
            "google-bert/bert-base-multilingual-cased",
            with(
                &bert(),
                json!({"architectures": ["BertForMaskedLM"], "directionality": "bidi", "pooler_fc_size": 768,
                    "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
                    "pooler_type": "first_token_transform"}),
            ),
        ),
        (
            "cross-encoder/ms-marco-MiniLM-L6-v2",
            with(
                &bert(),
                with(
                    &labels,
                    json!({"architectures": ["BertForSequenceClassification"],
                        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
                        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
                ),
            ),
        ),
        ("intfloat/multilingual-e5-base", xlm_roberta()),
        (
            "BAAI/bge-reranker-v2-m3",
            with(
                &xlm_roberta(),
                with(
                    &labels,
                    json!({"architectures": ["XLMRobertaForSequenceClassification"],
                    "max_position_embeddings": 8194}),
                ),
            ),
        ),
        (
            "dangvantuan/sentence-camembert-base",
            with(
                &xlm_roberta(),
                json!({"architectures": ["CamembertModel"], "model_type": "camembert",
                "vocab_size": 32005}),
            ),
        ),
        (
            "sentence-transformers/all-mpnet-base-v2",
            json!({
                "_name_or_path": "microsoft/mpnet-base", "architectures": ["MPNetForMaskedLM"],
                "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu",
                "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
                "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "mpnet",
                "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
                "relative_attention_num_buckets": 32, "transformers_version": "4.8.2", "vocab_size": 30527
            }),
        ),
        (
            "cross-encoder/ms-marco-electra-base",
            json!({
                "_name_or_path": "google/electra-base-discriminator",
                "architectures": ["ElectraForSequenceClassification"], "attention_probs_dropout_prob": 0.1,
                "classifier_dropout": null, "embedding_size": 768, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
                "hidden_size": 768, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
                "intermediate_size": 3072, "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-12,
                "max_position_embeddings": 512, "model_type": "electra", "num_attention_heads": 12,
                "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
                "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first",
                "summary_use_proj": true, "transformers_version": "4.6.1", "type_vocab_size": 2, "use_cache": true,
                "vocab_size": 30522
            }),
        ),
        (
            "sentence-transformers/msmarco-distilbert-base-v4",
            json!({
                "_name_or_path": "distilbert", "activation": "gelu", "architectures": ["DistilBertModel"],
                "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02,
                "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12, "n_layers": 6,
                "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": false,
                "tie_weights_": true, "transformers_version": "4.7.0", "vocab_size": 30522
            }),
        ),
        ("jinaai/jina-embeddings-v2-base-en", jina),
        ("nomic-ai/nomic-embed-text-v1.5", nomic),
        ("Alibaba-NLP/gte-modernbert-base", modernbert),
        (
            "intfloat/e5-mistral-7b-instruct",
            with(
                &decoder(),
                json!({"_name_or_path": "mistral", "architectures": ["MistralModel"],
                "bos_token_id": 1, "eos_token_id": 2, "model_type": "mistral", "pad_token_id": 2,
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
                "tie_word_embeddings": false, "vocab_size": 32000}),
            ),
        ),
        ("Alibaba-NLP/gte-Qwen2-7B-instruct", with(&decoder(), qwen2)),
        ("Qwen/Qwen3-Embedding-0.6B", qwen3.clone()),
        ("Qwen/Qwen3-Reranker-0.6B", qwen3),
        ("google/embeddinggemma-300m", gemma3),
    ]
}

#[test]
fn configurations_of_published_checkpoints_are_read() {
    for (name, raw) in published() {
        if let Err(error) = parse(&raw) {
            panic!("{name}: {error}");
        }
    }
}

#[test]
fn tokenizer_configurations_of_published_checkpoints_are_read() {
    let special = |content: &str| {
        json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
            "special": true})
    };
    let bert = json!({
        "added_tokens_decoder": {"0": special("[PAD]"), "100": special("[UNK]")},
        "clean_up_tokenization_spaces": true, "cls_token": "[CLS]", "do_basic_tokenize": true, "do_lower_case": true,
        "mask_token": "[MASK]", "max_length": 128, "model_max_length": 512, "never_split": null,
        "pad_to_multiple_of": null, "pad_token": "[PAD]", "pad_token_type_id": 0, "padding_side": "right",
        "sep_token": "[SEP]", "stride": 0, "strip_accents": null, "tokenize_chinese_chars": true,
        "tokenizer_class": "BertTokenizer", "truncation_side": "right", "truncation_strategy": "longest_first",
        "unk_token": "[UNK]"
    });
    let old = json!({"do_lower_case": true, "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
        "cls_token": "[CLS]", "mask_token": "[MASK]", "tokenize_chinese_chars": true, "strip_accents": null,
        "name_or_path": "nreimers/MiniLM-L6-H384-uncased", "special_tokens_map_file": "special_tokens_map.json",
        "model_max_length": 512, "tokenizer_class": "BertTokenizer"});
    let xlm = json!({"bos_token": "<s>", "clean_up_tokenization_spaces": true, "cls_token": "<s>",
        "eos_token": "</s>", "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": true,
        "normalized": true, "rstrip": false, "single_word": false}, "model_max_length": 512, "pad_token": "<pad>",
        "sep_token": "</s>", "sp_model_kwargs": {}, "tokenizer_class": "XLMRobertaTokenizer", "unk_token": "<unk>"});
    let e5 = json!({"add_bos_token": true, "add_eos_token": true, "additional_special_tokens": [],
        "added_tokens_decoder": {"0": special("<unk>")}, "bos_token": "<s>",
        "clean_up_tokenization_spaces": false, "eos_token": "</s>", "legacy": true,
        "model_max_length": 1e30, "pad_token": "</s>", "sp_model_kwargs": {},
        "spaces_between_special_tokens": false, "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>",
        "use_default_system_prompt": true});
    let qwen3 = json!({"add_bos_token": false, "add_prefix_space": false,
        "added_tokens_decoder": {"151643": special("<|endoftext|>")}, "additional_special_tokens": ["<|im_start|>"],
        "bos_token": null, "chat_template": "{{ messages }}", "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 131_072, "pad_token": "<|endoftext|>",
        "split_special_tokens": false, "tokenizer_class": "Qwen2Tokenizer", "unk_token": null});
    let gte = with(
        &qwen3,
        json!({"add_eos_token": true, "auto_map": {"AutoTokenizer":
            ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]}}),
    );
    let gemma = json!({"add_bos_token": true, "add_eos_token": true, "added_tokens_decoder": {"0": special("<pad>")},
        "additional_special_tokens": ["<start_of_image>"], "boi_token": "<start_of_image>", "bos_token": "<bos>",
        "clean_up_tokenization_spaces": false, "eoi_token": "<end_of_image>", "eos_token": "<eos>",
        "extra_special_tokens": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>"}, "image_token": "<image_soft_token>", "mask_token": "<mask>",
        "model_max_length": 2048, "pad_token": "<pad>", "padding_side": "right", "sp_model_kwargs": null,
        "spaces_between_special_tokens": false, "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>",
        "use_default_system_prompt": false});
    let modern = json!({"added_tokens_decoder": {"50281": special("[CLS]")}, "clean_up_tokenization_spaces": true,
        "cls_token": "[CLS]", "extra_special_tokens": {}, "mask_token": "[MASK]",
        "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 8192, "pad_token": "[PAD]",
        "sep_token": "[SEP]", "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"});
    let mpnet = json!({"bos_token": "<s>", "do_lower_case": true, "eos_token": "</s>", "mask_token": "<mask>",
        "model_max_length": 512, "pad_token": "<pad>", "sep_token": "</s>", "strip_accents": null,
        "tokenize_chinese_chars": true, "tokenizer_class": "MPNetTokenizer", "unk_token": "[UNK]",
        "cls_token": "<s>"});
    for (family, raw) in [
        ("bert", bert.clone()),
        ("bert", old),
        ("nomic_bert", bert),
        ("xlm-roberta", xlm),
        ("mistral", e5),
        ("qwen3", qwen3),
        ("qwen2", gte),
        ("gemma3_text", gemma),
        ("modernbert", modern),
        ("mpnet", mpnet),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(TokenizerConfig::FILE), raw.to_string()).unwrap();
        if let Err(error) = TokenizerConfig::read(folder.path(), family, None) {
            panic!("{family}: {error}");
        }
    }
}
