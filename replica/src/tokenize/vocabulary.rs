//! Checks of a tokenizer's vocabulary: each id has an embedding, and each text has tokens.
//!
//! The checks run before any other inspection: the library serializes a vocabulary by counting to its largest id.

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use crate::model::shortened_name;

/// Noncharacter of Unicode, which occurs in no text and in no vocabulary.
const UNKNOWN_CHARACTER: &str = "\u{10FFFF}";

/// Returns the problems of the vocabulary for a model with `embeddings` token embeddings.
pub(super) fn problems(tokenizer: &Tokenizer, embeddings: usize) -> Vec<String> {
    beyond(tokenizer, embeddings).into_iter().chain(missing_unknown(tokenizer)).collect()
}

/// Checks for ids without an embedding in the model: a text with such a token would fail at run time.
fn beyond(tokenizer: &Tokenizer, embeddings: usize) -> Option<String> {
    let mut tokens: Vec<(String, u32)> =
        tokenizer.get_vocab(true).into_iter().filter(|(_, id)| *id as usize >= embeddings).collect();
    tokens.sort_by(|(a, a_id), (b, b_id)| (a_id, a).cmp(&(b_id, b)));
    let (token, id) = tokens.first()?;
    Some(format!(
        "{} tokens have ids beyond the model's vocabulary (`vocab_size` = {embeddings} in config.json), the first is \
         `{}` = {id}; use the tokenizer that belongs to the weights, or add rows to the word embeddings",
        tokens.len(),
        shortened_name(token)
    ))
}

/// Checks for a token that stands for unknown characters: without it the tokenizer fails at the first text with one.
fn missing_unknown(tokenizer: &Tokenizer) -> Option<String> {
    let model = tokenizer.get_model();
    let (token, vocabulary) = match model {
        ModelWrapper::WordPiece(words) => (words.unk_token.as_str(), model.get_vocab_size()),
        ModelWrapper::WordLevel(words) => (words.unk_token.as_str(), model.get_vocab_size()),
        // Without a configured token, unknown characters are skipped.
        ModelWrapper::BPE(merges) => match &merges.unk_token {
            Some(token) if !knows_each_byte(tokenizer, merges) => (token.as_str(), model.get_vocab_size()),
            Some(_) | None => return None,
        },
        ModelWrapper::Unigram(pieces) => {
            return pieces.tokenize(UNKNOWN_CHARACTER).err().map(|error| {
                format!(
                    "`model` cannot tokenize unknown characters ({error}), so each text with one would fail; set `unk_id` \
                     to the id of the unknown token"
                )
            });
        }
    };
    model.token_to_id(token).is_none().then(|| {
        format!(
            "`unk_token` of `model` is `{}`, which is not one of the {vocabulary} tokens of `model.vocab`, so each text \
             with an unknown word would fail; add it to the vocabulary, or save the tokenizer again",
            shortened_name(token)
        )
    })
}

/// Returns whether every text consists of known characters: the vocabulary has a token for each byte.
fn knows_each_byte(tokenizer: &Tokenizer, model: &BPE) -> bool {
    let knows = |token: String| model.token_to_id(&token).is_some();
    if model.byte_fallback && (0..=u8::MAX).all(|byte| knows(format!("<0x{byte:02X}>"))) {
        return true;
    }
    // The last byte of a word is searched with the suffix, and all but the first one with the prefix.
    let has_affix = [&model.end_of_word_suffix, &model.continuing_subword_prefix]
        .into_iter()
        .flatten()
        .any(|affix| !affix.is_empty());
    !has_affix
        && splits_into_bytes(tokenizer)
        && ByteLevel::alphabet().into_iter().all(|byte| knows(byte.to_string()))
}

fn splits_into_bytes(tokenizer: &Tokenizer) -> bool {
    fn normalizes(part: &NormalizerWrapper) -> bool {
        match part {
            NormalizerWrapper::ByteLevel(_) => true,
            NormalizerWrapper::Sequence(parts) => parts.as_ref().iter().any(normalizes),
            _ => false,
        }
    }
    fn splits(part: &PreTokenizerWrapper) -> bool {
        match part {
            PreTokenizerWrapper::ByteLevel(_) => true,
            PreTokenizerWrapper::Sequence(parts) => parts.as_ref().iter().any(splits),
            _ => false,
        }
    }
    tokenizer.get_normalizer().is_some_and(normalizes) || tokenizer.get_pre_tokenizer().is_some_and(splits)
}

#[cfg(test)]
mod tests {
    use replica_api::input::Readable;

    use super::*;
    use crate::model::TokenizerConfig;
    use crate::tokenize::TextTokenizer;

    /// Loads a tokenizer with this `model`, pre-tokenizer and `tokenizer_config.json` for a model with 512 embeddings.
    fn load_model(model: &str, pre_tokenizer: &str, config: &str) -> Result<TextTokenizer, String> {
        let file = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": {pre_tokenizer}, "post_processor": null, "decoder": null, "model": {model}}}"#
        );
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("tokenizer.json"), file).expect("a file");
        std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a file");
        let config = TokenizerConfig::read(folder.path(), "bert", None).map_err(|error| error.to_string())?;
        let readable = Readable { max_input_tokens: 12, vocabulary: 512 };
        TextTokenizer::load_from(folder.path(), &config, false, None, readable, 2)
            .map_err(|error| error.to_string())
    }

    const BACKEND: &str = r#"{"tokenizer_class": "TokenizersBackend"}"#;

    #[test]
    fn a_tokenizer_without_its_unknown_token_is_rejected_on_loading() {
        let words = |kind: &str, token: &str, vocabulary: &str| {
            format!(
                r###"{{"type": "{kind}", "unk_token": "{token}", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100, "vocab": {vocabulary}}}"###
            )
        };
        let merges = |unknown: &str, fallback: bool, vocabulary: &str| {
            format!(
                r#"{{"type": "BPE", "unk_token": {unknown}, "byte_fallback": {fallback}, "vocab": {vocabulary}, "merges": []}}"#
            )
        };
        let pieces = |id: &str| {
            format!(r#"{{"type": "Unigram", "unk_id": {id}, "vocab": [["<unk>", 0.0], ["a", -1.0]]}}"#)
        };
        let vocabulary = |tokens: Vec<String>| {
            let tokens = tokens.iter().enumerate();
            serde_json::Value::Object(tokens.map(|(id, token)| (token.clone(), id.into())).collect())
                .to_string()
        };
        let alphabet = ByteLevel::alphabet();
        let mut bytes: Vec<String> = alphabet.into_iter().map(String::from).collect();
        bytes.sort();
        let codes: Vec<String> = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect();
        let byte_merges = merges(r#""[UNK]""#, false, &vocabulary(bytes.clone()));
        let with_affixes = |model: &str, prefix: &str, suffix: &str| {
            let mut model: serde_json::Value = serde_json::from_str(model).expect("JSON");
            model["continuing_subword_prefix"] = prefix.into();
            model["end_of_word_suffix"] = suffix.into();
            model.to_string()
        };
        let all_but_one = |tokens: &[String]| vocabulary(tokens[1..].to_vec());
        let (split, byte_level) = (
            r#"{"type": "WhitespaceSplit"}"#,
            r#"{"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": true}]}"#,
        );
        let (known, unknown) = (r#"{"[UNK]": 0, "a": 1}"#, r#"{"a": 1}"#);
        for (model, pre_tokenizer, is_valid) in [
            (words("WordPiece", "[UNK]", known), split, true),
            (words("WordPiece", "[UNK]", "{}"), split, false),
            (words("WordPiece", "[NOPE]", known), split, false),
            (words("WordLevel", "[UNK]", known), split, true),
            (words("WordLevel", "[UNK]", unknown), split, false),
            (pieces("0"), split, true),
            (pieces("null"), split, false),
            (merges(r#""[UNK]""#, false, known), split, true),
            (merges(r#""[UNK]""#, false, unknown), split, false),
            (merges("null", false, unknown), split, true),
            // Every byte is known, so no text has an unknown character.
            (merges(r#""[UNK]""#, true, &vocabulary(codes.clone())), split, true),
            (merges(r#""[UNK]""#, false, &vocabulary(codes.clone())), split, false),
            (merges(r#""[UNK]""#, true, &all_but_one(&codes)), split, false),
            (merges(r#""[UNK]""#, false, &vocabulary(bytes.clone())), byte_level, true),
            (with_affixes(&byte_merges, "", ""), byte_level, true),
            (with_affixes(&byte_merges, "", "</w>"), byte_level, false),
            (with_affixes(&byte_merges, "##", ""), byte_level, false),
            (merges(r#""[UNK]""#, false, &vocabulary(bytes.clone())), split, false),
            (merges(r#""[UNK]""#, false, &all_but_one(&bytes)), byte_level, false),
        ] {
            let loaded = load_model(&model, pre_tokenizer, BACKEND).map(drop);
            let problems = loaded.as_ref().err().map(String::as_str).unwrap_or_default();
            let is_reported = problems.contains("with an unknown word would fail")
                || problems.contains("cannot tokenize unknown characters");
            assert_eq!(!is_reported, is_valid, "{model}: {problems}");
        }
    }

    /// The library serializes a vocabulary by counting to its largest id, with a list of the holes.
    #[test]
    fn a_tokenizer_with_a_very_large_id_is_rejected_before_its_vocabulary_is_serialized() {
        let vocabulary = format!(r#"{{"[UNK]": 0, "a": 1, "z{}z": {}}}"#, "y".repeat(1 << 20), u32::MAX);
        let model = format!(
            r###"{{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": {vocabulary}}}"###
        );
        let config = r#"{"tokenizer_class": "BertTokenizer"}"#;
        let error = load_model(&model, r#"{"type": "BertPreTokenizer"}"#, config).err().expect("a refusal");
        let expected = "1 tokens have ids beyond the model's vocabulary (`vocab_size` = 512 in config.json), the first is `zyyy";
        assert!(error.contains(expected) && error.contains("yyyz` = 4294967295; use"), "{error}");
        assert!(error.len() < 512 && !error.contains(TokenizerConfig::FILE), "{error}");
    }
}
