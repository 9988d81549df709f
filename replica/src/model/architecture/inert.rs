//! Keys of `config.json` that are without effect on what is served, with the reason, group by group.
//!
//! The kinds of their values are those that transformers checks: it refuses a file in which one is of another kind.

use crate::model::fields::{Inert, Kind};

/// In every family.
pub(super) const COMMON: &[Inert] = &[
    // Where the file came from.
    Inert(Kind::OptionalText, &["_name_or_path", "name_or_path", "transformers_version", "_commit_hash"]),
    // The format that the weights were saved in, which their files say as well; computed is in the precision of the engine.
    Inert(Kind::OptionalDtype, &["torch_dtype", "dtype"]),
    // Dropout and starting points of training.
    Inert(Kind::Float, &["initializer_range"]),
    Inert(Kind::OptionalFlag, &["gradient_checkpointing"]),
    Inert(Kind::OptionalText, &["finetuning_task"]),
    // Generating texts.
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
    // What else the library returns beside what is asked of it.
    Inert(Kind::OptionalFlag, &["output_hidden_states", "torchscript"]),
    Inert(Kind::Off, &["output_attentions"]),
    // The layer that guesses words has the weights of the table of words or its own; decoders look this up.
    Inert(Kind::Flag, &["tie_word_embeddings"]),
    // Names of labels by id are read; the other way round they say the same.
    Inert(Kind::OptionalObject, &["label2id"]),
    // Other structures, which are the model's own only if these are set.
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
    // The tokenizer's class is looked up with the tokenizer, and its files say what it does.
    Inert(Kind::OptionalText, &["tokenizer_class"]),
];

/// BERT and its nearest, beside [`COMMON`].
const BERT: &[Inert] = &[
    Inert(Kind::Share, &["hidden_dropout_prob", "attention_probs_dropout_prob"]),
    Inert(Kind::OptionalShare, &["classifier_dropout"]),
    // Written by the first converters from TensorFlow, and read by nothing since.
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

/// JinaBERT, beside [`BERT`]: how its own code computes the same, and how its own `encode` pools, which
/// sentence-transformers leaves to its stages.
const JINA: &[Inert] = &[
    Inert(Kind::OptionalText, &["attn_implementation", "emb_pooler"]),
    Inert(Kind::OptionalWhole, &["model_max_length"]),
];

const DISTILBERT: &[Inert] = &[
    Inert(Kind::Share, &["dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"]),
    // Positions are read from the weights, however they came to be.
    Inert(Kind::Flag, &["sinusoidal_pos_embds"]),
    Inert(Kind::Any, &["tie_weights_", "output_past"]),
];

const MODERNBERT: &[Inert] = &[
    Inert(Kind::Share, &["attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"]),
    Inert(Kind::Float, &["initializer_cutoff_factor"]),
    // What a head does, of a model without one.
    Inert(Kind::OneOf(&["cls", "mean"]), &["classifier_pooling"]),
    Inert(Kind::Flag, &["classifier_bias"]),
    Inert(Kind::Text, &["classifier_activation"]),
    // The layer that guesses masked words.
    Inert(Kind::Flag, &["decoder_bias", "sparse_prediction"]),
    Inert(Kind::Whole, &["sparse_pred_ignore_index"]),
    // How the same is computed on a GPU.
    Inert(Kind::Flag, &["deterministic_flash_attn"]),
    Inert(Kind::OptionalFlag, &["reference_compile", "repad_logits_with_grad"]),
    // Of BERT's, which ModernBERT's code does not read: its epsilon is `norm_eps`, its positions are rotary.
    Inert(Kind::Any, &["layer_norm_eps", "position_embedding_type"]),
];

/// Of NomicBERT's own code, which descends from GPT-2's, and of transformers'.
const NOMIC: &[Inert] = &[
    Inert(
        Kind::OptionalShare,
        &["attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "classifier_dropout"],
    ),
    Inert(Kind::Share, &["hidden_dropout_prob", "attention_probs_dropout_prob"]),
    // GPT-2's way of classifying, which nothing here does.
    Inert(Kind::Any, &["summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"]),
    // How the same is computed on a GPU.
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
    // A structure that is refused if it is set has a norm that is shared or not.
    Inert(Kind::Off, &["parallel_block_tied_norm"]),
];

const DECODER: &[Inert] = &[Inert(Kind::Share, &["attention_dropout"])];

/// Slices of a matrix product, which are computed one after the other and come to the same.
const LLAMA: &[Inert] = &[Inert(Kind::OptionalWhole, &["pretraining_tp"])];

/// The pattern that `layer_types` was made by.
const GEMMA3: &[Inert] = &[Inert(Kind::OptionalWhole, &["_sliding_window_pattern"])];

/// The groups of a family.
pub(super) fn of(family: &str, is_jina: bool) -> Vec<&'static [Inert]> {
    let own: &[&'static [Inert]] = match family {
        "bert" if is_jina => &[BERT, JINA],
        "bert" | "roberta" | "xlm-roberta" | "camembert" | "mpnet" => &[BERT],
        "distilbert" => &[DISTILBERT],
        "modernbert" => &[MODERNBERT],
        "nomic_bert" => &[NOMIC],
        "llama" => &[DECODER, LLAMA],
        "gemma3_text" => &[DECODER, GEMMA3],
        _ => &[DECODER],
    };
    [&[COMMON][..], own].concat()
}
