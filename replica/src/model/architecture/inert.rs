//! Keys of `config.json` without effect on the results, with the reason for each group.
//!
//! The types of their values are those that transformers accepts: it rejects a file with other types.

use crate::model::fields::{Inert, Kind};

/// Keys of all families.
pub(super) const COMMON: &[Inert] = &[
    // Origin of the file.
    Inert(Kind::OptionalText, &["_name_or_path", "name_or_path", "transformers_version", "_commit_hash"]),
    // Format in which the weights were saved, which the weight files contain as well; the engine computes in its own
    // precision.
    Inert(Kind::OptionalDtype, &["torch_dtype", "dtype"]),
    // Dropout and initialization for training.
    Inert(Kind::Float, &["initializer_range"]),
    Inert(Kind::OptionalFlag, &["gradient_checkpointing"]),
    Inert(Kind::OptionalText, &["finetuning_task"]),
    // Text generation.
    Inert(Kind::Flag, &["use_cache"]),
    Inert(
        Kind::Any,
        &[
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "num_return_sequences",
            "output_scores",
            "return_dict_in_generate",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "remove_invalid_values",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "task_specific_params",
            "prefix",
        ],
    ),
    Inert(
        Kind::OptionalTokens,
        &["bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id"],
    ),
    // Additional outputs of the library.
    Inert(Kind::OptionalFlag, &["output_hidden_states", "torchscript"]),
    Inert(Kind::Off, &["output_attentions"]),
    // Whether the language-model head shares the word embeddings; decoders read this key.
    Inert(Kind::Flag, &["tie_word_embeddings"]),
    // Labels are read from `id2label`; this is the inverse mapping.
    Inert(Kind::OptionalObject, &["label2id"]),
    // Other structures, which are enabled only if these are set.
    Inert(
        Kind::Off,
        &[
            "is_encoder_decoder",
            "chunk_size_feed_forward",
            "pruned_heads",
            "tie_encoder_decoder",
            "cross_attention_hidden_size",
            "adapters",
            "tf_legacy_loss",
            "use_bfloat16",
        ],
    ),
    // The tokenizer's class is read with the tokenizer's files.
    Inert(Kind::OptionalText, &["tokenizer_class"]),
];

/// Keys of BERT and similar families, in addition to [`COMMON`].
const BERT: &[Inert] = &[
    Inert(Kind::Share, &["hidden_dropout_prob", "attention_probs_dropout_prob"]),
    Inert(Kind::OptionalShare, &["classifier_dropout"]),
    // Written by the first converters from TensorFlow, and never read since.
    Inert(
        Kind::Any,
        &[
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
            "output_past",
            "language",
        ],
    ),
];

/// Keys of JinaBERT, in addition to [`BERT`]: implementation of attention, and the pooling of its own `encode`, for
/// which sentence-transformers has its modules.
const JINA: &[Inert] = &[
    Inert(Kind::OptionalText, &["attn_implementation", "emb_pooler"]),
    Inert(Kind::OptionalWhole, &["model_max_length"]),
];

/// Keys of ELECTRA, in addition to [`BERT`]: the summary of a sequence in its multiple-choice class.
const ELECTRA: &[Inert] = &[
    Inert(Kind::Text, &["summary_activation", "summary_type"]),
    Inert(Kind::Share, &["summary_last_dropout"]),
    Inert(Kind::Flag, &["summary_use_proj"]),
];

const DISTILBERT: &[Inert] = &[
    Inert(Kind::Share, &["dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"]),
    // Positions are read from the weights.
    Inert(Kind::Flag, &["sinusoidal_pos_embds"]),
    Inert(Kind::Any, &["tie_weights_", "output_past"]),
];

const MODERNBERT: &[Inert] = &[
    Inert(Kind::Share, &["attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"]),
    Inert(Kind::Float, &["initializer_cutoff_factor"]),
    // Settings of the classification head, for a model without one.
    Inert(Kind::OneOf(&["cls", "mean"]), &["classifier_pooling"]),
    Inert(Kind::Flag, &["classifier_bias"]),
    Inert(Kind::Text, &["classifier_activation"]),
    // Masked-language-model head.
    Inert(Kind::Flag, &["decoder_bias", "sparse_prediction"]),
    Inert(Kind::Whole, &["sparse_pred_ignore_index"]),
    // Implementation on GPUs.
    Inert(Kind::Flag, &["deterministic_flash_attn"]),
    Inert(Kind::OptionalFlag, &["reference_compile", "repad_logits_with_grad"]),
    // Keys of BERT that ModernBERT's code ignores: its epsilon is `norm_eps`, its positions are rotary.
    Inert(Kind::Any, &["layer_norm_eps", "position_embedding_type"]),
];

/// Keys of NomicBERT's own code, which descends from GPT-2's, and of transformers.
const NOMIC: &[Inert] = &[
    Inert(
        Kind::OptionalShare,
        &["attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "classifier_dropout"],
    ),
    Inert(Kind::Share, &["hidden_dropout_prob", "attention_probs_dropout_prob"]),
    // Classification of GPT-2, which is unused.
    Inert(Kind::Any, &["summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"]),
    // Implementation on GPUs.
    Inert(
        Kind::Any,
        &[
            "dense_seq_output",
            "fused_bias_fc",
            "fused_dropout_add_ln",
            "use_flash_attn",
            "use_xentropy",
            "reorder_and_upcast_attn",
            "pad_vocab_size_multiple",
            "max_trained_positions",
        ],
    ),
    // Option of a structure that is rejected if enabled.
    Inert(Kind::Off, &["parallel_block_tied_norm"]),
];

const DECODER: &[Inert] = &[Inert(Kind::Share, &["attention_dropout"])];

/// Splitting of a matrix product into slices, which does not change its result.
const LLAMA: &[Inert] = &[Inert(Kind::OptionalWhole, &["pretraining_tp"])];

/// Pattern from which `layer_types` was made.
const GEMMA3: &[Inert] = &[Inert(Kind::OptionalWhole, &["_sliding_window_pattern"])];

/// Returns the groups of keys for a family.
pub(super) fn of(family: &str, is_jina: bool) -> Vec<&'static [Inert]> {
    let own: &[&'static [Inert]] = match family {
        "bert" if is_jina => &[BERT, JINA],
        "bert" | "roberta" | "xlm-roberta" | "camembert" | "mpnet" => &[BERT],
        "electra" => &[BERT, ELECTRA],
        "distilbert" => &[DISTILBERT],
        "modernbert" => &[MODERNBERT],
        "nomic_bert" => &[NOMIC],
        "llama" => &[DECODER, LLAMA],
        "gemma3_text" => &[DECODER, GEMMA3],
        _ => &[DECODER],
    };
    [&[COMMON][..], own].concat()
}
