//! Tests of supported and rejected configurations.

use serde_json::json;

use super::*;

/// Reads a configuration of the family with these keys added or replaced; null removes a key.
fn read(family: &str, change: Value) -> Result<Architecture, String> {
    let mut raw = match family {
        "distilbert" => json!({
            "vocab_size": 100, "max_position_embeddings": 32, "dim": 64, "n_layers": 6, "n_heads": 4, "hidden_dim": 128
        }),
        _ => json!({
            "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
            "intermediate_size": 128, "max_position_embeddings": 32
        }),
    };
    let keys = raw.as_object_mut().unwrap();
    keys.insert("model_type".to_owned(), family.into());
    if family == "electra" {
        keys.insert("embedding_size".to_owned(), 64.into());
    }
    if ["bert", "roberta", "xlm-roberta", "camembert", "nomic_bert", "electra"].contains(&family) {
        keys.insert("type_vocab_size".to_owned(), 2.into());
    }
    if ["mistral", "gemma2", "gemma3_text"].contains(&family) {
        keys.insert("num_key_value_heads".to_owned(), 2.into());
    }
    if family == "modernbert" {
        keys.insert("pad_token_id".to_owned(), 0.into());
    }
    keys.extend(change.as_object().unwrap().clone());
    Architecture::parse(keys).map_err(|problems| problems.join("; "))
}

/// Returns the class name of the family's classifier.
fn classifier(family: &str) -> String {
    let name = match family {
        "bert" => "Bert",
        "roberta" => "Roberta",
        "xlm-roberta" => "XLMRoberta",
        "distilbert" => "DistilBert",
        "mpnet" => "MPNet",
        "electra" => "Electra",
        "modernbert" => "ModernBert",
        "qwen3" => "Qwen3",
        other => panic!("{other}"),
    };
    format!("{name}ForSequenceClassification")
}

fn reaches(architecture: &Architecture) -> Vec<Reach> {
    architecture.layers.iter().map(|layer| layer.reach).collect()
}

const fn back(tokens: usize) -> Reach {
    Reach { before: tokens, behind: 0 }
}

#[test]
fn families_are_read_and_differ_from_each_other() {
    let read: Vec<Architecture> =
        FAMILIES.iter().map(|(family, _)| read(family, json!({})).unwrap()).collect();
    for (index, one) in read.iter().enumerate() {
        for other in &read[..index] {
            let renamed = Architecture { family: other.family.clone(), ..one.clone() };
            let alike = ["roberta", "xlm-roberta", "camembert"];
            let may_be = alike.contains(&&*one.family) && alike.contains(&&*other.family);
            assert_eq!(renamed == *other, may_be, "{} and {}", one.family, other.family);
        }
    }
}

#[test]
fn the_architecture_of_minilm_is_correct() {
    let sizes = json!({"vocab_size": 30_522, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536});
    let minilm = read("bert", sizes).unwrap();
    // 21.3 MFLOP per token, and 9.2 kFLOP times the length for attention.
    assert_eq!((minilm.product_flops() / 1e5).round(), 212.0);
    assert_eq!((minilm.attention_flops(1), minilm.attention_flops(128)), (9216.0, 9216.0 * 128.0));
}

#[test]
fn causal_attention_costs_half_and_a_window_less() {
    let causal = read("llama", json!({})).unwrap();
    let window = read("mistral", json!({"num_key_value_heads": 4, "sliding_window": 2})).unwrap();
    assert_eq!(causal.attention_flops(31) * 2.0, causal.attention_flops(63));
    assert_eq!(causal.attention_flops(1), window.attention_flops(1));
    // The first token attends to one token, all others to two.
    assert_eq!(window.attention_flops(4), window.attention_flops(1) * 7.0 / 4.0);
}

#[test]
fn positions_of_roberta_begin_after_padding() {
    let roberta = read("roberta", json!({"pad_token_id": 3})).unwrap();
    assert_eq!(roberta.positions, 28);
    let learnt = LearntPositions { rows: 32, padding: Some(3) };
    assert_eq!(roberta.embedding.positions, Some(learnt));
    let mpnet = read("mpnet", json!({"pad_token_id": 3})).unwrap();
    assert_eq!(mpnet.positions, 30, "padding is 1 in its code");
    let error = read("roberta", json!({"pad_token_id": 31})).unwrap_err();
    assert!(error.contains("`max_position_embeddings` = 32 leaves no position"), "{error}");
}

#[test]
fn an_electra_with_projected_embeddings_is_rejected() {
    for given in [json!({"embedding_size": 32}), json!({"embedding_size": null})] {
        let error = read("electra", given).unwrap_err();
        assert!(error.contains("`embedding_size`") && error.contains("`hidden_size` = 64"), "{error}");
    }
    let class = json!({"architectures": [classifier("electra")]});
    let head = read("electra", class).unwrap().head.unwrap();
    assert_eq!(head[0].activation, Some(Activation::Gelu));
}

#[test]
fn windows_follow_the_convention_of_the_family() {
    let local = Reach::around(64);
    assert_eq!(
        reaches(&read("modernbert", json!({})).unwrap()),
        [Reach::ALL, local, local, Reach::ALL, local, local]
    );
    let kinds = json!([
        "full_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
        "full_attention",
        "full_attention"
    ]);
    let modernbert = read("modernbert", json!({"layer_types": kinds, "local_attention": 10})).unwrap();
    assert_eq!(reaches(&modernbert)[..3], [Reach::ALL, Reach::around(5), Reach::ALL]);
    assert_eq!(modernbert.layers[1].rope, Some(1));

    let kv = |mut more: Value| {
        more.as_object_mut().unwrap().insert("num_key_value_heads".to_owned(), json!(2));
        more
    };
    assert_eq!(reaches(&read("mistral", kv(json!({"sliding_window": null}))).unwrap())[0], Reach::CAUSAL);
    assert_eq!(reaches(&read("mistral", kv(json!({}))).unwrap())[0], back(4095));
    let both = read("mistral", kv(json!({"sliding_window": 7, "is_causal": false}))).unwrap();
    assert_eq!(reaches(&both)[0], Reach::around(7));

    let qwen = json!({"use_sliding_window": true, "max_window_layers": 4, "sliding_window": 8});
    assert_eq!(reaches(&read("qwen2", kv(qwen)).unwrap())[3..5], [Reach::CAUSAL, back(7)]);
    assert_eq!(reaches(&read("qwen2", kv(json!({"sliding_window": 8}))).unwrap())[5], Reach::CAUSAL);
    assert_eq!(
        reaches(&read("gemma2", kv(json!({"sliding_window": 8}))).unwrap())[..2],
        [back(7), Reach::CAUSAL]
    );
    let gemma3 = read("gemma3_text", kv(json!({"sliding_window": 8, "use_bidirectional_attention": true})));
    assert_eq!(reaches(&gemma3.unwrap())[4..], [Reach::around(4), Reach::ALL]);
}

#[test]
fn the_window_is_limited_by_the_text() {
    assert_eq!(Reach::ALL.of(3..5, 9), 0..9);
    assert_eq!(Reach::CAUSAL.of(3..5, 9), 0..5);
    assert_eq!(Reach::around(2).of(3..5, 9), 1..7);
    assert_eq!(back(3).of(0..1, 9), 0..1);
    assert_eq!(Reach::around(2).of(7..9, 9), 5..9);
}

#[test]
fn head_width_and_key_value_heads_are_independent_of_the_hidden_size() {
    let qwen = read("qwen3", json!({"num_key_value_heads": 1})).unwrap();
    assert_eq!((qwen.query_width(), qwen.key_value_width()), (4 * 128, 128));
    assert!(qwen.attention.query_key_norm && !qwen.attention.projection_bias);
    let qwen = read("qwen2", json!({})).unwrap();
    assert_eq!((qwen.attention.head_width, qwen.attention.key_value_heads), (16, 4));
    assert!(qwen.attention.projection_bias && !qwen.attention.output_bias);
    let gemma =
        read("gemma2", json!({"num_key_value_heads": 2, "head_dim": 20, "query_pre_attn_scalar": 25}))
            .unwrap();
    assert_eq!(
        (gemma.attention.scale, gemma.embedding.scale, gemma.attention.softcap),
        (0.2, 8.0, Some(50.0))
    );
}

#[test]
fn rotary_positions_are_read_in_both_forms() {
    let rates = |change: Value| read("llama", change).map(|llama| llama.ropes[0].rates.clone());
    let plain = rates(json!({})).unwrap();
    assert_eq!((plain.len(), plain[0]), (8, 1.0));
    assert!((f64::from(plain[4]) - 0.01).abs() < 1e-9);
    let old = rates(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})).unwrap();
    let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}});
    assert_eq!(old, rates(new).unwrap());
    assert_eq!(old[0], 0.25);

    // Fast rotations are kept, slow ones divided by the factor.
    let llama3 = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
    let stretched = rates(llama3).unwrap();
    assert_eq!((stretched[0], stretched[7]), (plain[0], plain[7] / 8.0));
    let yarn =
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}});
    let yarn = read("llama", yarn).unwrap().ropes.remove(0);
    assert_eq!((yarn.rates[0], yarn.rates[7]), (plain[0], plain[7] / 4.0));
    assert!((yarn.magnitude - 1.138_629_4).abs() < 1e-6);
}

#[test]
fn classification_heads_belong_to_the_family() {
    let steps = |family: &str, more: Value| {
        let mut change = json!({"architectures": [classifier(family)],
            "id2label": {"0": "a", "1": "b", "2": "c"}});
        change.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let read = read(family, change).unwrap();
        assert_eq!(read.width(), 3, "{family}");
        let name = |step: &HeadStep| match step.source {
            HeadSource::Named(name) | HeadSource::Prefixed(name) => name,
            HeadSource::YesNo(..) => "words",
        };
        let names: Vec<&str> = read.head.unwrap().iter().map(name).collect();
        (read.head_pooling, names.join(" "))
    };
    for (family, names) in [
        ("bert", "pooler.dense classifier"),
        ("xlm-roberta", "classifier.dense classifier.out_proj"),
        ("distilbert", "pre_classifier classifier"),
        ("mpnet", "classifier.dense classifier.out_proj"),
        ("electra", "classifier.dense classifier.out_proj"),
        ("modernbert", "head.dense classifier"),
    ] {
        assert_eq!(steps(family, json!({})), (HeadPooling::First, names.to_owned()), "{family}");
    }
    assert_eq!(steps("modernbert", json!({"classifier_pooling": "mean"})).0, HeadPooling::Mean);
    let last = (HeadPooling::Last { padding: Some(9) }, "score".to_owned());
    assert_eq!(steps("qwen3", json!({"pad_token_id": 9})), last);
    assert_eq!(read("bert", json!({"architectures": ["BertModel"]})).unwrap().head, None);
}

#[test]
fn a_decoder_can_be_an_llm_reranker() {
    let words = YesNo { yes: 7, no: Some(9) };
    let judge = |family: &str, change: Value| {
        let mut read = read(family, change).unwrap();
        read.set_yes_no_head(words).map(|()| read)
    };
    let heads = json!({"pad_token_id": 9, "id2label": {"0": "a", "1": "b"}});
    let with = |more: Value| {
        let mut heads = heads.clone();
        heads.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        heads
    };
    for (family, more, tied) in [
        ("llama", json!({}), false),
        ("mistral", json!({"tie_word_embeddings": true}), true),
        ("qwen2", json!({"tie_word_embeddings": false}), false),
        ("qwen3", json!({"tie_word_embeddings": true}), true),
        ("gemma2", json!({"final_logit_softcapping": null}), true),
        ("gemma3_text", json!({}), true),
        ("gemma3_text", json!({"tie_word_embeddings": false, "final_logit_softcapping": null}), false),
    ] {
        let read = judge(family, with(more)).unwrap();
        let source = HeadSource::YesNo(words, Logits { tied, softcap: None });
        let step = HeadStep { source, outputs: 1, bias: false, activation: None, norm: None };
        assert_eq!((read.width(), read.head), (1, Some(vec![step])), "{family}");
        // Padding at the end of a rendered template is an ordinary token.
        assert_eq!(read.head_pooling, HeadPooling::Last { padding: None });
    }
    for (family, change, sentence) in [
        ("gemma2", with(json!({})), "`final_logit_softcapping` = 30 is not supported for a reranker"),
        ("gemma3_text", with(json!({"final_logit_softcapping": 20.0})), "`final_logit_softcapping` = 20"),
        ("roberta", json!({"pad_token_id": 1}), "an LLM reranker of the family roberta is not supported"),
    ] {
        let error = judge(family, change).unwrap_err();
        assert!(error.contains(sentence), "{family}: {error}");
    }
}

#[test]
fn the_original_keys_of_nomic_equal_those_of_transformers() {
    let own = json!({
        "model_type": "nomic_bert", "vocab_size": 100, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_inner": 128,
        "n_positions": 32, "type_vocab_size": 2, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "activation_function": "swiglu", "prenorm": false, "causal": false,
        "rotary_scaling_factor": null, "qkv_proj_bias": false, "mlp_fc1_bias": false, "mlp_fc2_bias": false,
        "parallel_block": false, "rotary_emb_interleaved": false, "use_rms_norm": false
    });
    let own = Architecture::parse(own.as_object().unwrap()).unwrap();
    let expected = read("nomic_bert", json!({})).unwrap();
    assert_eq!(own.keys.layers, "n_layer");
    assert_eq!(Architecture { keys: expected.keys, ..own }, expected);
}

#[test]
fn unsupported_values_are_rejected_by_key() {
    for (family, change, sentence) in [
        ("bert", json!({"hidden_act": "mish"}), "`hidden_act` = mish is not supported"),
        ("bert", json!({"position_embedding_type": "relative_key"}), "relative_key is not supported"),
        ("roberta", json!({"position_embedding_type": "relative_key"}), "relative_key is not supported"),
        ("bert", json!({"is_decoder": true}), "`is_decoder` = true is not supported"),
        ("bert", json!({"layer_norm_eps": -1}), "`layer_norm_eps` = -1 is not between 0 and 1"),
        ("bert", json!({"num_attention_heads": 5}), "`hidden_size` = 64 cannot be divided"),
        ("bert", json!({"hidden_size": 0}), "`hidden_size` = 0 is not between 1 and 1048576"),
        ("bert", json!({"hidden_size": 1_048_577}), "`hidden_size` = 1048577 is not between 1 and 1048576"),
        (
            "bert",
            json!({"position_embedding_type": "alibi"}),
            "`feed_forward_type` = absent is not supported",
        ),
        ("mpnet", json!({"relative_attention_num_buckets": 64}), "`relative_attention_num_buckets` = 64"),
        ("nomic_bert", json!({"prenorm": true}), "`prenorm` = true is not supported"),
        ("nomic_bert", json!({"rotary_emb_fraction": 0.5}), "`rotary_emb_fraction` = 0.5 is not supported"),
        ("nomic_bert", json!({"num_experts": 8}), "a mixture of experts is not supported"),
        ("bert", json!({"made_up": 1}), "`made_up` = 1 is not understood"),
        ("bert", json!({"hidden_act": null}), "`hidden_act` is null"),
        (
            "bert",
            json!({"hidden_dropout_prob": 1.5}),
            "`hidden_dropout_prob` = 1.5 is not a number from 0 to 1",
        ),
        ("bert", json!({"pad_token_id": 100}), "`pad_token_id` = 100 is not a token of this model"),
        (
            "bert",
            json!({"chunk_size_feed_forward": 2}),
            "`chunk_size_feed_forward` = 2 is not absent or disabled",
        ),
        (
            "bert",
            json!({"architectures": ["BertForTokenClassification"]}),
            "`architectures` = \"BertForTokenClassification\" is not supported for `model_type` = bert",
        ),
        ("bert", json!({"architectures": ["BertModel", "BertModel"]}), "is not a list of one class"),
        (
            "bert",
            json!({"architectures": ["JinaBertModel"]}),
            "`position_embedding_type` of a JinaBert must be alibi",
        ),
        ("qwen3", json!({"architectures": ["JinaForRanking"]}), "`architectures` = \"JinaForRanking\""),
        (
            "bert",
            json!({"auto_map": {"AutoModel": "modeling.Projected"}}),
            "`auto_map` has `AutoModel` = \"modeling.Projected\"",
        ),
        ("qwen2", json!({"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}), "`is_causal` is absent"),
        (
            "llama",
            json!({"use_bidirectional_attention": true}),
            "`use_bidirectional_attention` = true is not supported",
        ),
        ("mistral", json!({"use_bidirectional_attention": true}), "write `is_causal` = false instead"),
        ("qwen2", json!({"use_bidirectional_attention": true}), "write `is_causal` = false instead"),
        ("qwen3", json!({"use_bidirectional_attention": true}), "write `is_causal` = false instead"),
        ("llama", json!({"quantization_config": {"bits": 4}}), "`quantization_config` = {\"bits\":4}"),
        ("llama", json!({"num_key_value_heads": 3}), "cannot be divided by `num_key_value_heads` = 3"),
        (
            "llama",
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "`rope_type` (or `type`) = dynamic is not supported",
        ),
        ("llama", json!({"rope_scaling": {"type": "linear"}}), "`rope_scaling`: `factor` is missing"),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}),
            "`mscale` = 1.0 is not understood with `rope_type` (or `type`) = yarn",
        ),
        (
            "llama",
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "`partial_rotary_factor` = 0.5",
        ),
        ("llama", json!({"head_dim": 15}), "a head width of 15 is odd"),
        (
            "qwen2",
            json!({"layer_types": ["full_attention"]}),
            "`layer_types` lists 1 layers, but the model has 6",
        ),
        (
            "qwen3",
            json!({"layer_types": ["a", "b", "c", "d", "e", "f"]}),
            "`layer_types` has \"a\"; supported are full_attention and sliding_attention",
        ),
        (
            "gemma2",
            json!({"use_bidirectional_attention": true}),
            "`use_bidirectional_attention` = true is not supported",
        ),
        (
            "gemma3_text",
            json!({"attn_logit_softcapping": 50.0}),
            "`attn_logit_softcapping` = 50.0 is not supported",
        ),
        ("t5", json!({}), "`model_type` is t5; supported are bert, roberta"),
    ] {
        let error = read(family, change.clone()).unwrap_err();
        assert!(error.contains(sentence), "{family} {change}: {error}");
    }
}

#[test]
fn all_problems_are_reported_together() {
    let raw = json!({"model_type": "bert", "hidden_size": 0, "num_hidden_layers": 2});
    let problems = Architecture::parse(raw.as_object().unwrap()).unwrap_err();
    for expected in ["`hidden_size` = 0", "`num_attention_heads` is missing", "`vocab_size` is missing"] {
        assert!(problems.iter().any(|problem| problem.starts_with(expected)), "{expected}: {problems:?}");
    }
}
