use super::*;
use std::fs;

const POOLING: &str = "1_Pooling/config.json";

/// Returns a modules.json with these classes, each in its folder, with the class names from before version 6.
fn modules_json(classes: &[&str]) -> String {
    let entry = |(idx, class): (usize, &&str)| {
        let path = if idx == 0 { String::new() } else { format!("{idx}_{class}") };
        let module = if *class == "LogitScore" { "cross_encoder.modules" } else { "models" };
        format!(
            r#"{{"idx": {idx}, "name": "{idx}", "path": "{path}", "type": "sentence_transformers.{module}.{class}"}}"#
        )
    };
    let entries: Vec<String> = classes.iter().enumerate().map(entry).collect();
    format!("[{}]", entries.join(", "))
}

/// Reads the modules of a folder with these files around a transformer with hidden size 64 and 512 positions.
fn check_as(files: &[(&str, &str)], classifies: bool) -> Result<SentenceConfig, String> {
    let folder = tempfile::tempdir().unwrap();
    let bare = [("config.json", r#"{"architectures": ["BertModel"]}"#)];
    for (path, text) in bare.iter().chain(files) {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let purpose = if classifies { TransformerTask::LabelLogits } else { TransformerTask::HiddenStates };
    let sizes = TransformerSizes { hidden: 64, positions: 512, rows: 512, key: "max_position_embeddings" };
    let tokenizer = TokenizerConfig::read(folder.path(), "bert", None).map_err(|error| error.to_string())?;
    ModuleList::read(folder.path())
        .and_then(|modules| modules.config(folder.path(), sizes, purpose, &tokenizer))
        .map_err(|error| error.to_string())
}

fn check(files: &[(&str, &str)]) -> Result<SentenceConfig, String> {
    check_as(files, false)
}

/// Returns the values to compare.
fn settings(config: SentenceConfig) -> (usize, bool, Pooling, bool, bool) {
    let SentenceConfig { max_tokens, lower_case, pooling, include_prompt, dense, normalize, truncate } =
        config;
    assert_eq!(truncate, None);
    assert!(dense.is_empty());
    (max_tokens, lower_case, pooling, include_prompt, normalize)
}

#[test]
fn files_of_old_and_new_versions_are_equivalent() {
    let modules = modules_json(&["Transformer", "Pooling", "Normalize"]);
    let old = check(&[
        ("modules.json", &modules),
        (POOLING, r#"{"word_embedding_dimension": 64, "pooling_mode_cls_token": true}"#),
        ("sentence_bert_config.json", r#"{"max_seq_length": 256, "do_lower_case": true}"#),
    ]);
    let older = check(&[
        ("modules.json", &modules),
        (
            POOLING,
            r#"{"word_embedding_dimension": 64, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#,
        ),
        ("sentence_xlm-roberta_config.json", r#"{"max_seq_length": 256, "do_lower_case": true}"#),
    ]);
    let new = check(&[
        ("modules.json", &modules.replace("models.Transformer", "base.modules.transformer.Transformer")),
        (POOLING, r#"{"embedding_dimension": 64, "pooling_mode": "cls", "include_prompt": true}"#),
        ("2_Normalize/config.json", r#"{"module_input_name": "sentence_embedding"}"#),
        ("sentence_bert_config.json", r#"{"transformer_task": "feature-extraction", "do_lower_case": true}"#),
        ("tokenizer_config.json", r#"{"model_max_length": 256}"#),
    ]);
    for found in [old, older, new] {
        assert_eq!(settings(found.unwrap()), (256, true, Pooling::Cls, true, true));
    }
}

#[test]
fn a_model_without_modules_is_pooled_by_its_class_and_limited_by_its_positions() {
    let bare = |pooling| (512, false, pooling, true, false);
    let unlimited = ("tokenizer_config.json", r#"{"model_max_length": 1000000000000000019884624838656}"#);
    assert_eq!(settings(check(&[]).unwrap()), bare(Pooling::Mean));
    assert_eq!(settings(check(&[unlimited]).unwrap()), bare(Pooling::Mean));
    for (config, pooling) in [
        (r#"{"architectures": ["MistralForCausalLM"]}"#, Pooling::LastToken),
        (r#"{"architectures": ["MistralForCausalLM"], "is_causal": false}"#, Pooling::Mean),
        (r#"{"architectures": ["MistralModel"]}"#, Pooling::Mean),
    ] {
        assert_eq!(settings(check(&[("config.json", config)]).unwrap()), bare(pooling), "{config}");
    }
}

#[test]
fn the_module_after_the_transformer_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let trailing = || ModuleList::read(folder.path()).unwrap().trailing(folder.path());
    assert_eq!(trailing(), TrailingModule::Unlisted);
    for (classes, expected) in [
        (&["Transformer"][..], TrailingModule::Other),
        (&["Transformer", "Pooling", "Normalize"], TrailingModule::Pooling),
        (&["Transformer", "LogitScore"], TrailingModule::LogitScore(folder.path().join("1_LogitScore"))),
    ] {
        fs::write(folder.path().join("modules.json"), modules_json(classes)).unwrap();
        assert_eq!(trailing(), expected, "{classes:?}");
    }
}

/// Returns the configuration and the weights of a dense layer, as text.
fn dense(inputs: usize, outputs: usize) -> (String, String) {
    let bytes = 4 * inputs * outputs;
    let header = format!(
        r#"{{"linear.weight": {{"dtype": "F32", "shape": [{outputs}, {inputs}], "data_offsets": [0, {bytes}]}}}}"#
    );
    // The length has eight bytes, of which only the lowest is not zero, so that the file is valid text.
    assert!(header.len() < 128);
    let length = char::from(header.len() as u8);
    let weights = format!("{length}{}{header}{}", "\0".repeat(7), "\0".repeat(bytes));
    let config = format!(
        r#"{{"in_features": {inputs}, "out_features": {outputs}, "bias": false,
        "activation_function": "torch.nn.modules.linear.Identity"}}"#
    );
    (config, weights)
}

#[test]
fn dense_layers_are_chained_and_their_sizes_must_match() {
    let modules = modules_json(&["Transformer", "Pooling", "Dense", "Dropout", "Dense", "Normalize"]);
    let (wide, wide_weights) = dense(64, 96);
    let check_second = |inputs| {
        let (narrow, narrow_weights) = dense(inputs, 32);
        check(&[
            ("modules.json", &modules),
            (POOLING, r#"{"embedding_dimension": 64}"#),
            ("2_Dense/config.json", &wide),
            ("2_Dense/model.safetensors", &wide_weights),
            ("4_Dense/config.json", &narrow),
            ("4_Dense/model.safetensors", &narrow_weights),
        ])
    };
    let config = check_second(96).unwrap();
    let sizes: Vec<(usize, usize)> = config.dense.iter().map(|dense| (dense.inputs, dense.outputs)).collect();
    assert_eq!((sizes, config.width(64), config.normalize), (vec![(64, 96), (96, 32)], 32, true));
    let error = check_second(64).unwrap_err();
    assert!(error.contains("4_Dense/config.json: `in_features` = 64, but the module before it"), "{error}");
}

#[test]
fn a_cross_encoder_has_no_module_after_the_transformer() {
    let alone = modules_json(&["Transformer"]);
    let pooled = modules_json(&["Transformer", "Pooling"]);
    let task = ("sentence_bert_config.json", r#"{"transformer_task": "sequence-classification"}"#);
    check_as(&[("modules.json", &alone), task], true).unwrap();
    check_as(&[], true).unwrap();
    let error =
        check_as(&[("modules.json", &pooled), task, (POOLING, r#"{"embedding_dimension": 64}"#)], true)
            .unwrap_err();
    assert!(error.contains("the modules Transformer, Pooling are not supported"), "{error}");
    let scored = modules_json(&["Transformer", "LogitScore"]);
    check_as(&[("modules.json", &scored), task], true).unwrap();
    for classes in [&["Transformer", "LogitScore", "Dense"][..], &["LogitScore", "Transformer"]] {
        let error = check_as(&[("modules.json", &modules_json(classes)), task], true).unwrap_err();
        assert!(error.contains("Transformer alone or with LogitScore"), "{error}");
    }
    let error = check(&[("modules.json", &alone)]).unwrap_err();
    assert!(error.contains("the modules Transformer are not supported"), "{error}");
}

#[test]
fn unsupported_modules_are_rejected_by_name() {
    let normal = modules_json(&["Transformer", "Pooling", "Normalize"]);
    for (files, sentence) in [
        (
            vec![
                ("modules.json", modules_json(&["Transformer", "Pooling", "LSTM"])),
                (POOLING, r#"{"embedding_dimension": 64}"#.to_owned()),
            ],
            "`type` = sentence_transformers.models.LSTM is not supported",
        ),
        (
            vec![
                ("modules.json", modules_json(&["Transformer", "Pooling", "Normalize", "Dense"])),
                (POOLING, r#"{"embedding_dimension": 64}"#.to_owned()),
            ],
            "Transformer, Pooling, Normalize, Dense are not supported",
        ),
        (
            vec![("modules.json", normal.replace(r#""path": """#, r#""path": "0_Transformer""#))],
            "the transformer is in the folder 0_Transformer",
        ),
        (
            vec![
                ("modules.json", normal.clone()),
                (POOLING, r#"{"embedding_dimension": 64, "pooling_mode": "median"}"#.to_owned()),
            ],
            "pooling by median is not supported",
        ),
        (
            vec![
                ("modules.json", normal.clone()),
                (POOLING, r#"{"embedding_dimension": 64}"#.to_owned()),
                ("2_Normalize/config.json", r#"{"module_input_name": "token_embeddings"}"#.to_owned()),
            ],
            "`module_input_name` = \"token_embeddings\" is not supported",
        ),
        (vec![("modules.json", normal.clone())], "1_Pooling/config.json cannot be read"),
        (vec![("modules.json", "[".to_owned())], "modules.json: EOF"),
    ] {
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
        let error = check(&files).unwrap_err();
        assert!(error.contains(sentence), "{error}");
    }
}
